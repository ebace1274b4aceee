"""One compiled function for each (model, method), shared by every test that needs it: compiling is what these tests cost."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.clipping.groups import PerLayerWeights
from tests.clipping.batches import bert, objective

DROPOUT_KEY = jax.random.PRNGKey(7)


@cache
def clipped(method: str, *, layers=2, next_sentence=True, fused=True, kept_bytes=2**30, per_layer=False, dropout=0.0, dtype="float32"):
    """(params, rows, factor_B, is_padding_B, limit, stability) -> ClippedSum; losses are multiplied by `factor_B`.

    stability < 0 is flat clipping. Per layer: `limit` is ignored, the clipping norm is 3.
    """
    subject = objective(bert(layers=layers, dropout=dropout, dtype=dtype), next_sentence=next_sentence)

    def losses(params, pair):
        losses_B, counts = subject.losses(params, pair["rows"], DROPOUT_KEY)
        return losses_B * pair["factor"], counts

    def run(params, rows, factor_B, is_padding_B, limit, stability):
        def weights(norms):
            return jnp.where(stability < 0, limit / jnp.maximum(norms, limit), limit / (norms + stability))

        chosen = PerLayerWeights(3.0) if per_layer else weights
        options = {} if method == "vmap" else {"fused": fused, "kept_bytes": kept_bytes}
        pair = {"rows": rows, "factor": factor_B}
        return dpx.clipped_sum(losses, params, pair, weights=chosen, is_padding_B=is_padding_B, method=method, checked=False, **options)

    return jax.jit(run)


def run(function, params, rows, *, factor=None, padding=None, limit=3.0, stability=-1.0):
    B = rows["length"].shape[0]
    factor_B = np.ones(B, np.float32) if factor is None else factor
    padding_B = np.zeros(B, bool) if padding is None else padding
    return function(params, rows, factor_B, padding_B, limit, stability)
