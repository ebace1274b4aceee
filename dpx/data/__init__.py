"""Converts text to a memory-mapped store of fixed-length rows, stable under the removal of one unit."""
