"""Analyses McKenna et al. 2025, Scaling Laws for Differentially Private Language Models."""
