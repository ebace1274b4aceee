"""Two data sets that differ in one unit: how far the sum under the noise moves, for all samplers and mechanisms that may run together.

The noise is scaled to a bound on that distance. It is measured here on the sums of whole steps: drawn, placed, clipped and added up by the
run's own functions, on two devices, with two examples of a microbatch on each.
"""

import dataclasses
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.claim import calibration
from dpx.claim.calibration import Calibrated, calibrate
from dpx.data.store import Store
from dpx.declaration import ConfigError
from dpx.mechanism.banded import Banded
from dpx.mechanism.clip import Flat
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.dp_sgd import DpSgd
from dpx.mechanism.mechanism_protocol import Reparametrisation
from dpx.mechanism.rgp import Rgp
from dpx.privacy import events, ledger
from dpx.privacy.declared_privacy import Deterministic as WithoutAmplification
from dpx.privacy.declared_privacy import Pld, Privacy, Rdp
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret
from dpx.sampler import BallsInBins, CyclicPoisson, Deterministic, FixedSize, Poisson, RandomAllocation, Shuffled, TruncatedPoisson
from dpx.sampler.batch_schedule import Constant
from dpx.training import loop
from dpx.training.step import make_step

from ..covering import pairwise
from .conftest import declare

SIZE, BATCH, LENGTH, MOST = 96, 48, 24, 2
NORM = 1.0
SIDE = 64
GRID = DiscreteGaussian(grid_bits=8)
# Two texts whose gradients are 0.3 and 0.1 steps of the grid everywhere. Pairs of one kind round to 1 and 0, mixed pairs to 0 and 0: who
# moves all by one place changes every other sum.
KINDS = (np.full(4, 1), np.full(4, 2))
STEPS = (0.3, 0.1)
# A token of the texts whose gradient is not finite.
BROKEN = 999
SAMPLERS = [
    Poisson(),
    TruncatedPoisson(),
    CyclicPoisson(cycle=2),
    FixedSize(),
    Shuffled(),
    Deterministic(),
    BallsInBins(),
    RandomAllocation(),
]
UNITS = {
    "rows": {},
    "group": {"unit": "document", "rows_per_unit_max": MOST},
    "sample_units": {"unit": "document", "rows_per_unit_max": MOST, "unit_mode": "sample_units"},
    "one_row": {"unit": "document", "rows_per_unit_max": MOST, "unit_mode": "one_row"},
}


@dataclasses.dataclass(frozen=True)
class Outer:
    """A row's gradient: zero without text, a constant for the two `KINDS`, else a product of two vectors of the text, which is clipped."""

    def init(self, key: Any) -> Any:
        return {"w": jnp.zeros((SIDE, SIDE))}

    def batch(self, key: Any, rows: Any) -> Any:
        return {name: jnp.asarray(rows[name]) for name in ("tokens", "length")}

    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any:
        tokens_BT, length_B = batch["tokens"], batch["length"]
        tokens_BT = jnp.where(jnp.arange(tokens_BT.shape[1]) < length_B[:, None], tokens_BT, 0)
        code_B = jnp.sum(tokens_BT * jnp.arange(1, tokens_BT.shape[1] + 1), axis=1) % 1009
        left_BS, right_BS = (jnp.sin(code_B[:, None] * jnp.arange(1, SIDE + 1) * pace) for pace in (0.37, 0.61))
        products_B = jnp.sum((left_BS @ params["w"]) * right_BS, axis=1)
        losses_B = jnp.where(jnp.any(tokens_BT == BROKEN, axis=1), jnp.inf, 1.0) * products_B
        for kind, steps in zip(KINDS, STEPS, strict=True):
            losses_B = jnp.where(tokens_BT[:, 0] == kind[0], steps * GRID.spacing(NORM) * jnp.sum(params["w"]), losses_B)
        losses_B = jnp.where(length_B > 0, losses_B, 0)
        return losses_B, {name: jnp.zeros_like(losses_B) for name in declare().task.counts}


@dataclasses.dataclass(frozen=True)
class OuterOfCarriers(Outer):
    """The same through a layer whose kernel `mechanism=rgp` replaces by carriers, and a head that sees half of the text."""

    def init(self, key: Any) -> Any:
        kernel_1SS = np.random.default_rng(0).normal(size=(1, SIDE, SIDE)).astype(np.float32)
        return {"layers": {"w": {"kernel": jnp.asarray(kernel_1SS)}}, "classifier": {"w": jnp.zeros((SIDE, SIDE))}}

    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any:
        layer, factors = params["layers"]["w"], params["layers"]["lora"]["w"]
        kernel_SS = (layer["kernel"] + factors["a"] @ factors["b"])[0]
        return super().losses({"w": kernel_SS + 10 * params["classifier"]["w"]}, batch)


class Given(Store):
    """Rows in memory: `units` are the texts (int32 [T] with their lengths) of each."""

    def __init__(self, units: list[list[np.ndarray]]):
        texts = [text for unit in units for text in unit]
        self.folder: Any = None
        self.manifest: Any = types.SimpleNamespace(
            rows={"protected": len(texts)},
            units={"protected": len(units)},
            sequence_length=LENGTH,
            schema={
                "tokens": types.SimpleNamespace(is_text=True, read_as=np.dtype(np.int32), shape=(LENGTH,)),
                "length": types.SimpleNamespace(is_text=False, read_as=np.dtype(np.int32), shape=()),
            },
        )
        tokens = np.zeros((len(texts), LENGTH), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        columns = {"tokens": tokens, "length": np.array([len(text) for text in texts], np.int32)}
        self._columns: Any = {"protected": columns | {"unit": np.repeat(np.arange(len(units)), [len(unit) for unit in units])}}


def text(draws: np.random.Generator, longest: int = LENGTH) -> np.ndarray:
    return draws.integers(3, BROKEN, draws.integers(2, longest + 1))


EMPTY = np.zeros(0, int)


def units_of(drawn: np.ndarray, kind: str) -> list[list[np.ndarray]]:
    """Units whose texts, in the order of the draw, come in pairs of one kind: AABBAABB.

    Where units are drawn, every other one has a second row."""
    texts = [KINDS[np.searchsorted(drawn, number) // 2 % 2] for number in range(SIZE)]
    if kind == "group":
        return [texts[start : start + MOST] for start in range(0, SIZE, MOST)]
    return [[text, EMPTY] if kind in ("sample_units", "one_row") and number % 2 else [text] for number, text in enumerate(texts)]


def pairs(draws: np.random.Generator, rows: int, kind: str, adjacency: str) -> list[tuple[Any, Any]]:
    """The content of a unit of `rows` rows in two neighbours, `None` if it is absent: short and long texts, a non-finite one,
    none."""
    unit = [text(draws) for _ in range(rows)]
    if adjacency == "add_remove":
        return [(unit, None)] * 2
    empty = [] if kind in ("sample_units", "one_row") else [EMPTY] * rows
    others = [[np.array([BROKEN, 5, 7])] * rows, [text(draws, 4) for _ in unit], [np.full(LENGTH, 3)] * rows]
    return [(unit, other) for other in (empty, *others)] if adjacency == "replace_one" else [(one, empty) for one in (unit, *others)]


def with_unit(units: list[list[np.ndarray]], number: int, unit: list[np.ndarray] | None) -> Given:
    """The data set in which unit `number` holds `unit`."""
    return Given([*units[:number], *([] if unit is None else [unit]), *units[number + 1 :]])


DRAW, SECRET = loop.draw, RootSecret.from_seed(5)


def drawn(experiment: Any) -> np.ndarray:
    return DRAW(experiment.sampler, SIZE, BATCH / SIZE, lambda *place: SECRET.generator("sample", *place), 0)


def summed(experiment: Any, step: Any, store: Store, gone: range, path: Any) -> np.ndarray:
    """The sum of the first step, as noise is added to it. All that are drawn from the whole data set take part, less those in `gone`."""
    run = loop.Computation(experiment=experiment, calibrated=Calibrated(1.0, (), (), SIZE, {}), store=store, step=step)
    left = np.setdiff1d(drawn(experiment), gone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw", lambda *_: left - len(gone) * (left >= gone.stop))
        state = step.init(np.zeros(2, np.uint32), None)
        mechanism = experiment.mechanism
        first = mechanism.draw_first(SECRET, 0, state.params) if isinstance(mechanism, Reparametrisation) else None
        by = step.differentiated_by(state, first)
        sums, _ = loop._sums(run, SECRET, 0, by, np.float32(NORM))
        leaves = jax.tree.leaves(step.reduce(sums, ())["gradient"])
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves]) * (
        experiment.mechanism.spacing(NORM) if experiment.mechanism is GRID else 1
    )


def stands(experiment: Any) -> bool:
    """Whether the pair may run, under some accountant that proves a bound."""

    def known(accountant: Any, privacy: Any, segments: Any) -> dict[str, float]:
        for release, _ in ledger.releases(segments):
            events.event(release, privacy.adjacency, accountant.name)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "accounting_of", known)
        for accountant in (Rdp(), Pld(), WithoutAmplification()):
            try:
                calibrate(dataclasses.replace(experiment, accountant=accountant).claim, SIZE)
            except ConfigError:
                continue
            return True
    return False


def declared(mechanism: Any, sampler: Any, adjacency: Any, kind: str, widths: Any) -> Any:
    """One pair and what may move its rows."""
    privacy, widths = Privacy(delta=1e-4, adjacency=adjacency, **UNITS[kind]), widths and list(widths)
    base = declare()
    data = dataclasses.replace(base.data, sequence_length=LENGTH, declared_size=SIZE if adjacency == "add_remove" else None)
    parts = {"sampler": sampler, "mechanism": mechanism, "privacy": privacy, "length_buckets": widths, "data": data}
    mesh = Mesh(name="two", data=2, flops_per_s=1e10, memory_bytes=1 << 30)
    return declare(**parts, batch_schedule=Constant(size=BATCH), clip=Flat(clipping_norm=NORM), microbatch=2, mesh=mesh)


@pytest.fixture(scope="module")
def step_of():
    """The step of a declaration, built once for declarations with the same computation."""
    made: dict[Any, Any] = {}

    def step(experiment: Any) -> Any:
        mechanism = experiment.mechanism
        key = (mechanism.sum_dtype, isinstance(mechanism, Reparametrisation), experiment.privacy.rows_per_example)
        if key not in made:
            objective = OuterOfCarriers() if isinstance(mechanism, Reparametrisation) else Outer()
            made[key] = make_step(experiment.one_step, objective, experiment.mesh.make(), 2)
        return made[key]

    return step


IN_EPOCHS = {(name, relation) for name in ("shuffled", "deterministic", "balls_in_bins") for relation in ("zero_out", "replace_one")}
# Pairs of sampler and relation that may run with each mechanism; the test would be empty if none did.
MAY_RUN = {
    "discrete_gaussian": {("poisson", "zero_out"), ("cyclic_poisson", "zero_out")} | IN_EPOCHS,
    "banded": {("cyclic_poisson", "zero_out"), ("cyclic_poisson", "replace_one")},
    "dp_sgd": {(name, "zero_out") for name in ("poisson", "truncated_poisson", "cyclic_poisson", "fixed_size")}
    | {(name, "replace_one") for name in ("poisson", "truncated_poisson", "cyclic_poisson", "fixed_size")}
    | {("poisson", "add_remove")}
    | {("random_allocation", relation) for relation in ("zero_out", "add_remove", "replace_one")}
    | IN_EPOCHS,
}
MAY_RUN["rgp"] = MAY_RUN["dp_sgd"]


@pytest.mark.parametrize("chosen", [pairwise, pytest.param(list, marks=pytest.mark.slow)], ids=["pairs", "whole"])
@pytest.mark.parametrize("mechanism", [GRID, DpSgd(), Rgp(rank=2), Banded(bands=2)], ids=lambda one: one.name)
def test_neighbours_are_no_further_apart_than_is_charged(mechanism, chosen, step_of, tmp_path):
    once, found = mechanism.sensitivity(NORM, SIDE**2) if mechanism is GRID else NORM * (1 + 1e-5), set()
    # Exact sums do not depend on places, so places are moved wherever they may be.
    widths = (None, (8, 16)) if mechanism.needs_fixed_places else ((8, 16),)
    cells = itertools.product(SAMPLERS, ("zero_out", "add_remove", "replace_one"), UNITS, widths)
    seeds = {cell: seed for seed, cell in enumerate(cells) if stands(declared(mechanism, *cell))}
    # Each with the first or the second half of what a unit may hold.
    for *parts, half in chosen((*cell, half) for cell in seeds for half in range(2)):
        sampler, adjacency, kind, _ = parts
        experiment, draws = declared(mechanism, *parts), np.random.default_rng(seeds[tuple(parts)])
        found.add((sampler.name, adjacency))
        units, step = units_of(drawn(experiment), kind), step_of(experiment)
        # One that takes part early in the step: most others come after it.
        rows = MOST if kind == "group" else 1
        number = int(drawn(experiment)[5]) // rows
        # A unit of several rows that are drawn singly is charged for all of them.
        charged, moved = once * (2 if adjacency == "replace_one" else 1) * rows, []
        for one, other in pairs(draws, len(units[number]), kind, adjacency)[half::2]:
            gone = range(number * rows, (number + 1) * rows) if other is None else range(0)
            whole = summed(experiment, step, with_unit(units, number, one), range(0), tmp_path)
            moved.append(float(np.linalg.norm(whole - summed(experiment, step, with_unit(units, number, other), gone, tmp_path))))
        assert max(moved) <= charged, (parts, moved, charged)
        assert adjacency == "add_remove" or max(moved) > NORM / 2
    assert found == MAY_RUN[mechanism.name]
