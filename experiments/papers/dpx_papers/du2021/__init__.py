"""Analyses Du & Mi 2021, DP-FP: Differentially Private Forward Propagation for Large Models."""
