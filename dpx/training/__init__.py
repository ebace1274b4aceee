"""The one loop, its pure step, checkpoints and metrics."""
