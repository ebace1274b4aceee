"""Compares noise on k activations with noise on d gradients (Du and Mi 2021, proposition 1). Arithmetic only."""

import math
from collections.abc import Mapping, Sequence

from dpx_papers.analysis import Made, analysis


@analysis()
def dpfp_prop1_noise_dimension(
    dimensions: Mapping[str, Sequence[int]], forward_noise_multiplier: float, gradient_noise_multiplier: float, batch_size: int
) -> Made:
    """Compares noise with a signal of norm 1.

    Attributes:
        dimensions: Dimensions of the noisy vector and of the model, by model.
        forward_noise_multiplier: Sigma in the forward pass.
        gradient_noise_multiplier: Sigma of DP-SGD.
        batch_size: Rows of a step.
    """
    rows = []
    for model, (k, d) in dimensions.items():
        forward = forward_noise_multiplier * math.sqrt(k)
        gradient = gradient_noise_multiplier * math.sqrt(d) / batch_size
        row = {"model": model, "k": k, "d": d, "d_over_k": d / k, "forward_norm": forward, "forward_power": forward**2}
        rows.append(row | {"mean_gradient_norm": gradient, "mean_gradient_power": gradient**2})
    return {"noise_dimension": rows}
