"""Carriers of weight matrices against float64 code that forms every example's gradient, and what is refused."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import dpx
from dpx.clipping.groups import FactoredWeights, flat
from dpx.clipping.readers import merged
from dpx.declaration import ConfigError
from dpx.mechanism import carriers
from dpx.mechanism.rgp import Rgp
from dpx.models import trainable
from dpx.models.shape import Bert
from dpx.models.trained import Adapters, Biases, Everything, LastLayer, Matching, TopLayers
from dpx.randomness import RootSecret, path_name
from dpx.task.declared_task import Classification, MaskedLanguageModel
from tests.clipping.batches import QUICKLY, assert_trees_close, float64_gradients, parameters, squared_norm
from tests.clipping.families import rows, subject

SECRET = RootSecret.from_seed(5)
RANK, LIMIT = 2, 0.3
# Compiled as in a step: one program, where every operation by itself would be one.
REPARAMETRISED = jax.jit(Rgp(rank=RANK).reparametrised)
BODY_AND_HEAD = Matching(paths=("layers/*/kernel", "pooler/*", "classifier/*"))


def orthonormal(matrix):
    return np.linalg.qr(matrix)[0]


def kernel_paths(paths):
    """Those that name a stack of weight matrices of the layers."""
    return [path for path in paths if path.startswith("layers/") and path.endswith("/kernel")]


@cache
def case(family="bert_classifier", train=BODY_AND_HEAD, **changes):
    """(objective, trained parameters, frozen ones, what the loss is differentiated by, a batch)."""
    of, mechanism = subject(family, **changes), Rgp(rank=RANK)
    trained, frozen = trainable.split(parameters(of), train.selection())
    drawn = np.random.default_rng(1)
    # By numpy: jax would compile a program for each shape.
    start = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) - np.float32(drawn.normal(0, 0.1, leaf.shape))), trained)
    kept = mechanism.kept_from_start(start)
    given = REPARAMETRISED(trained, kept, mechanism.draw_first(SECRET, 3, trained))
    return of, trained, frozen, given, rows(of)


def test_carriers_are_the_power_method_from_a_gaussian_start():
    """One round, as in algorithm 2 of the paper, in float64: B' <- orth(M' S), A <- orth(M B')."""
    _, trained, _, given, _ = case()
    drawn = np.random.default_rng(1)
    starts = jax.tree.map(lambda leaf: np.asarray(leaf) - np.float32(drawn.normal(0, 0.1, leaf.shape)), trained)
    for path in kernel_paths(flatten_dict(trained, sep="/")):
        kernel, start = (np.float64(flatten_dict(tree, sep="/")[path]) for tree in (trained, starts))
        key = jax.random.wrap_key_data(jnp.asarray(SECRET.key("carriers", 3, path)), impl="threefry2x32")
        first = np.float64(jax.random.normal(key, (*kernel.shape[:2], RANK)))
        for layer, update in enumerate(kernel - start):
            b = orthonormal(update.T @ first[layer])
            a = orthonormal(update @ b)
            found = {name: flatten_dict(given.trained, sep="/")[carriers.factor_path(path, name)][layer] for name in "ab"}
            np.testing.assert_allclose(found["a"], a, atol=2e-5)
            np.testing.assert_allclose(found["b"], b.T, atol=2e-5)
            share = np.sum(np.square(a.T @ update @ b)) / np.sum(np.square(update))
            assert given.metrics[f"carriers/captured/{path}"][layer] == pytest.approx(share, rel=1e-4)
            assert share > 0.1


def test_the_model_computes_what_it_did():
    of, trained, frozen, given, batch = case()
    losses = jax.jit(of.losses)
    before = losses(merged(trained, frozen), batch)[0]
    after = losses(merged(given.trained, merged(given.constants, frozen)), batch)[0]
    np.testing.assert_allclose(after, before, rtol=2e-6)


def in_the_papers_form(of, trained, frozen, given):
    """A loss of (carriers and other trained parameters): every kernel is A B + stop_gradient(W - A B), in the types it is given."""
    paths = kernel_paths(flatten_dict(trained, sep="/"))

    def losses(variables, batch):
        flat_variables = flatten_dict(variables, sep="/")
        kernels = {}
        for path in paths:
            kernel = jnp.asarray(np.asarray(flatten_dict(trained, sep="/")[path]), next(iter(flat_variables.values())).dtype)
            product = flat_variables.pop(carriers.factor_path(path, "a")) @ flat_variables.pop(carriers.factor_path(path, "b"))
            kernels[path] = product + jax.lax.stop_gradient(kernel - product)
        return of.losses(merged(unflatten_dict(flat_variables | kernels, sep="/"), frozen), batch)

    return losses


def clipped(gradients, factor, limit, is_padding):
    """The sum of examples' gradients, multiplied by `factor(path)` and then clipped together, and their norms."""
    scaled = [jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * factor(path_name(path)), one) for one in gradients]
    norms = np.sqrt([squared_norm(one) for one in scaled])
    weights = np.where(is_padding, 0.0, np.minimum(1.0, limit / norms))
    return jax.tree.map(lambda *leaves: sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True)), *scaled), norms


EXACT = [
    ("bert_classifier", BODY_AND_HEAD, {}),
    ("roberta_classifier", TopLayers(layers=1), {}),
    ("bert", Everything(), {"layers": 1}),
    ("bert_classifier", Everything(), {}),
    ("bert_classifier", BODY_AND_HEAD, {"scan": False}),
    ("decoder_classifier", Matching(paths=("layers/*/kernel", "classifier/*")), {}),
]
# One step in which everything of another model is trained is in tests/training/test_rgp.py.
WHICH = [pytest.param(*case, marks=[pytest.mark.slow] * (number > 0)) for number, case in enumerate(EXACT)]


@pytest.mark.parametrize(("family", "train", "changes"), WHICH)
@pytest.mark.parametrize("method", ["book_keeping", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vmap", "ghost"))])
def test_the_clipped_sum_is_that_of_float64_gradients_of_the_papers_loss(family, train, changes, method):
    of, trained, frozen, given, batch = case(family, train, **changes)
    mechanism = Rgp(rank=RANK)
    gradients, _ = float64_gradients(in_the_papers_form(of, trained, frozen, given), given.trained, batch)
    is_padding = np.arange(len(gradients)) == 2
    limit = float(np.median(clipped(gradients, mechanism.gradient_factor, 1.0, is_padding)[1]))
    expected, norms = clipped(gradients, mechanism.gradient_factor, limit, is_padding)
    weights = FactoredWeights(flat(limit), mechanism.gradient_factor)

    @partial(jax.jit, compiler_options=QUICKLY)
    def summed(variables, constants, frozen, batch):
        beside = merged(constants, frozen)
        options: dict[str, Any] = {"weights": weights, "is_padding_B": jnp.asarray(is_padding), "method": method, "checked": False}
        return dpx.clipped_sum(of.losses, variables, batch, frozen=beside, **options)

    found = summed(given.trained, given.constants, frozen, batch)
    assert_trees_close(found.total, expected, relative=5e-5, floor=1e-6 * limit, terms=gradients)
    np.testing.assert_allclose(found.norms_B[~is_padding], norms[~is_padding], rtol=1e-3)
    assert 0 < np.sum(norms[~is_padding] > limit) < np.sum(~is_padding)
    # Padding adds nothing, whatever it holds: with other tokens in its row every bit of the sum is the same.
    other = jax.tree.map(lambda leaf: np.asarray(leaf)[[0, 1, 0, *range(3, len(leaf))]], batch)
    jax.tree.map(np.testing.assert_array_equal, found.total, summed(given.trained, given.constants, frozen, other).total)


def test_the_rebuilt_gradient_is_the_papers_formula():
    """In float64 and the paper's letters, W' = L R with L = B' and R = A': dL R + L dR - L L' dL R."""
    _, trained, _, given, _ = case()
    drawn = np.random.default_rng(2)
    noisy = jax.tree.map(lambda leaf: jnp.asarray(drawn.normal(size=leaf.shape), jnp.float32), given.trained)
    rebuilt = Rgp(rank=RANK).rebuilt(noisy, given.trained)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(trained)
    for path, leaf in flatten_dict(rebuilt, sep="/").items():
        if not path.endswith("/kernel") or not path.startswith("layers/"):
            np.testing.assert_array_equal(leaf, flatten_dict(noisy, sep="/")[path])
            continue
        for layer in range(leaf.shape[0]):
            (R, d_R), (L, d_L) = (
                [np.float64(flatten_dict(tree, sep="/")[carriers.factor_path(path, name)][layer]).T for tree in (given.trained, noisy)]
                for name in "ab"
            )
            expected = d_L @ R + L @ d_R - L @ L.T @ d_L @ R
            np.testing.assert_allclose(leaf[layer], expected.T, atol=1e-5)


# The formula that is compared above, on gradients of a model.
@pytest.mark.slow
def test_without_clipping_and_noise_the_rebuilt_gradient_is_a_projection_of_the_kernels_own():
    """What the directions of the carriers hold of the true gradient stays, and nothing else comes in."""
    of, trained, frozen, given, batch = case()
    beside = merged(given.constants, frozen)
    run = jax.jit(lambda trained, frozen: dpx.plain_sum(of.losses, trained, batch, frozen=frozen).total, compiler_options=QUICKLY)
    summed, own = run(given.trained, beside), flatten_dict(run(trained, frozen), sep="/")
    rebuilt = flatten_dict(Rgp(rank=RANK, head_factor=1.0).rebuilt(summed, given.trained), sep="/")
    for path in kernel_paths(rebuilt):
        for layer in range(own[path].shape[0]):
            a, b = (np.float64(flatten_dict(given.trained, sep="/")[carriers.factor_path(path, name)][layer]) for name in "ab")
            outside = (np.eye(len(a)) - a @ a.T) @ np.float64(own[path][layer]) @ (np.eye(b.shape[1]) - b.T @ b)
            np.testing.assert_allclose(rebuilt[path][layer], own[path][layer] - outside, atol=2e-5 * np.abs(own[path]).max())


def test_the_heads_factor_is_undone_after_the_noise_or_not_at_all():
    _, _, _, given, _ = case()
    ones = jax.tree.map(jnp.ones_like, given.trained)
    for restores, expected in ((False, 1.0), (True, 4.0)):
        mechanism = Rgp(rank=RANK, head_factor=0.25, restores_head=restores)
        rebuilt = mechanism.rebuilt(ones, given.trained)
        assert float(rebuilt["classifier"]["bias"][0]) == expected
        unrestored = carriers.rebuilt(ones, given.trained)
        jax.tree.map(np.testing.assert_array_equal, rebuilt["layers"], unrestored["layers"])
    assert {mechanism.gradient_factor(path) for path in ("embeddings/word", "layers/lora/up/a", "canaries/mean")} == {1.0}


def test_carriers_are_drawn_again_in_each_step_and_the_same_in_a_replay():
    mechanism, trained = Rgp(rank=RANK), case()[1]
    kept = mechanism.kept_from_start(jax.tree.map(lambda leaf: 0.9 * leaf, trained))
    drawn = {step: mechanism.draw_first(SECRET, step, trained) for step in (0, 1)}
    keys = [tuple(key) for of_step in drawn.values() for key in of_step.values()]
    assert len(set(keys)) == len(keys) == 2 * 4
    first, again, other = (REPARAMETRISED(trained, kept, drawn[step]) for step in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.trained["layers"]["lora"]["up"]["a"], other.trained["layers"]["lora"]["up"]["a"])


def test_before_the_first_step_the_weights_themselves_are_followed():
    trained = case()[1]
    drawn = Rgp(rank=RANK).draw_first(SECRET, 0, trained)
    at_start = REPARAMETRISED(trained, Rgp(rank=RANK).kept_from_start(trained), drawn)
    of_weights = jax.jit(Rgp(rank=RANK, decomposes="weight").reparametrised)(trained, None, drawn)
    jax.tree.map(np.testing.assert_array_equal, at_start, of_weights)


def test_directions_that_are_missing_do_not_break_the_basis():
    """A matrix of rank 1, or of zeros, has fewer directions than the carriers."""
    one = jnp.outer(jnp.arange(1.0, 7.0), jnp.ones(5))[None]
    for matrix in (one, jnp.zeros((1, 6, 5))):
        a, b = carriers.decomposed(matrix, jnp.asarray(SECRET.key("carriers", 0, "w")), 3, 2)
        np.testing.assert_allclose(np.swapaxes(a, 1, 2) @ a, np.eye(3)[None], atol=1e-5)
        np.testing.assert_allclose(b @ np.swapaxes(b, 1, 2), np.eye(3)[None], atol=1e-5)


def test_shapes_of_what_is_summed_are_those_of_the_sum():
    for family, train, changes in EXACT:
        mechanism = Rgp(rank=3)
        of = subject(family, **changes)
        trained, _ = trainable.split(parameters(of), train.selection())
        drawn = mechanism.draw_first(SECRET, 0, trained)
        given = jax.eval_shape(mechanism.reparametrised, trained, mechanism.kept_from_start(trained), drawn)
        shapes = {path: leaf.shape for path, leaf in flatten_dict(given.trained, sep="/").items()}
        assert mechanism.summed_shapes({path: leaf.shape for path, leaf in flatten_dict(trained, sep="/").items()}) == shapes


MODEL = Bert(name="micro", layers=2, width=16, heads=2, feed_forward=24, positions=32)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"rank": 0}, "mechanism.rank=0: a carrier needs a rank"),
        ({"rank": -1}, "mechanism.rank=-1"),
        ({"decomposes": "gradient"}, "mechanism.decomposes=gradient: .* depend on rows without noise"),
        ({"carriers_per": "microbatch"}, "mechanism.carriers_per=microbatch: .* cannot be added up"),
        ({"power_iterations": 0}, "mechanism.power_iterations=0"),
        ({"power_iterations": 1_000_000}, "mechanism.power_iterations=1000000: .* part of the compiled program"),
        ({"head_factor": 0.0}, "mechanism.head_factor=0.0"),
        ({"head_factor": float("inf")}, "mechanism.head_factor=inf: .* lost in float32"),
        ({"head_factor": 1e30}, "mechanism.head_factor=1e.30: .* Use 0.001 to 1000"),
        ({"head_factor": 1e-30}, "mechanism.head_factor=1e-30"),
    ],
)
def test_what_no_proof_covers_is_refused_by_value_reason_and_fix(declared, says):
    with pytest.raises(ConfigError, match=says) as refusal:
        Rgp(**declared)
    assert "\n" not in str(refusal.value) and "Use" in str(refusal.value)


@pytest.mark.parametrize(
    ("rank", "train", "says"),
    [
        (17, Everything(), "mechanism.rank=17: is above what a matrix .*Use a rank of at most 16"),
        (1, Adapters(rank=2, alpha=4.0, head=True), "train=lora: adapters are low-rank already"),
        (1, Adapters(rank=2, alpha=4.0, head=True, kind="lora_ffa"), "train=lora_ffa: adapters"),
        (1, Matching(paths=["layers/*/kernel"]), "train=matching: freezes the head"),
        (1, LastLayer(), "train=last_layer: trains no weight matrix"),
        (1, Biases(head=True), "train=bias: trains no weight matrix"),
    ],
)
def test_what_does_not_fit_a_model_and_its_training_is_refused(rank, train, says):
    for task in (Classification(classes=2), MaskedLanguageModel(next_sentence=False, max_masked_positions=2)):
        with pytest.raises(ConfigError, match=says) as refusal:
            Rgp(rank=rank).require_fits(MODEL, task, train)
        assert "\n" not in str(refusal.value)
    Rgp(rank=16).require_fits(MODEL, Classification(classes=2), Everything())
