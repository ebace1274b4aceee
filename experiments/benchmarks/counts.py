"""Counts for nets with loops, gathered experts and many layers, beside `jax.grad`, `vmap(grad)` with clipping and jax-privacy.

    python -m experiments.benchmarks.counts [rounds] [names] > rows.jsonl

One JSON line for each model and way: FLOPs of products (counted in the traced program, bodies of loops times rounds), equations and lines
of the program, temporary bytes (only up to `MOST_COMPILED` lines), and with rounds the median processor seconds, all ways by turns (only up
to `MOST_TIMED` numbers of gradients). From a folder that holds `dpx` of another revision beside `tests` and `experiments` of this one, it
counts that revision. A number among the names is the seed of a program of `tests/clipping/test_programs_cost.py`.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from dpx.cost.traced import compiled_temporaries, matmul_flops
from tests.clipping.loops import LOOPS
from tests.clipping.test_program_size import llama, size
from tests.clipping.test_programs_cost import drawn_program, given, programs

# Programs with more lines are not compiled.
MOST_COMPILED = 24_000
# Numbers of the gradients of all examples.
MOST_TIMED = 500_000_000


def unet(side: int = 32, width: int = 16, depth: int = 3) -> Any:
    """A net for images that halves the side and doubles the width `depth` times, and goes back with what it passed beside it."""
    widths = [width * 2**at for at in range(depth + 1)]
    shapes: dict[str, tuple[int, ...]] = {"stem": (3, 3, 3, width), "head": (1, 1, width, 3)}
    for at, (fine, coarse) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        shapes |= {f"down_{at}": (3, 3, fine, coarse), f"gain_{at}": (coarse,), f"up_{at}": (3, 3, fine + coarse, fine)}

    def convolved(x_SSC: Any, kernel: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x_SSC[None], kernel, (stride, stride), "SAME", dimension_numbers=numbers)[0]

    def loss(p: Any, x_SSC: Any) -> Any:
        x, passed = jax.nn.silu(convolved(x_SSC, p["stem"])), []
        for at in range(depth):
            passed.append(x)
            x = jax.nn.silu(programs.scaled(convolved(x, p[f"down_{at}"], 2), p[f"gain_{at}"]))
        for at in reversed(range(depth)):
            wide = jnp.repeat(jnp.repeat(x, 2, 0), 2, 1)
            x = jax.nn.silu(convolved(jnp.concatenate([wide, passed[at]], -1), p[f"up_{at}"]))
        return jnp.square(convolved(x, p["head"]) - x_SSC).mean()

    return programs.Subject(loss, shapes, (side, side, 3), 16)


SUBJECTS = {
    "lstm": LOOPS["linen_lstm"],
    "gru": LOOPS["linen_gru"],
    "s4d": LOOPS["s4d"],
    "experts, gathered": LOOPS["experts_taken"],
    "experts, all computed": programs.experts,
    "u-net": unet,
    "llama, 2 layers": lambda: llama(2),
    "llama, 8 layers": lambda: llama(8),
    "llama, 24 layers": lambda: llama(24),
    "llama, 48 layers": lambda: llama(48),
    "bert-base": lambda: programs.bert_tiny(H=768, A=12, F=3072, layers=12),
    "bert-base, 4 examples": lambda: dataclasses.replace(programs.bert_tiny(H=768, A=12, F=3072, layers=12), examples=4),
}


def processor_seconds(compiled: dict[str, Any], arguments: Any, rounds: int) -> dict[str, float]:
    """Returns the median of each program, all by turns, after one run that does not count."""
    taken: dict[str, list[float]] = {way: [] for way in compiled}
    for at in range(rounds + 1):
        for way, run in compiled.items():
            start = time.process_time()
            jax.block_until_ready(run(*arguments))
            if at:
                taken[way].append(time.process_time() - start)
    return {way: statistics.median(values) for way, values in taken.items() if values}


def main(rounds: int = 0, *names: str) -> None:
    for name in names or SUBJECTS:
        subject, compiled, rows = drawn_program(int(name)) if name.isdigit() else SUBJECTS[name](), {}, {}
        for way, run in programs.ways(subject).items():
            lines, equations = size(subject, way)
            rows[way] = {"flops": matmul_flops(run, *given(subject)), "lines": lines, "equations": equations}
            if lines <= MOST_COMPILED:
                compiled[way] = jax.jit(run).lower(*given(subject)).compile()
                rows[way]["temporaries"] = compiled_temporaries(compiled[way])
        is_timed = rounds and subject.examples * sum(map(math.prod, subject.shapes.values())) <= MOST_TIMED
        taken = processor_seconds(compiled, (subject.params(), subject.batch()), rounds) if is_timed else {}
        for way, row in rows.items():
            seconds = {"processor_s": round(taken[way], 4)} if way in taken else {}
            print(json.dumps({"model": name, "way": way, **row, **seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, *sys.argv[2:])
