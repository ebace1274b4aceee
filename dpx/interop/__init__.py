"""Checkpoints in the layout of Hugging Face: their shape, weights and tokenizer in, and a run's weights out."""
