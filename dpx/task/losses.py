"""Computes cross-entropies of one example each, in two forms: ops, or a block that does not keep the logits in memory.

Every loss is normalised within its example, never over the batch, so an example's gradient is a function of that example.

B: examples, M: positions decoded, V: vocabulary, K: classes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dpx.clipping import ops
from dpx.clipping.op import session_of
from dpx.models.dropout import record_keys
from dpx.models.fused_head import token_loss
from dpx.models.modules import Tables, decoded
from dpx.models.rotary_layers import capped
from dpx.models.shape import Model

Params = dict[str, Any]
Batch = dict[str, Array]
Counts = dict[str, Array]
Key = UInt32[Array, "2"] | UInt32[np.ndarray, "2"]


def dropout_keys(model: Model, params: Params, key: Key | None, record_B: Array) -> Array | None:
    """Returns one key for each record, or None if nothing is dropped."""
    adapters = [p for part, parameters in params.items() if part.startswith("layers") for p in parameters.get("lora", {}).values()]
    is_needed = model.dropout > 0.0 or any("dropout" in p for p in adapters)
    return None if key is None or not is_needed else record_keys(jnp.asarray(key), record_B)


def decode_losses(params: Params, label_BM: Array, has_label_BM: Array, cap: float | None = None) -> Callable[..., tuple[Array, Array]]:
    """Returns the function that a head calls as `decode(h, table, bias)`: (losses_B, correct_B) of these labels.

    A `cap` c takes logits x to c tanh(x / c).
    """
    session = session_of(params)

    def losses(h_BMH: Array, table: Any, *bias: Any) -> tuple[Array, Array]:
        # The block of a head is of one table.
        if session is not None and session.fused and not isinstance(table, Tables):
            return token_loss(label_BM, has_label_BM, h_BMH, table, *bias, session=session, cap=cap)
        return token_losses(capped(decoded(h_BMH, table, *bias), cap), label_BM, has_label_BM)

    return losses


def token_losses(logits_BMV: Array, label_BM: Array, has_label_BM: Array) -> tuple[Array, Array]:
    """Returns the mean cross-entropy over an example's masked positions, and the number of right answers.

    The loss is 0 for an example without masked positions. A label that no logit has is not counted.
    """
    weight_BM = (has_label_BM & ops.is_in(label_BM, logits_BMV.shape[-1])).astype(logits_BMV.dtype)
    label_logit_BM = jnp.take_along_axis(logits_BMV, label_BM[:, :, None], axis=2, mode="clip")[:, :, 0]
    loss_BM = jax.nn.logsumexp(logits_BMV, axis=-1) - label_logit_BM
    # Right if no logit is larger: argmax would cost a third of a small model's step.
    correct_B = jnp.sum((label_logit_BM >= logits_BMV.max(-1)) * weight_BM, axis=1)
    return jnp.sum(loss_BM * weight_BM, axis=1) / jnp.maximum(weight_BM.sum(1), 1), correct_B


def class_losses(logits_BK: Array, label_B: Array) -> tuple[Array, Array]:
    """Returns the cross-entropy of the label, and whether its logit was the first of the largest."""
    picked_B = jnp.take_along_axis(logits_BK, label_B[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_BK, axis=-1) - picked_B, (jnp.argmax(logits_BK, axis=-1) == label_B).astype(logits_BK.dtype)


def confusion(answered_B: Int[Array, " B"], label_B: Int[Array, " B"], is_padding_B: Array, classes: int) -> Float[Array, "K K"]:
    """Counts the answers (columns) for each true class (rows), without padding."""
    weight_B = jnp.where(is_padding_B, 0.0, 1.0)
    return jnp.zeros((classes, classes)).at[label_B, answered_B].add(weight_B)
