"""Analyses of the scaling laws on measurements whose truth is known, with noise that needs no accountant."""

import dataclasses
from typing import Any

import numpy as np

from dpx.config import declare
from dpx.cost.surface import grid_of, surface_of
from dpx.packages import option_file
from dpx.privacy import closed_form
from dpx_papers.mckenna2025.lab import Fitted, Lab
from tests.scaling.synthetic import BATCH, PARAMETERS, RATIOS, STEPS, TOKENS, form_l2, measured


def lab(path=None, **changes: Any) -> Lab:
    """The laptop's, which the synthetic grid is like; `path` is where `table` wrote."""
    declared = declare(option_file("analysis/lab", "laptop"), "lab")
    return dataclasses.replace(declared, **({"computes": 13, "steps_above": 500, "measurements": path and str(path)} | changes))


def table(folder, truth=form_l2, **options):
    path = folder / "measurements.csv"
    measured(truth, **options).write(path)
    return path


def fitted(truth=form_l2, **options) -> Fitted:
    found = measured(truth, **options)
    grid = grid_of(found)
    return Fitted(found, grid, surface_of(grid, BATCH, TOKENS), grid.left_out)


def fixed_batches(self: Lab, epsilon: float):
    """In place of `Lab.ratio`: one Gaussian release a use, of which there may be a part."""
    if np.isinf(epsilon):
        return lambda size, batch_size, steps: (np.zeros(np.shape(batch_size)), np.zeros(np.shape(batch_size), bool))
    mu = closed_form.mu(epsilon, self.delta)

    def ratio(size, batch_size, steps):
        uses = np.maximum(steps * batch_size / size, 1e-3)
        return np.where(batch_size <= size, np.sqrt(uses) / mu / batch_size, np.nan), np.zeros(np.shape(batch_size), bool)

    return ratio


__all__ = ["BATCH", "PARAMETERS", "RATIOS", "STEPS", "TOKENS", "fitted", "fixed_batches", "form_l2", "lab", "table"]
