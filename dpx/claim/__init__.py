"""The claim of a run: noise for a target, the statement, and reasons that prevent a guarantee."""
