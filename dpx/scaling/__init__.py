"""Scaling laws of private training (McKenna et al. 2025).

Measured losses give a surface, and the surface gives the best configuration of a budget.

Every stage is a pure function of arrays: `measurements` (one tidy table) -> `smoothing` (choice over rates, rolling mean, isotonic) ->
`extrapolation` (beyond the steps that were run) -> `surface` (loss at any model, steps and noise-batch ratio inside the grid) -> `query`
(the best configuration for compute, epsilon, data and delta). Beside them: `parametric` (forms L1 and L2), `vulnerability`, `published`.
"""
