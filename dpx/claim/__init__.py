"""What a run may claim: noise for a target, the statement, and what stands in the way of a guarantee."""
