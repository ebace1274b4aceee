"""Tasks: per-example losses, and the metrics that are computed from them."""
