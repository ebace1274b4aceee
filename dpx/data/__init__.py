"""From text to a memory-mapped store of fixed-length rows, stable under removing one unit."""
