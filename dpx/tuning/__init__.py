"""Searches over settings: the number of trials, their joint cost, and which of their results may be released."""
