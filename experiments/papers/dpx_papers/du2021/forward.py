"""Computes the forward pass of DP-FP (Du and Mi 2021, algorithm 1): a row of features is clipped, gets noise, and a linear head reads
it.

The noise is in the loss and not in the gradient. Encoder and pooler are below the noise and get the gradient of their raw row, so only the
head's update is a function of noisy rows and labels.

B: rows of a micro-batch, with padding; H: width of the features; K: classes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def clipped_rows(h_BH: Float[Array, "B H"], clipping_norm: float) -> Float[Array, "B H"]:
    """Returns h * min(1, C / ||h||) for each row, as the mechanism `dp_fp` clips; a row of zeros stays zero and has the derivative 1."""
    from dpx.mechanism.dp_fp import clipped

    return clipped(h_BH, clipping_norm)[0]


def noisy_rows(
    h_BH: Float[Array, "B H"], noise_BH: Float[Array, "B H"], clipping_norm: float, noise_multiplier: float | Float[Array, ""]
) -> Float[Array, "B H"]:
    """Returns clipped rows with noise of standard deviation `noise_multiplier * clipping_norm` on each coordinate.

    `noise_BH` is standard normal. At the paper's C = 1 the noise multiplier is its sigma.
    """
    return clipped_rows(h_BH, clipping_norm) + noise_multiplier * clipping_norm * noise_BH


def head_losses(kernel_HK: Float[Array, "H K"], bias_K: Float[Array, " K"], x_BH: Float[Array, "B H"], label_B: Int[Array, " B"]) -> Array:
    """Returns the cross-entropy of each row's label by a linear head, [B]."""
    logits_BK = x_BH @ kernel_HK + bias_K
    return jax.nn.logsumexp(logits_BK, axis=-1) - jnp.take_along_axis(logits_BK, label_B[:, None], axis=1)[:, 0]


def mean_over_rows(losses_B: Float[Array, " B"], is_row_B: Array) -> Float[Array, ""]:
    """Returns the mean over the rows that exist; a padded row contributes exactly zero, and the result is zero without rows."""
    return jnp.sum(jnp.where(is_row_B, losses_B, 0.0)) / jnp.maximum(jnp.sum(is_row_B), 1)
