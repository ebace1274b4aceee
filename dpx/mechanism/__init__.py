"""What is computed from a batch, with which noise."""
