"""The noise epoch and the secret with which a run resumes, and what a fork inherits; no step is computed."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.run_folder import RunFolder
from dpx.init.start import RANDOM, Start
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Plan, PlanLine
from dpx.privacy.origins import Origin
from dpx.privacy.segments import StepCost
from dpx.statement import agreement
from dpx.training.run_start import NoiseEpochs, RunStart, facts_of, note_plan, start_run
from dpx.training.step import Step

ONE, OTHER = {"claim": "as declared", "microbatch": 4}, {"claim": "as declared", "microbatch": 3}
PLAN = Plan(steps=6, step=StepCost(noise_multiplier=1.0, sampler="poisson"))


def _nothing(*_: Any) -> Any:
    raise AssertionError("no step is computed here")


STEP = Step(
    jax.jit(lambda *_: State({"w": jnp.zeros(3)}, None), out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    *[_nothing] * 5,
    draw_frozen=lambda *_: {},
    place_frozen=_nothing,
    chunk=1,
    rows=1,
)


def _start(fork: str | None) -> Start:
    """That of a fork of a run without a config, as a session reads it."""
    if fork is None:
        return RANDOM
    run, _, at = fork.rpartition("@")
    parent = Ledger(Path(run) / "private" / "ledger")
    origin = Origin(kind="run", name="parent", identity=parent.identity, is_fork=True, segments=tuple(parent.own_segments()))
    return Start((origin,), private=Path(run) / "private", step=int(at), plan=parent.plan or Plan())


@contextlib.contextmanager
def begun(
    path: Path, fingerprint: dict[str, Any] = ONE, fork: str | None = None, seed: int | None = None, plan: Plan = PLAN
) -> Iterator[tuple[RunStart, Ledger, Any]]:
    """How a run in `path` starts, its ledger, and `save(step)`, which keeps a state there."""
    folder = RunFolder(path, "", fork)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.claimed())
        ledger = stack.enter_context(contextlib.closing(Ledger(folder.private / "ledger")))
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder.private / "checkpoints", 3)))
        found = start_run(NoiseEpochs(folder, seed, fingerprint, ledger, plan), checkpoints, STEP, _start(fork))
        yield found, ledger, lambda step: checkpoints.save(step, found.state, facts_of(ledger))


@pytest.mark.parametrize("seed", [None, 5])
def test_a_run_stopped_before_its_first_checkpoint_is_replayed_under_its_own_key(tmp_path: Path, seed: int | None) -> None:
    with begun(tmp_path, seed=seed) as (first, _, _):
        assert first.first_step == 0 and first.messages == ()
    with begun(tmp_path, seed=seed) as (again, ledger, _):
        assert (again.noise_epoch, again.secret.tag) == (first.noise_epoch, first.secret.tag) and len(ledger.noise_epochs) == 1
        assert again.messages == ("resuming from step 0",)


def test_a_new_noise_epoch_goes_on_as_long_as_its_own_fingerprint_is_kept(tmp_path: Path) -> None:
    with begun(tmp_path) as (first, _, save):
        save(2)
    with begun(tmp_path, OTHER) as (changed, _, _):
        assert (changed.noise_epoch.number, changed.noise_epoch.from_step) == (1, 2) and changed.secret.tag != first.secret.tag
    with begun(tmp_path, OTHER) as (again, _, _):
        assert (again.noise_epoch, again.secret.tag) == (changed.noise_epoch, changed.secret.tag)
    with begun(tmp_path, ONE) as (back, _, _):
        assert back.noise_epoch.number == 2 and "microbatch changed" in back.messages[0]


def test_no_two_epochs_or_forks_of_seeded_runs_share_a_key(tmp_path: Path) -> None:
    tags = []
    for seed in (5, 6):
        path = tmp_path / str(seed)
        with begun(path, seed=seed) as (first, _, save):
            save(2)
        with begun(path, OTHER, seed=seed) as (second, _, _):
            pass
        with begun(tmp_path / f"fork_{seed}", seed=seed, fork=f"{path}@2") as (fork, _, _):
            assert fork.noise_epoch.number == 0
        tags += [first.secret.tag, second.secret.tag, fork.secret.tag]
    assert len(set(tags)) == 6


@pytest.mark.parametrize("steps", [3, 9])
def test_a_fork_is_held_to_its_parents_plan(tmp_path: Path, steps: int) -> None:
    """A new plan of the fork was chosen after the parent's results were seen."""
    with begun(tmp_path / "parent") as (_, _, save):
        save(2)
    with begun(tmp_path / "fork", fork=f"{tmp_path / 'parent'}@2") as (fork, ledger, _):
        assert fork.first_step == 2 and [origin.is_fork for origin in ledger.origins] == [True]
        assert ledger.plan == PLAN and ledger.chosen_after_results == []
    with begun(tmp_path / "other", fork=f"{tmp_path / 'parent'}@2", plan=dataclasses.replace(PLAN, steps=steps)) as (_, ledger, _):
        assert ledger.plan == dataclasses.replace(PLAN, steps=steps) and ledger.chosen_after_results == ["steps"]


@pytest.mark.parametrize("parents", [dataclasses.replace(PLAN, steps=5), Plan()])
def test_a_kill_before_the_plan_is_noted_forgets_no_choice(tmp_path: Path, parents: Plan) -> None:
    """A fork of a run that planned otherwise, or nothing, notes its choices first."""
    ledger = Ledger(tmp_path / "ledger")
    append, ledger._add = ledger._add, lambda *lines: append(*lines) if not isinstance(lines[0], PlanLine) else _nothing()
    with pytest.raises(AssertionError):
        note_plan(ledger, PLAN, parents)
    ledger.close()
    again = Ledger(tmp_path / "ledger")
    assert again.plan is None and "steps" in again.chosen_after_results
    assert ("noise_multiplier" in again.chosen_after_results) == (parents.step is None)


def damaged(path: Path, *steps: int) -> None:
    """One bit of the newest state's values, in each of these checkpoints."""
    for steps_done in steps:
        (array,) = (path / "private" / "checkpoints" / str(steps_done) / "state" / "d").iterdir()
        content = bytearray(array.read_bytes())
        content[len(content) // 2] ^= 1
        array.write_bytes(content)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_in_the_same_epoch(tmp_path: Path) -> None:
    with begun(tmp_path) as (first, _, save):
        for steps_done in (2, 4, 6):
            save(steps_done)
    damaged(tmp_path, 4, 6)
    with begun(tmp_path) as (again, ledger, save):
        assert again.first_step == 2 and again.noise_epoch == first.noise_epoch and len(ledger.noise_epochs) == 1
        assert [message.partition(":")[0] for message in again.messages] == [
            "checkpoint 6 is damaged",
            "checkpoint 4 is damaged",
            "resuming from step 2",
        ]
        save(4)
    with begun(tmp_path) as (once_more, _, _):
        assert once_more.first_step == 4 and once_more.messages == ("resuming from step 4",)


def test_a_checkpoint_from_before_the_newest_epoch_opens_another(tmp_path: Path) -> None:
    with begun(tmp_path) as (_, _, save):
        save(2)
        save(4)
    with begun(tmp_path, OTHER) as (changed, _, save):
        assert changed.noise_epoch.from_step == 4
        save(6)
    damaged(tmp_path, 4, 6)
    with begun(tmp_path, OTHER) as (found, ledger, _):
        assert (found.first_step, found.noise_epoch.number, found.noise_epoch.from_step) == (2, 2, 2) and len(ledger.noise_epochs) == 3
        assert found.secret.tag != changed.secret.tag and "not one of the newest noise epoch" in found.messages[-1]


def test_where_no_checkpoint_is_whole_a_run_is_repeated_from_its_beginning_or_refused(tmp_path: Path) -> None:
    with begun(tmp_path) as (first, _, save):
        save(2)
    damaged(tmp_path, 2)
    # With another fingerprint every step would be charged again.
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"checkpoints: every checkpoint is damaged \(2\), and a run from the start is charged again"):
            with begun(tmp_path, OTHER):
                pass
    assert (tmp_path / "private" / "checkpoints" / "2").is_dir()
    with begun(tmp_path) as (again, ledger, _):
        assert (again.first_step, again.noise_epoch, len(ledger.noise_epochs)) == (0, first.noise_epoch, 1)
        assert again.messages[0].startswith("checkpoint 2 is damaged")


def test_a_fork_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    with begun(tmp_path / "parent") as (_, _, save):
        save(2)
    for _ in range(2):
        with begun(tmp_path / "fork", fork=f"{tmp_path / 'parent'}@2"):
            pass
    damaged(tmp_path / "fork", 2)
    with pytest.raises(ConfigError, match="every checkpoint is damaged"), begun(tmp_path / "fork", fork=f"{tmp_path / 'parent'}@2"):
        pass


def test_a_ledger_is_still_held_against_a_checkpoint_that_was_moved_aside(tmp_path: Path) -> None:
    with begun(tmp_path) as (_, ledger, save):
        save(2)
        shorter = ledger.path.read_bytes()
        ledger.note_choices(["steps"])
        save(4)
    damaged(tmp_path, 4)
    with begun(tmp_path) as (found, ledger, _):
        assert found.first_step == 2
    ledger.path.write_bytes(shorter)
    with pytest.raises(ConfigError, match="damaged-4: ends at line"):
        agreement.check(tmp_path)
