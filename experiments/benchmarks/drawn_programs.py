"""Processor time of drawn programs beside `vmap(grad)` with clipping, by turns, with one thread on one core.

    python -m experiments.benchmarks.drawn_programs [seeds] >> experiments/benchmarks/drawn_programs.jsonl

One JSON line for each program of `tests/clipping/test_programs_cost.py` (all hundred if no seed is given): the ratio of the medians of
`ROUNDS` turns, and how far the turns' own ratios go. Other programs on the machine slow both ways down, but not by turns.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

ROUNDS = 7
# A turn runs a program until so much processor time has passed.
TURN_S = 0.05


def turn(run: Any, arguments: Any, count: int) -> float:
    """Returns the processor time of one of `count` runs."""
    import jax

    start = time.process_time()
    for _ in range(count):
        jax.block_until_ready(run(*arguments))
    return (time.process_time() - start) / count


def main(seeds: list[int]) -> None:
    # Before JAX makes its threads.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax

    from tests.clipping.test_programs_cost import drawn_program, programs

    for seed in seeds:
        subject = drawn_program(seed)
        arguments = jax.device_put((subject.params(), subject.batch()))
        compiled = {way: jax.jit(programs.ways(subject)[way]).lower(*arguments).compile() for way in ("vmap", "dpx")}
        counts = {way: max(1, round(TURN_S / max(turn(run, arguments, 2), 1e-6))) for way, run in compiled.items()}
        taken = [{way: turn(run, arguments, counts[way]) for way, run in compiled.items()} for _ in range(ROUNDS)]
        median = {way: statistics.median(one[way] for one in taken) for way in compiled}
        ratios = sorted(one["dpx"] / one["vmap"] for one in taken)
        row = {"seed": seed, "ratio": median["dpx"] / median["vmap"], "least": ratios[0], "most": ratios[-1], "vmap_s": median["vmap"]}
        print(json.dumps({name: round(value, 5) for name, value in row.items()}), flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or list(range(100)))
