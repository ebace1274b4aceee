"""One logical step: any microbatch, chunk or mesh gives the same sum; empty draws, padding and the divisor behave."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import ClippingMethod
from dpx.clipping.clipped_sum import clipped_sum
from dpx.clipping.rounding import MARGINS
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.mechanism.noise import slice_keys
from dpx.models.trained import Adapters
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret, path_name
from dpx.training import sharding
from dpx.training.step import StepInputs, _flat, as_chunk, make_step

from .conftest import declare, make_rows

MASK = jnp.asarray([0, 1], jnp.uint32)
INIT = np.asarray([0, 0], np.uint32)
MARGIN = MARGINS["float32"]
SECRET = RootSecret.from_seed(3)


def _sums(step, params, rows, **frozen):
    sums = step.zero()
    inputs = StepInputs(step.gather(params), MASK, MASK, **frozen)
    capacity = step.chunk * step.rows
    for start in range(0, len(rows["record"]), capacity):
        chunk = as_chunk({name: value[start : start + capacity] for name, value in rows.items()}, step)
        sums = step.accumulate(sums, chunk, inputs)
    return sums


def _total(sums):
    return jax.tree.map(lambda leaf: np.asarray(leaf).sum(0), sums["gradient"])


def _make(experiment, objective, microbatch=4, chunk=2):
    return make_step(experiment.one_step, objective, experiment.mesh.make(), microbatch, chunk)


def _reference(experiment, objective):
    """(params, rows) -> what the step's sums must add up to, without a mesh."""
    weights = experiment.clip.weights(experiment.clip.clipping_norm * (1 - MARGIN))
    return jax.jit(lambda params, rows: clipped_sum(objective.losses, params, objective.batch(MASK, rows), weights=weights, method="vmap"))


def _assert_close(first, second, rtol=2e-5, atol=1e-7):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), first, second)


@pytest.fixture(scope="module")
def plain(micro):
    experiment, objective = micro
    step = _make(experiment, objective)
    return step, step.init(INIT, None)


@pytest.mark.parametrize("microbatch", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_the_sum_is_the_clipped_sum_of_all_rows_whatever_the_microbatch(micro, plain, microbatch):
    """Of 11 rows, 8 fill a chunk of two microbatches of 4."""
    experiment, objective = micro
    rows, params = make_rows(11), plain[1].params
    whole = _reference(experiment, objective)(params, rows)
    sums = _sums(plain[0] if microbatch == 4 else _make(experiment, objective, microbatch, chunk=5), params, rows)
    _assert_close(_total(sums), whole.total)
    assert float(np.sum(sums["count"]["examples"])) == 11
    assert float(np.sum(sums["count"]["clipped"])) == int(np.sum(np.asarray(whole.norms_B) > experiment.clip.clipping_norm))


def test_an_empty_draw_is_a_noise_only_step(micro, plain):
    experiment, _ = micro
    step = plain[0]
    state = step.init(INIT, None)
    sums = _sums(step, state.params, {name: value[:0] for name, value in make_rows(3).items()})
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(_total(sums)))
    before = jax.tree.map(np.array, state.params)
    keys = slice_keys(SECRET, 0, state.params)
    state, metrics = step.finish(state, step.reduce(sums, ()), keys, np.float32(0.05), np.float32(10), np.float32(1e-2))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(before))
    assert float(metrics["noise_norm"]) == pytest.approx(0.05 / 10 * np.sqrt(parameters), rel=0.02)
    assert float(metrics["gradient_norm"]) == 0
    assert all(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True))


def test_the_divisor_is_the_expected_size_not_the_drawn_one(micro, plain):
    experiment, _ = micro
    step = plain[0]
    norms = []
    for count in (4, 8):
        state = step.init(INIT, None)
        sums = _sums(step, state.params, make_rows(count))
        drawn = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(_total(sums))))
        _, metrics = step.finish(
            state,
            step.reduce(sums, ()),
            slice_keys(SECRET, 0, state.params),
            np.float32(0.05),
            np.float32(10),
            np.float32(1e-2),
        )
        assert float(metrics["gradient_norm"]) == pytest.approx(drawn / 10, rel=1e-5)
        norms.append(drawn)
    assert norms[1] > norms[0]


def _norms_by_layer(tree):
    """Norm of every leaf by name, of each layer apart where layers are stacked."""
    leaves = {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    apart = {name: leaf.reshape(len(leaf) if name.startswith("layers/") else 1, -1) for name, leaf in leaves.items()}
    return {name: np.linalg.norm(parts, axis=1).reshape(-1) for name, parts in apart.items()}


# Slow: telemetry, which no claim reads.
@pytest.mark.slow
def test_norms_of_weights_and_of_the_mean_gradient_are_told_leaf_by_leaf_and_layer_by_layer(micro):
    deeper, drawn = dataclasses.replace(micro[0].model, layers=2), np.random.default_rng(0)
    step = _make(declare(model=deeper), dataclasses.replace(micro[1], model=deeper))
    state = step.init(INIT, None)
    sums = jax.tree.map(lambda leaf: drawn.normal(size=leaf.shape).astype(leaf.dtype), jax.eval_shape(step.zero))
    keys, gradients = slice_keys(SECRET, 0, state.params), _norms_by_layer(_total(sums))
    state, metrics = step.finish(state, step.reduce(sums, ()), keys, np.float32(0.05), np.float32(10), np.float32(1e-2))
    for name, norms in _norms_by_layer(state.params).items():
        np.testing.assert_allclose(np.reshape(metrics[f"weights/{name}"], -1), norms, rtol=1e-5)
        np.testing.assert_allclose(np.reshape(metrics[f"gradients/{name}"], -1), gradients[name] / 10, rtol=1e-5, atol=1e-9)
    assert metrics["weights/layers/qkv/kernel"].shape == (2,)


def test_units_of_several_rows_are_padded_and_laid_out_row_by_row(plain):
    """Three units of two rows each, the last with one row only, in a chunk of two microbatches of four units."""
    units = {"record": np.arange(6).reshape(3, 2), "tokens": np.arange(30).reshape(3, 2, 5)}
    padded, is_padding, count = as_chunk(units | {"is_padding": np.array([[0, 0], [0, 0], [0, 1]], bool)}, plain[0])
    assert count == 1 and is_padding.shape == (2, 4, 2)
    first, of_padding = (np.asarray(_flat(jnp.asarray(values[0]), 2)) for values in (padded["tokens"], is_padding))
    np.testing.assert_array_equal(first[:6], np.arange(30).reshape(6, 5))
    np.testing.assert_array_equal(of_padding, [0, 0, 0, 0, 0, 1, 1, 1])
    assert is_padding[1].all() and not first[6:].any()


def test_a_non_finite_example_contributes_exactly_zero(micro, plain):
    step, state = plain
    rows = make_rows(6)
    poisoned = jax.tree.map(lambda leaf: leaf, state.params)
    word = np.array(poisoned["embeddings"]["word"])
    rows["tokens"][2, 1] = 60
    word[60] = np.nan
    params = {**poisoned, "embeddings": {**poisoned["embeddings"], "word": jnp.asarray(word)}}
    with_bad = _sums(step, params, rows)
    # Every example's softmax reads the whole table, so one NaN row makes all of them non-finite: the sum is exactly zero.
    assert float(np.sum(with_bad["count"]["non_finite"])) == 6
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(_total(with_bad)))


def test_sensitivity_one_row_moves_the_sum_by_at_most_the_norm(micro, plain):
    experiment, _ = micro
    step, state = plain
    rows = make_rows(9)
    without = {name: np.delete(value, 5, axis=0) for name, value in rows.items()}
    difference = jax.tree.map(lambda a, b: a - b, _total(_sums(step, state.params, rows)), _total(_sums(step, state.params, without)))
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(difference)))
    assert norm == pytest.approx(experiment.clip.clipping_norm * (1 - MARGIN), rel=1e-4)
    assert norm <= experiment.clip.clipping_norm


@pytest.mark.slow
def test_mechanism_none_sums_plain_gradients(micro):
    experiment, objective = micro
    step = _make(declare(mechanism=NoPrivacy()), objective)
    state = step.init(INIT, None)
    rows = make_rows(7)
    batch = objective.batch(MASK, rows)
    wanted = jax.jit(jax.grad(lambda params: jnp.sum(objective.losses(params, batch)[0])))(state.params)
    sums = _sums(step, state.params, rows)
    _assert_close(_total(sums), wanted, atol=2e-6)
    state, metrics = step.finish(state, step.reduce(sums, ()), None, np.float32(0), np.float32(10), np.float32(1e-2))
    assert float(metrics["gradient_norm"]) > 0


needs_8 = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
each_clipping = pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow), pytest.param("vmap", marks=pytest.mark.slow)]
)


def _on(mesh, method, **changes):
    data, fsdp, tensor = mesh
    spread = Mesh(name="m", data=data, fsdp=fsdp, tensor=tensor, flops_per_s=1e10, memory_bytes=1 << 30)
    return declare(mesh=spread, clipping_method=ClippingMethod(name=method), **changes)


@functools.cache
def _spread(objective, mesh, method, microbatch):
    """A step that several tests take: what it compiles is compiled once."""
    return _make(_on(mesh, method), objective, microbatch=microbatch)


@needs_8
@each_clipping
def test_a_model_axis_changes_neither_norms_nor_sums(micro, plain, method):
    """One example on each of four pairs of devices, so that what a pair counts is that example's own norm."""
    rows, params = make_rows(4), plain[1].params
    alone = _reference(*micro)(params, rows)
    step = _spread(micro[1], (2, 2, 2), method, 1)
    params = step.init(INIT, None).params
    assert "tensor" in str(step.gather(params)["layers"]["down"]["kernel"].sharding.spec)
    sums = _sums(step, params, rows)
    np.testing.assert_allclose(sums["count"]["norm"], alone.norms_B, rtol=1e-5)
    _assert_close(_total(sums), alone.total)


@pytest.mark.slow
@needs_8
def test_a_model_axis_keeps_the_rank_of_adapters_whole(micro):
    adapters = Adapters(rank=4, alpha=4.0, targets=("query", "attention_out", "down"))
    rows, found = make_rows(4), []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        step = _make(dataclasses.replace(_on(mesh, "book_keeping"), train=adapters), micro[1], microbatch=1)
        # B begins as zeros, which would leave A without a gradient.
        params = jax.tree.map(
            lambda leaf: np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape) / leaf.size, step.init(INIT, None).params
        )
        frozen = step.place_frozen(step.draw_frozen(INIT, None))
        found.append(_sums(step, params, rows, frozen=frozen))
        lora = step.gather(params)["layers"]["lora"]
    specs = {name: {factor: str(leaf.sharding.spec) for factor, leaf in of.items()} for name, of in lora.items()}
    assert all("tensor" in specs[name][factor] for name, factor in (("query", "b"), ("down", "a"), ("attention_out", "a")))
    assert not any("tensor" in specs[name][factor] for name, factor in (("query", "a"), ("down", "b"), ("attention_out", "b")))
    np.testing.assert_allclose(found[1]["count"]["norm"].sum(), found[0]["count"]["norm"].sum(), rtol=1e-5)
    _assert_close(_total(found[1]), _total(found[0]))


@needs_8
def test_parameters_stored_in_parts_are_gathered_whole(micro, plain):
    spread, whole = _on((2, 2, 1), "vmap"), jax.tree.map(np.array, plain[0].init(INIT, None).params)
    step = _make(spread, micro[1], microbatch=3)
    assert step.rows == 3 * 4
    params = jax.device_put(whole, sharding.storage_shardings(whole, spread.mesh.make()))
    assert "fsdp" in str(params["layers"]["down"]["kernel"].sharding.spec)
    jax.tree.map(np.testing.assert_array_equal, step.gather(params), whole)


@functools.cache
def _trained(objective, mesh, method, steps=6):
    """Parameters after private steps on `mesh`; draws differ in size and one is empty."""
    devices = mesh[0] * mesh[1]
    step = _spread(objective, mesh, method, max(1, 4 // devices))
    state = step.init(INIT, None)
    for number in range(steps):
        keys = slice_keys(SECRET, number, state.params)
        sums = _sums(step, state.params, make_rows(3 * number % 14, first_record=number))
        state, metrics = step.finish(state, step.reduce(sums, ()), keys, np.float32(0.05), np.float32(10), np.float32(1e-3))
    assert np.isfinite(float(metrics["snr"]))
    return jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
@needs_8
@each_clipping
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((8, 1, 1), (4, 2, 1))] + [(2, 2, 2)], ids=["8", "4x2", "2x2x2"]
)
def test_private_steps_agree_on_every_mesh(micro, mesh, method):
    """Adam divides by a root of squares that the noise fills, so a last bit of a sum stays a last bit of the parameters."""
    _assert_close(_trained(micro[1], mesh, method), _trained(micro[1], (1, 1, 1), method), rtol=1e-5, atol=2e-6)


@needs_8
@pytest.mark.parametrize(
    "mesh",
    [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((8, 1, 1), (4, 1, 2))), (2, 4, 1), (2, 2, 2)],
    ids=["8", "4x1x2", "2x4", "2x2x2"],
)
def test_sums_of_all_devices_are_added_up_each_once(micro, mesh):
    """Whole numbers, so that an order of adding up changes no bit; every way in which a leaf can be laid out."""
    step, drawn = _spread(micro[1], mesh, "book_keeping", 1), np.random.default_rng(0)
    sums = jax.tree.map(lambda leaf: drawn.integers(-99, 99, leaf.shape).astype(np.float32), jax.eval_shape(step.zero))
    found = step.reduce(sums, ())
    jax.tree.map(np.testing.assert_array_equal, found["gradient"], _total(sums))
    jax.tree.map(lambda total, apart: np.testing.assert_array_equal(total, apart.sum()), found["count"], sums["count"])


def test_parameters_travel_in_the_compute_type_and_rest_in_float32(micro):
    narrow = dataclasses.replace(micro[0].model, dtype="bfloat16")
    step = _make(declare(model=narrow), dataclasses.replace(micro[1], model=narrow))
    params = step.init(INIT, None).params
    gathered = step.gather(params)
    kinds = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(gathered)}
    assert {kinds[name] for name in ("embeddings/word", "layers/qkv/kernel", "mlm/transform/kernel")} == {jnp.dtype("bfloat16")}
    assert {kinds[name] for name in ("layers/qkv/bias", "layers/output_norm/scale", "mlm/output_bias")} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves((params, step.zero()))} == {jnp.dtype("float32")}
    jax.tree.map(lambda found, master: np.testing.assert_array_equal(found, master.astype(found.dtype)), gathered, params)
