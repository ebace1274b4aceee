"""What a step with carriers costs beside plain fine-tuning at BERT-Base's width, without a clock: products of the traced programs."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import dpx
from dpx.clipping.groups import FactoredWeights, flat
from dpx.clipping.readers import merged
from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.mechanism.rgp import Rgp
from dpx.models import trainable
from dpx.models.trained import Everything, Matching, Trained
from dpx.randomness import RootSecret
from dpx.task.declared_task import Classification
from dpx.task.objective import objective
from tests.clipping.batches import SPECIAL
from tests.clipping.test_cost import VOCABULARY
from tests.models.declared import declared

EXAMPLES = 8
TRAINED: dict[str, Trained] = {
    "as in the paper's code": Matching(paths=["layers/*/kernel", "pooler/*", "classifier/*"]),
    "all": Everything(),
}


@cache
def programs(trained: str, rank: int):
    """(a step with carriers, plain fine-tuning of all parameters, their arguments), for one microbatch; nothing is allocated."""
    mechanism, of = Rgp(rank=rank), objective(declared("base"), Classification(classes=2), VOCABULARY, SPECIAL)
    key, scalar = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32)
    rows = {name: scalar for name in ("segment_start", "length", "label", "record")}
    rows["tokens"] = jax.ShapeDtypeStruct((EXAMPLES, 128), jnp.int32)
    own, frozen = jax.eval_shape(lambda key: trainable.split(of.init(key), TRAINED[trained].selection()), key)
    drawn = jax.tree.map(lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype), mechanism.draw_first(RootSecret.from_seed(0), 0, own))
    kept = jax.eval_shape(mechanism.kept_from_start, own)

    def step(own, kept, drawn, frozen, batch):
        """Carriers, the clipped sum, and the rebuilt gradient, all of one microbatch."""
        given = mechanism.reparametrised(own, kept, drawn)
        weights = FactoredWeights(flat(1.0), mechanism.gradient_factor)
        options = {"weights": weights, "checked": False}
        total = dpx.clipped_sum(of.losses, given.trained, batch, frozen=merged(given.constants, frozen), **options).total
        return mechanism.rebuilt(total, given.trained)

    def plain(own, kept, drawn, frozen, batch):
        return jax.grad(lambda params: of.losses(params, batch)[0].sum())(merged(own, frozen))

    return step, plain, (own, kept, drawn, frozen, jax.eval_shape(of.batch, key, rows))


CELLS = [(trained, rank, most) for trained in TRAINED for rank, most in ((1, 0.70), (16, 0.75))]


@pytest.mark.parametrize(("trained", "rank", "most"), [CELLS[0], *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS[1:])])
def test_products_of_a_step_beside_those_of_plain_fine_tuning(trained, rank, most):
    step, plain, arguments = programs(trained, rank)
    ratio = matmul_flops(step, *arguments) / matmul_flops(plain, *arguments)
    print(f"{trained}, rank {rank}, {EXAMPLES} examples: products {ratio:.4f} of plain fine-tuning's")
    assert 0.5 < ratio <= most < 1.25


@pytest.mark.slow
def test_temporaries_of_a_step_beside_those_of_plain_fine_tuning():
    step, plain, arguments = programs("as in the paper's code", 1)
    ratio = temporary_bytes(step, *arguments) / temporary_bytes(plain, *arguments)
    print(f"temporaries {ratio:.4f}")
    assert ratio <= 1.25
