"""Steps and runs whose gradients are those of carriers: one step by hand, several devices, a run that was killed, a fork, what is shown."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.clipped_sum import clipped_sum
from dpx.clipping.groups import FactoredWeights
from dpx.clipping.readers import merged
from dpx.clipping.rounding import MARGINS
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.mechanism import noise
from dpx.mechanism.rgp import Rgp
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret, path_name
from dpx.task.objective import objective
from dpx.training import opening, update
from dpx.training.step import StepInputs, as_chunk, make_step

from ..composed import composed
from ..processes import COARSE
from .conftest import make_rows
from .sharing import run_job

INIT, MASK = np.asarray([0, 0], np.uint32), jnp.asarray([0, 1], jnp.uint32)
SECRET = RootSecret.from_seed(3)
MECHANISM = Rgp(rank=2)
SLOW = pytest.mark.slow
needs_8 = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

PLAIN = ["model=micro", "model.layers=1", "data=synthetic", "steps=4", "microbatch=4", "batch_schedule.size=16", "seed=7"]
PLAIN += ["data.sequence_length=16", "schedule.evaluation_rows=32", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp"]
PLAIN += ["privacy.delta=1e-4", "schedule.checkpoint_every=2", COARSE]
CARRIED = ("mechanism=rgp", "mechanism.rank=2")
KERNELS = ("train=matching", "train.paths=[layers/*/kernel,mlm/**]")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def made(data):
    """(experiment, objective, step) of the runs below, which take the same step."""
    experiment, *_ = composed(*PLAIN, f"data.directory={data}", *CARRIED, *KERNELS)
    manifest = prepare(experiment.data, experiment.privacy).manifest
    of = objective(experiment.model, experiment.task, experiment.vocabulary_size, manifest)
    return experiment, of, opening.make_step(experiment.one_step, of, experiment.mesh.make(), 4)


def stepped(step, state, rows, number=0, deviation=0.05):
    """(what the loss was differentiated by, frozen parameters, sums, the next state, metrics)."""
    by = step.differentiated_by(state, MECHANISM.draw_first(SECRET, number, state.params))
    beside = merged(by.constants, step.place_frozen(step.draw_frozen(INIT, None)))
    sums, inputs = step.zero(), StepInputs(step.gather(by.trained), MASK, MASK, frozen=beside)
    capacity = step.chunk * step.rows
    for start in range(0, len(rows["record"]), capacity):
        chunk = as_chunk({name: value[start : start + capacity] for name, value in rows.items()}, step)
        sums = step.accumulate(sums, chunk, inputs)
    keys = noise.slice_keys(SECRET, number, by.trained)
    total, scale = jax.tree.map(np.array, sums), (np.float32(deviation), np.float32(10), np.float32(1e-2))
    state, metrics = step.finish(state, step.reduce(sums, ()), keys, *scale, carriers=by.trained)
    return by, beside, total, state, metrics


def by_hand(made, before, by, beside, rows, drawn, keys):
    """The carriers that replace `before`, what is kept of it, and the sum, its noise and the update of the parameters."""
    experiment, of, _ = made
    kept = MECHANISM.kept_from_start(before)
    expected = MECHANISM.reparametrised(before, kept, drawn)
    weights = FactoredWeights(experiment.clip.weights(experiment.clip.clipping_norm * (1 - MARGINS["float32"])), MECHANISM.gradient_factor)
    total = clipped_sum(of.losses, by.trained, of.batch(MASK, rows), frozen=beside, weights=weights, method="vmap").total
    noisy, _ = noise.add_noise(total, keys, jnp.float32(0.05))
    gradient = jax.tree.map(lambda leaf: leaf / 10, MECHANISM.rebuilt(noisy, by.trained))
    optimizer = update.make_update(experiment.optimizer)
    moved, _ = optimizer.apply(before, optimizer.init(before), gradient, jnp.float32(1e-2))
    return kept, expected, total, moved


def test_one_step_is_carriers_clipped_sum_noise_rebuilt_gradient_and_update(made):
    step = made[2]
    state, rows = step.init(INIT, None), make_rows(11)
    before = jax.tree.map(jnp.array, state.params)
    by, beside, sums, state, metrics = stepped(step, state, rows)
    drawn = MECHANISM.draw_first(SECRET, 0, before), noise.slice_keys(SECRET, 0, by.trained)
    kept, expected, own, moved = jax.jit(functools.partial(by_hand, made))(before, by, beside, rows, *drawn)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), by, expected)
    total = jax.tree.map(lambda leaf: leaf.sum(0), sums["gradient"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-7), total, own)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), state.params, moved)
    jax.tree.map(np.testing.assert_array_equal, state.kept, kept)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(by.trained))
    assert float(metrics["noise_norm"]) == pytest.approx(0.05 / 10 * np.sqrt(numbers), rel=0.05)


def test_a_step_without_rows_is_noise_alone_and_padding_adds_nothing(made):
    step, rows = made[2], make_rows(3)
    _, _, sums, _, metrics = stepped(step, step.init(INIT, None), {name: value[:0] for name, value in rows.items()})
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(sums)) and float(metrics["gradient_norm"]) == 0
    # Of a microbatch of 4, 3 rows fill a part.
    by, beside, sums, *_ = stepped(step, step.init(INIT, None), rows)
    filled = as_chunk(rows, step)
    texts = {
        name: np.where(filled.is_padding_KB.reshape(*filled.is_padding_KB.shape, *[1] * (value.ndim - 2)), value[:1, :1], value)
        for name, value in filled.rows_KB.items()
    }
    other = step.accumulate(step.zero(), filled._replace(rows_KB=texts), StepInputs(step.gather(by.trained), MASK, MASK, frozen=beside))
    jax.tree.map(np.testing.assert_array_equal, other, sums)
    assert sums["count"]["examples"].sum() == 3


def test_a_step_that_is_repeated_has_the_same_bits(made):
    step = made[2]
    first, again = (stepped(step, step.init(INIT, None), make_rows(7)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (first[0], first[2], first[3]), (again[0], again[2], again[3]))


def two_steps(step):
    state, carriers = step.init(INIT, None), []
    for number in (0, 1):
        by, _, _, state, _ = stepped(step, state, make_rows(9, first_record=number), number)
        carriers.append(jax.tree.map(np.asarray, by.trained["layers"]["lora"]))
    return jax.tree.map(np.asarray, state.params), carriers


# Slow: sums on a mesh are those of one device in test_step.py.
@pytest.mark.slow
@needs_8
@pytest.mark.parametrize(
    "mesh", [pytest.param((2, 1, 1), marks=SLOW), (2, 2, 2), pytest.param((1, 4, 1), marks=SLOW)], ids=["2", "2x2x2", "1x4"]
)
def test_steps_agree_on_every_mesh(made, mesh):
    """Carriers follow the last bits of small updates, so their directions agree less closely than what a step does with them."""
    spread = dataclasses.replace(
        made[0], mesh=Mesh(name="m", data=mesh[0], fsdp=mesh[1], tensor=mesh[2], flops_per_s=1e10, memory_bytes=1 << 30), microbatch=1
    )
    (alone, first), (spread, second) = two_steps(made[2]), two_steps(make_step(spread.one_step, made[1], spread.mesh.make(), 1, 2))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), second, first)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), spread, alone)


def train(data: Path, path: Path, *overrides: str, fork: str | None = None, until: int | None = None) -> dict[str, np.ndarray]:
    """The released parameters by path of a run in `path`, killed before step `until` (then none); with carriers of kernels, unless
    overridden."""
    mechanism = () if any(one.startswith("mechanism=") for one in overrides) else CARRIED
    trained = () if any(one.startswith(("mechanism=", "train=", "model=")) for one in overrides) else KERNELS
    parts = composed(*PLAIN, f"data.directory={data}", *mechanism, *trained, *overrides)
    if not run_job(parts, path, fork, until):
        return {}
    return {path_name(place): np.asarray(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(dpx.load(path).params)}


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("rgp") / "run"
    return path, train(data, path)


# Slow: telemetry, which no claim reads.
@pytest.mark.slow
def test_what_a_run_shows_of_its_carriers(finished):
    path, released = finished
    lines = [json.loads(line) for line in (path / "private" / "metrics.jsonl").read_text().splitlines()]
    shown = [line for line in lines if "train/loss" in line]
    for weight in ("qkv", "attention_out", "up", "down"):
        assert 0 < shown[-1][f"carriers/captured/layers/{weight}/kernel/layer_00"] <= 1 + 1e-5
        assert shown[-1][f"carriers/rebuilt/layers/{weight}/kernel/layer_00"] > 0
        assert shown[-1][f"gradients/layers/lora/{weight}/a/layer_00"] > 0
    assert not any("lora" in name for name in released)
    stated = json.loads((path / "release" / "privacy.json").read_text())
    assert stated["mechanism"]["name"] == "rgp" and stated["mechanism"]["carriers"]["rank"] == 2
    assert [event["count"] for event in stated["ledger"]["events"]] == [4]


@pytest.fixture(scope="module")
def by_dp_sgd(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("dp_sgd") / "run"
    train(data, path, "mechanism=dp_sgd")
    return path


def test_a_run_is_charged_as_dp_sgd_is(finished, by_dp_sgd):
    stated = [json.loads((path / "release" / "privacy.json").read_text()) for path in (finished[0], by_dp_sgd)]
    assert stated[0]["ledger"]["events"] == stated[1]["ledger"]["events"]
    assert stated[0]["unsupported"] == stated[1]["unsupported"] and stated[0]["spent"] == stated[1]["spent"]


QUANTILE = ("clip=quantile", "+model.dtype=bfloat16")
UNITS = ("privacy.unit=document", "privacy.unit_mode=sample_units", "privacy.rows_per_unit_max=3", "clip=per_layer")
AUDITED = ("audit=canaries", "audit.gradients=300", "audit.sequences=4", "audit.masks=2", "audit.primary.guesses=20", "accountant=pld")


@pytest.mark.parametrize(
    "options",
    [pytest.param(QUANTILE, marks=SLOW), pytest.param(UNITS, marks=SLOW), pytest.param(AUDITED, marks=SLOW)],
    ids=["quantile_bfloat16", "units_per_layer", "canaries"],
)
def test_with_every_other_part_a_run_is_charged_as_dp_sgd_is(data, tmp_path, options):
    """What is summed under each of these is held against float64 in tests/mechanism/test_rgp_clips.py."""
    stated = []
    for name in ("rgp", "dp_sgd"):
        assert train(data, tmp_path / name, "steps=2", *options, *(CARRIED if name == "rgp" else ("mechanism=dp_sgd",)))
        stated.append(json.loads((tmp_path / name / "release" / "privacy.json").read_text()))
    for field in ("guarantee", "epsilon", "unsupported"):
        assert stated[0][field] == stated[1][field], field
    assert stated[0]["ledger"]["events"] == stated[1]["ledger"]["events"]
    lines = [json.loads(line) for line in (tmp_path / "rgp" / "private" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["grad/norm"]) for line in lines if "grad/norm" in line)


# Slow: a killed run is replayed in test_session.py and test_kill.py.
@pytest.mark.slow
@pytest.mark.parametrize("until", [3, pytest.param(1, marks=SLOW)])
def test_a_run_that_was_killed_ends_with_the_same_bits(finished, data, tmp_path, until):
    train(data, tmp_path / "run", until=until)
    found = train(data, tmp_path / "run")
    assert found.keys() == finished[1].keys() and all(np.array_equal(found[name], leaf) for name, leaf in finished[1].items())
    events = [json.loads((path / "release" / "privacy.json").read_text())["ledger"]["events"] for path in (finished[0], tmp_path / "run")]
    assert events[0] == events[1]


def test_a_fork_follows_updates_since_its_parent_began(finished, data, tmp_path):
    found = train(data, tmp_path / "fork", "seed=8", fork=f"{finished[0]}@2")
    assert any(not np.array_equal(found[name], leaf) for name, leaf in finished[1].items())
    with pytest.raises(ConfigError, match="the state in the parent's checkpoint does not fit this config"):
        train(data, tmp_path / "other", "seed=8", "mechanism.decomposes=weight", fork=f"{finished[0]}@2")


# Slow: steps of carriers are charged as those of DP-SGD above, and the ledger of a parent is carried over whole in test_session.py.
@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("fork", marks=SLOW), "init=run"])
def test_steps_of_dp_sgd_before_are_charged_with_those_of_carriers(data, by_dp_sgd, tmp_path, how):
    """As much as one run of dp_sgd of as many steps is. Another mechanism keeps no matrices of the start, so the weight is decomposed."""
    start = () if how == "fork" else ("init=run", f"init.run={by_dp_sgd}")
    fork = f"{by_dp_sgd}@2" if how == "fork" else None
    train(data, tmp_path / "run", "seed=8", *CARRIED, "mechanism.decomposes=weight", *start, fork=fork)
    train(data, tmp_path / "alone", "mechanism=dp_sgd", f"steps={6 if how == 'fork' else 8}")
    stated, alone = (json.loads((tmp_path / name / "release" / "privacy.json").read_text()) for name in ("run", "alone"))
    assert stated["mechanism"]["name"] == "rgp" and stated["guarantee"] == alone["guarantee"]
    assert stated["ledger"]["events"] == alone["ledger"]["events"] and stated["spent"]["epsilon"] == alone["spent"]["epsilon"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["mechanism.rank=0"], "mechanism.rank=0"),
        (["mechanism.rank=1000"], "mechanism.rank=1000: is above what a matrix"),
        (["train=lora"], "train=lora: adapters are low-rank already"),
        (["train=matching", "train.paths=[layers/*/kernel]"], "train=matching: freezes the head"),
        (["train=last_layer"], "trains no weight matrix"),
        (["mechanism.decomposes=gradient"], "mechanism.decomposes=gradient"),
        (["+mechanism.carriers_per=microbatch"], "mechanism.carriers_per=microbatch"),
        (["model=gemma_micro", "task=causal_lm", "data.pairs=none", "clipping_method=traced"], "mechanism=rgp, model="),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_or_an_array_exists(data, tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        train(data, tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()
