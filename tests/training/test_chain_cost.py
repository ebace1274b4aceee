"""What the ledger's lines, the reduction and its checksum take of a step of the main job, and what its checks take, each in one run.

`python -m pytest -n0 -q -s -m slow tests/training/test_chain_cost.py` prints it. Run nothing beside it.
"""

import dataclasses
import statistics
import time

import jax
import pytest

from dpx import config, durable
from dpx.config import recipes
from dpx.data import store
from dpx.files import orbax_checkpoints
from dpx.files.run_folder import RunFolder
from dpx.job.train import Train
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement, outside_code, seals
from dpx.training import loop, session
from dpx.training.opening import open_run

STEPS = 12


@pytest.mark.slow
def test_chain_and_checksum_take_less_than_a_hundredth_of_a_step(tmp_path, monkeypatch):
    overrides = [f"steps={STEPS}", "lr_schedule.warmup_steps=2", "microbatch=32", "noise=multiplier", "noise.noise_multiplier=1.0"]
    experiment, _ = config.build(recipes.compose([*overrides, "accountant=rdp", f"data.directory={tmp_path}/data"]))
    seconds: dict[str, list[float]] = {"step": [], "reduce": [], "ledger": []}

    def timed(name, subject):
        def measured(*given):
            began = time.perf_counter()
            found = jax.block_until_ready(subject(*given))
            seconds[name].append(time.perf_counter() - began)
            return found

        return measured

    add, whole = Ledger._add, loop.one_step
    monkeypatch.setattr(Ledger, "_add", lambda self, *lines: timed("ledger", lambda: add(self, *lines))())
    monkeypatch.setattr(loop, "one_step", timed("step", whole))
    folder = RunFolder(tmp_path / "run", "name: main\n")
    with folder.claimed(), open_run(experiment, folder) as run:
        parts = run.step
        waited = lambda sums, scaled: timed("reduce", parts.reduce)(jax.block_until_ready(sums), scaled)  # noqa: E731
        watched = dataclasses.replace(run, step=dataclasses.replace(parts, reduce=waited))
        seconds["ledger"].clear()
        loop.run_steps(watched, (), lambda *given: session.renew(run, *given))
    found = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    # Two lines a step: its charge before, its checksum after.
    share = (found["reduce"] + 2 * found["ledger"]) / found["step"]
    shown = {name: f"{1e3 * value:.2f} ms" for name, value in found.items()}
    print(f"\n{shown}: {share:.2%}")
    assert share < 0.01


# What holds a run's parts against each other: once when it starts, before and after its steps, and at every step.
_AT_THE_START = (
    (agreement, "check"),
    (RunFolder, "require_no_links"),
    (store, "verify"),
    (seals, "write_config"),
)
_AT_A_STEP = ((outside_code, "of"), (outside_code, "imported"))
_AT_A_SAVE = ((orbax_checkpoints, "checksums"), (durable, "of_folder"), (seals, "write_statement"))
STEPS_OF_THE_MAIN_JOB = 120


@pytest.mark.slow
def test_checks_take_less_than_two_hundredths_of_the_start_and_a_hundredth_of_a_step(tmp_path, monkeypatch):
    """By processor time of the main job: what every start checks beside the job's whole time, what a step and its share of a save check
    beside a step's."""
    experiment, _ = config.build(recipes.compose([f"steps={STEPS}", "lr_schedule.warmup_steps=2", f"data.directory={tmp_path}/data"]))
    spent: dict[str, float] = {}
    inside: list[str] = []

    def timed(name, subject):
        def measured(*given, **named):
            began = time.process_time()
            inside.append(name)
            try:
                return subject(*given, **named)
            finally:
                inside.pop()
                if not inside:
                    spent[name] = spent.get(name, 0.0) + time.process_time() - began

        return measured

    for owner, name in (*_AT_THE_START, *_AT_A_STEP, *_AT_A_SAVE):
        monkeypatch.setattr(owner, name, timed(name, getattr(owner, name)))
    steps: list[float] = []
    whole = loop.one_step

    def one_step(*given):
        began = time.process_time()
        found = jax.block_until_ready(whole(*given))
        steps.append(time.process_time() - began)
        return found

    monkeypatch.setattr(loop, "one_step", one_step)
    began = time.process_time()
    Train()(experiment, RunFolder(tmp_path / "run", "name: main\n"))
    took, step = time.process_time() - began, statistics.median(steps[2:])
    job = took + (STEPS_OF_THE_MAIN_JOB - STEPS) * step
    at_start = sum(spent.get(name, 0.0) for _, name in _AT_THE_START)
    of_a_step = sum(spent.get(name, 0.0) for _, name in _AT_A_STEP) / STEPS
    saves = sum(spent.get(name, 0.0) for _, name in _AT_A_SAVE)
    print(f"\n{ {name: f'{1e3 * value:.1f} ms' for name, value in spent.items()} }, a step {step:.2f} s, the job {job:.0f} s")
    print(f"start {at_start / job:.3%} of the job, steps {of_a_step / step:.3%} of a step, all saves {saves / job:.3%} of the job")
    assert at_start < 0.02 * job and of_a_step + saves / STEPS_OF_THE_MAIN_JOB < 0.01 * step
