"""`method="traced"`: the clipped sum of a batch's loss by tracing one row of it, whatever that is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.clipped_sum import clipped_sum


def losses(params, batch):
    """Products, a lookup, a scan and a power: [B], and a count."""
    word_TBH = params["word"][batch["tokens"]].swapaxes(0, 1)

    def round_of(h_BH, x_BH):
        h_BH = jnp.tanh(h_BH @ params["mix"] + x_BH)
        return h_BH, h_BH

    _, h_TBH = jax.lax.scan(round_of, jnp.zeros_like(word_TBH[0]), word_TBH)
    losses_B = jnp.mean(jnp.square(h_TBH.sum(0) ** params["power"]), axis=1)
    return losses_B, {"tokens": jnp.full(losses_B.shape, batch["tokens"].shape[1], jnp.float32)}


def drawn(examples: int):
    rng = np.random.default_rng(0)
    params = {"word": jnp.asarray(rng.uniform(0.1, 1, (7, 4)), jnp.float32), "mix": jnp.asarray(rng.uniform(0, 0.5, (4, 4)), jnp.float32)}
    return params | {"power": jnp.float32(1.3)}, {"tokens": jnp.asarray(rng.integers(0, 7, (examples, 5)))}


@pytest.mark.parametrize(
    ("frozen", "rows"), [(("mix",), 2), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (((), 1), ((), 2), (("mix",), 1)))]
)
def test_it_is_the_sum_of_the_reference(rows, frozen):
    params, batch = drawn(6)
    trained = {name: leaf for name, leaf in params.items() if name not in frozen}
    frozen = {name: params[name] for name in frozen} or None
    options = {
        "weights": lambda norms_B: 0.5 / jnp.maximum(norms_B, 0.5),
        "is_padding_B": jnp.arange(6) >= 4,
        "rows_per_unit": rows,
        "frozen": frozen,
    }
    sums = jax.jit(lambda: [clipped_sum(losses, trained, batch, method=method, **options) for method in ("traced", "vmap")])()
    assert float(sums[0].norms_B[0]) > 0.5
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), *sums)
