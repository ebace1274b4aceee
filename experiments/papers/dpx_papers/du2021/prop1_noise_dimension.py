"""Compares noise on k activations with noise on d gradients (Du and Mi 2021, proposition 1). Arithmetic only."""

import math
from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table


@declaration
class DpfpProp1NoiseDimension:
    """Compares noise with a signal of norm 1.

    Attributes:
        dimensions: Dimensions of the noisy vector and of the model, by model.
        forward_noise_multiplier: Sigma in the forward pass.
        gradient_noise_multiplier: Sigma of DP-SGD.
        batch_size: Rows of a step.
    """

    dimensions: dict[str, Sequence[int]]
    forward_noise_multiplier: float
    gradient_noise_multiplier: float
    batch_size: int

    def __call__(self) -> list[Table]:
        rows = []
        for name, (activations, parameters) in self.dimensions.items():
            forward = self.forward_noise_multiplier * math.sqrt(activations)
            gradient = self.gradient_noise_multiplier * math.sqrt(parameters) / self.batch_size
            rows.append((name, activations, parameters, parameters / activations, forward, forward**2, gradient, gradient**2))
        columns = ("model", "k", "d", "d_over_k", "forward_norm", "forward_power", "mean_gradient_norm", "mean_gradient_power")
        notes = (
            "the forward noise meets one row of norm at most C = 1; the gradient noise meets the mean over the batch, of norm at most 1",
            "fewer noisy coordinates is what the proposition counts; it says nothing of gradients that reach the encoder without noise",
        )
        return [Table("noise_dimension", columns, tuple(rows), "noise of DP-FP and of DP-SGD", notes)]

    def pictures(self) -> list[Picture]:
        """Plots the number of noisy coordinates, and the noise's norm against a signal of norm at most 1."""
        model: dict[str, Any] = {"table": "noise_dimension", "x": "model", "x_scale": "category"}
        counts = (("k", "DP-FP: k"), ("d", "DP-SGD: d"))
        norms = (("forward_norm", "DP-FP, one row"), ("mean_gradient_norm", "DP-SGD, mean gradient"))
        panels = (
            Lines(marks=("k", "d"), names=counts, y_scale="log", y_label="noisy coordinates", **model),
            Lines(marks=("forward_norm", "mean_gradient_norm"), names=norms, y_label="norm of the noise", **model),
        )
        caption = "Noisy coordinates of DP-FP and DP-SGD, and the norm of the noise against a signal of norm at most 1."
        return [Picture("dpfp_noise_dimension", caption, panels)]
