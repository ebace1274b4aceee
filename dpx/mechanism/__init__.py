"""The value that a step computes from a batch, and the noise that it adds."""
