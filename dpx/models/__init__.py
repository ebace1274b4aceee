"""Models: their declared shapes (no jax) and their flax modules."""
