"""The records of a statement, their seals, and whether the parts of a release agree. No jax."""
