"""Processor seconds of a whole private step in two revisions of this tree, by turns: the machine may be busy, since no wall time is taken.

    python -m experiments.benchmarks.steps_by_turns 3c843f62 tiny mini [--examples 8] [--rounds 12] [--text 64]

Each revision has one process, which compiles once and then runs a step when it is told to: the clipped sum of one microbatch, noise and the
update. Prints the seconds of each revision, the ratio of each round, and their median and spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def step_of(model: str, examples: int, length: int) -> Callable[[int], Any]:
    """Returns a function that runs step `number` of the tree that this process imports, and waits for it."""
    import jax
    import numpy as np

    from dpx import config
    from dpx.config import recipes
    from dpx.randomness import RootSecret
    from dpx.task.mlm import Special
    from dpx.task.objective import objective
    from dpx.training import step as steps
    from dpx.training.microbatch import synthetic_rows

    experiment, _ = config.build(recipes.compose([f"model={model}", f"data.sequence_length={length}"]))
    subject = objective(experiment.model, experiment.task, 1024, Special(0, 1, 2, 3, 4))
    # An earlier `make_step` takes the whole experiment, and an earlier `finish` one record.
    step = steps.make_step(getattr(experiment, "one_step", experiment), subject, experiment.mesh.make(), examples, 1)
    as_given: Any = getattr(steps, "UpdateInputs", None) or (lambda *given: given)
    secret, norm = RootSecret.from_seed(0), experiment.clip.clipping_norm
    chunk = steps.as_chunk(synthetic_rows(experiment.task, examples, length, 1024), step)
    state = step.init(secret.key("init"), None)

    def run(number: int) -> None:
        nonlocal state
        inputs = steps.StepInputs(step.gather(state.params), secret.key("mask", number), secret.key("dropout", number))
        reduced = step.reduce(step.accumulate(step.zero(), chunk, inputs), ())
        given = as_given(experiment.mechanism.draw(secret, number, state.params, 1.0, norm, None), *np.float32([norm, examples, 1e-3]))
        state, _ = step.finish(state, reduced, *(given if isinstance(given, tuple) and not hasattr(given, "_fields") else (given,)))
        jax.block_until_ready(state)

    return run


def serve(model: str, examples: int, length: int) -> None:
    """Answers each line of standard input, a number of steps, with the processor seconds of one of them."""
    run, number = step_of(model, examples, length), 0
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            run(number)
            number += 1
        print(json.dumps((time.process_time() - began) / int(line)), flush=True)


def compare(trees: dict[str, Path], model: str, examples: int, length: int, rounds: int) -> None:
    """Prints what the two trees take, one after the other in each round, in the reverse order each time."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", model, str(examples), str(length)]
    made = {
        name: subprocess.Popen(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, tree in trees.items()
    }

    def told(name: str, steps: int) -> float:
        process = made[name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return float(json.loads(process.stdout.readline()))

    for name in made:
        told(name, 2)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds):
        for name in sorted(made, reverse=number % 2 == 1):
            seconds[name].append(told(name, 3))
    for process in made.values():
        process.communicate()
    ratios = sorted(new / old for old, new in zip(seconds["old"], seconds["new"], strict=True))
    medians = ", ".join(f"{name} {statistics.median(found):.4f} s" for name, found in seconds.items())
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"{model}, {examples} examples of {length} tokens: {medians}; new over old {statistics.median(ratios):.3f}", end=" ")
    print(f"(quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f} of {rounds} rounds)", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--text", type=int, default=64, help="tokens of a text")
    given = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "-C", str(here), "worktree", "add", "-q", "--detach", str(old), given.revision], check=True)
        try:
            for model in given.models:
                compare({"old": old, "new": here}, model, given.examples, given.text, given.rounds)
        finally:
            subprocess.run(["git", "-C", str(here), "worktree", "remove", "--force", str(old)], check=True)


if __name__ == "__main__":
    main()
