"""A privacy claim as it travels: events, accountants, ledger, statement. NumPy only; no jax."""
