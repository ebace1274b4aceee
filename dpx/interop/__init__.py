"""Reads and writes checkpoints in the layout of Hugging Face: shape, weights and tokenizer are read, and a run's weights are written."""
