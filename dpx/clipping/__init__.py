"""Per-example-clipped sums of gradients: one interface, several ways to compute it."""
