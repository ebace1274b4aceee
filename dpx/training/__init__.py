"""The training loop, its pure step, checkpoints and metrics."""
