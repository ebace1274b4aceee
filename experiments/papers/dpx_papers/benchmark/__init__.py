"""Benchmarks of clipped sums and steps, beside torch, Opacus and jax-privacy, in separate processes."""
