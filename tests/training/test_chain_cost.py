"""What the ledger's lines, the reduction and its checksum take of a step of the main job, in one run.

`python -m pytest -n0 -q -s -m slow tests/training/test_chain_cost.py` prints it. Run nothing beside it.
"""

import dataclasses
import statistics
import time

import jax
import pytest

from dpx import config
from dpx.config import recipes
from dpx.privacy.ledger import Ledger
from dpx.run_folder import RunFolder
from dpx.training import loop
from dpx.training.session import Session

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
    with folder.claimed(), Session.open(experiment, folder) as session:
        parts = session.runtime.step
        waited = lambda sums, scaled: timed("reduce", parts.reduce)(jax.block_until_ready(sums), scaled)  # noqa: E731
        runtime = dataclasses.replace(session.runtime, step=dataclasses.replace(parts, reduce=waited))
        seconds["ledger"].clear()
        loop.run(runtime, session.run_start, lambda *_: None, session._renew)
    found = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    # Two lines a step: its charge before, its checksum after.
    share = (found["reduce"] + 2 * found["ledger"]) / found["step"]
    shown = {name: f"{1e3 * value:.2f} ms" for name, value in found.items()}
    print(f"\n{shown}: {share:.2%}")
    assert share < 0.01
