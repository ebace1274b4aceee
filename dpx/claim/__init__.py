"""What a run may claim: noise for a target, the statement, and what prevents a guarantee."""
