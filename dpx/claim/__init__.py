"""Computes the privacy claim of a run: its noise multiplier, its statement, and the reasons why it has no guarantee."""
