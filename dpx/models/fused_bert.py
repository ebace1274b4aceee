"""BERT's loss from fused blocks, for wrapped parameters: the same function as the modules of bert.py, hand-scheduled.

B: examples, T: tokens, H: width, M: masked slots.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import norms, ops
from dpx.clipping.probes import apply, session_of
from dpx.models import dropout as drop
from dpx.models.bert import at_least_float32, embed
from dpx.models.fused_head import MaskedHead
from dpx.models.fused_layers import WEIGHTS, LayerStack
from dpx.models.shape import Bert


def masked_losses(model: Bert, params: Any, batch: dict[str, Array], segment_BT: Array, keys_B: Array | None) -> tuple[Array, Array, Array]:
    """(masked-LM losses_B, correct_B, last hidden state x_BTH)."""
    embeddings = params["embeddings"]
    tables = embeddings["word"], embeddings["position"], embeddings["segment"]
    x_BTH, tie = embed(model, *tables, batch["tokens"], segment_BT, batch["slots"].shape[1])
    x_BTH = ops.layer_norm(x_BTH, embeddings["norm"]["scale"], embeddings["norm"]["bias"], model.layer_norm_eps)
    x_BTH = drop.dropout(x_BTH, keys_B, -1, drop.EMBEDDING, model.dropout)
    x_BTH = apply(LayerStack(model, forms(params["layers"], x_BTH)), params["layers"], (x_BTH, batch["length"], keys_B))
    leaves = params["mlm"] | {"word": embeddings["word"]}
    losses_B, correct_B = apply(MaskedHead(model), leaves, (x_BTH, batch["slots"], batch["labels"], batch["is_slot"], tie))
    return losses_B, correct_B, x_BTH


def next_sentence_logits(params: Any, x_BTH: Array) -> Array:
    """[B,2], float32 or wider, from the first token's hidden state."""
    pooled_BH = jnp.tanh(ops.dense(x_BTH[:, 0], params["pooler"]["kernel"], params["pooler"]["bias"]))
    return at_least_float32(ops.dense(pooled_BH, params["next_sentence"]["kernel"], params["next_sentence"]["bias"]))


def forms(layers: Any, x_BTH: Array) -> tuple[norms.Form, ...]:
    """The norm form of each of a layer's weights, from the shapes and the memory the session may use."""
    return tuple(ops.form_of(x_BTH.shape[0], x_BTH.shape[1], layers[weight]["kernel"]) for weight in WEIGHTS) if session_of(layers) else ()
