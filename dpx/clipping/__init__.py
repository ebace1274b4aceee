"""Computes sums of clipped per-example gradients: one interface, several methods."""
