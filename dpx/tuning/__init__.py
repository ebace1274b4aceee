"""Searches over settings: how many trials, what they cost together, and what of them may be released."""
