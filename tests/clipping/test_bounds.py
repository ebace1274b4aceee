"""The error terms of norms: depths of accumulation as the compiler has them, what ordinary norms and programs are charged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from dpx.clipping import bounds, norms
from dpx.clipping.rounding import CHAIN
from dpx.cost.traced import temporary_bytes
from tests.clipping.test_cost import private, shapes

U = 2.0**-24


def absorbed(reduce, n: int) -> float:
    """How many terms of nearly u are lost, one after another, in a sum that a term of 1 begins, ends or halves."""
    lost = []
    for place in (0, n // 2, n - 1):
        terms = np.full(n, 0.999 * U, np.float32)
        terms[place] = 1
        exact = np.float64(terms).sum()
        lost.append((exact - np.float64(reduce(jnp.asarray(terms)))) / (U * exact))
    return max(lost)


def last(n: int, rows: int):
    """The inner product of `n` terms with ones, as one of `rows` squared; one compiled program for each shape."""
    return jax.jit(lambda x_n: norms.outer(jnp.broadcast_to(x_n, (1, rows, n)), jnp.ones((1, rows, n)))[0, -1, -1])


@pytest.mark.parametrize(("n", "rows"), [(96, 9), (768, 9), (4096, 9), (6000, 2), (norms.WIDE_ROWS + 500, 2), (norms.WIDE_ROWS + 500, 9)])
def test_no_term_of_an_inner_product_is_rounded_more_often_than_stated(n, rows):
    assert 1 < absorbed(last(n, rows), n) <= bounds.product_depth(n)


def _products(jaxpr):
    """All `dot_general` of a program, those of bodies too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for body in (eqn.params.get("jaxpr"), eqn.params.get("call_jaxpr")):
            if body is not None:
                yield from _products(getattr(body, "jaxpr", body))


def test_wide_rows_are_cut_whatever_the_compiler_does():
    n = norms.WIDE_ROWS + 500
    x, ones = jax.ShapeDtypeStruct((2, 3, n), jnp.float32), jnp.ones((2, 3, n))
    (choice,) = [eqn for eqn in jax.make_jaxpr(lambda x: norms.outer(x, ones))(x).eqns if "branches_platforms" in eqn.params]
    drawn = np.random.default_rng(0).normal(size=(2, 3, n)).astype(np.float32)
    wanted = np.einsum("bmv,bnv->bmn", np.float64(drawn), np.ones((2, 3, n)))
    assert len(choice.params["branches"]) == 2
    for branch in choice.params["branches"]:
        (found,) = jaxpr_as_fun(branch)(jnp.asarray(drawn), ones)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
        depths = [eqn.invars[0].aval.shape[-1] for eqn in _products(branch.jaxpr)]
        assert max(depths) <= CHAIN and sum(depths) == n


def test_no_term_of_a_product_with_a_vector_is_rounded_more_often_than_stated():
    n = 3 * norms.WIDE_ROWS
    contract = jax.jit(lambda x_n: jnp.einsum("btp,bp->bt", jnp.broadcast_to(x_n, (1, 9, n)), jnp.ones((1, n)), precision="highest")[0, -1])
    assert absorbed(contract, n) <= bounds.product_depth(n, by_vector=True)


@pytest.mark.parametrize("tokens", [96, 4096])
def test_no_term_of_a_gradient_is_rounded_more_often_than_it_has_tokens(tokens):
    contract = jax.jit(lambda x_n: norms.summed(jnp.broadcast_to(x_n[None, :, None], (1, tokens, 64)), jnp.ones((1, tokens, 64)))[0, 0])
    assert 1 < absorbed(contract, tokens) <= tokens


@pytest.mark.parametrize("n", [24, 768, 2**16])
def test_no_term_of_another_sum_is_rounded_more_often_than_stated(n):
    total = jax.jit(lambda x_n: norms.squares(jnp.sqrt(jnp.broadcast_to(x_n, (2, n))))[0])
    over_tokens = jax.jit(lambda x_n: jnp.broadcast_to(x_n[None, :, None], (2, n, 8)).sum(1)[0, 0])
    assert absorbed(total, n) <= bounds.sum_depth(n) + 1
    assert absorbed(over_tokens, n) <= bounds.sum_depth(n)


def test_row_lengths_are_never_too_small():
    x = jnp.asarray([[3.0, 4.0], [1e-25, 0.0], [0.0, 0.0], [1e25, 0.0]])
    lengths = np.asarray(bounds.lengths(x))
    assert lengths[0] == 5 and 1e-25 <= lengths[1] < 1e-18 and lengths[2] == 0 and lengths[3] == np.inf


@pytest.mark.parametrize(("tokens", "most"), [(32, 0.0), (128, 0.0), (512, 1.2e-3)])
def test_rows_that_do_not_cancel_are_clipped_by_their_computed_norm(tokens, most):
    drawn = np.random.default_rng(tokens)
    a, g = (jnp.asarray(drawn.normal(size=(1, tokens, width)), jnp.float32) for width in (192, 768))
    bounded = jax.jit(norms.gram)(a, g)
    assert 0 <= np.sqrt(bounds.upper(bounded) / bounded.square)[0] - 1 <= most


def plainly(part):
    return jnp.maximum(part.square, 0) if isinstance(part, bounds.Bounded) else part


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
def test_operations_beside_a_step_that_does_not_bound_its_norms(size, monkeypatch):
    subject, *arguments = shapes(size, 128, 16)

    def operations():
        costs = jax.jit(private(subject)).lower(*arguments).cost_analysis()
        assert costs is not None
        return costs["flops"]

    bounded = operations()
    monkeypatch.setattr(bounds, "upper", plainly)
    assert 1 < bounded / operations() <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
def test_temporaries_beside_a_step_that_does_not_bound_its_norms(size, monkeypatch):
    subject, *arguments = shapes(size, 128, 16)
    bounded = temporary_bytes(private(subject), *arguments)
    monkeypatch.setattr(bounds, "upper", plainly)
    assert bounded <= 1.05 * temporary_bytes(private(subject), *arguments)
