"""Mechanisms: what each step computes from a batch, and the noise that is added to it."""
