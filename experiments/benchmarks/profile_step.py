"""Where a private microbatch spends its time beside our own plain one: milliseconds by kind of instruction, from XLA's own events.

    python experiments/benchmarks/profile_step.py small 128 4 [rounds]

Model, tokens, examples of a microbatch. Both programs take turns under one profile; a row is an opcode with its result's shape, the
largest differences first. Run nothing beside it.
"""

import collections
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import config
from dpx.config import recipes
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows
from dpx_papers.benchmark.sums import variant_sum

WAYS = ("plain", "book_keeping")
WITH_BODY = ("while", "call", "conditional", "cond")  # opcodes, and names where the result is a tuple
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\S+?)(?:\{[\d,]*\})? ([\w\-]+)\(", re.MULTILINE)


def programs(model: str, length: int, examples: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Both compiled sums, and what they are called with."""
    overrides = [f"model={model}", "task=mlm_nsp", "data.pairs=same_document", f"data.sequence_length={length}"]
    experiment, _ = config.build(recipes.compose([*overrides, *(["task.max_masked_positions=77"] if length == 512 else [])]))
    subject = objective(experiment.model, experiment.task, 30522, Special(0, 1, 2, 3, 4))
    key = np.zeros(2, np.uint32)
    rows = synthetic_rows(experiment.task, examples, length, 30522)
    given = jax.jit(subject.init)(key), jax.jit(subject.batch)(key, rows)
    return {way: jax.jit(variant_sum(subject, experiment.clip, way, examples)).lower(*given).compile() for way in WAYS}, given


def milliseconds(compiled: dict[str, Any], given: tuple[Any, Any], rounds: int) -> dict[str, collections.Counter]:
    """By way: (opcode, shape of the result) -> milliseconds of one call, mean over rounds."""
    kinds = {way: {name: (code, shape) for name, shape, code in _INSTRUCTION.findall(one.as_text())} for way, one in compiled.items()}
    found: dict[str, collections.Counter] = {way: collections.Counter() for way in WAYS}
    for one in compiled.values():
        jax.block_until_ready(one(*given))
    for _ in range(rounds):
        for way, one in compiled.items():
            for name, ms in _events(one, given):
                found[way][kinds[way].get(name, ("other", name.split(".")[0]))] += ms / rounds
    return found


def _events(program: Any, given: tuple[Any, Any]) -> list[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*given))
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [(event["args"]["hlo_op"], event["dur"] / 1e3) for event in events if "hlo_op" in event.get("args", {}) and "dur" in event]


def main(model: str, length: int, examples: int, rounds: int) -> None:
    found = milliseconds(*programs(model, length, examples), rounds)
    # A loop's or a call's own event covers those of its body.
    for counter in found.values():
        for kind in [kind for kind in counter if not {*kind}.isdisjoint(WITH_BODY)]:
            del counter[kind]
    plain, private = (found[way] for way in WAYS)
    print(f"{model}, {length} tokens, {examples} examples: plain {plain.total():.1f} ms, private {private.total():.1f} ms")
    codes = {way: collections.Counter() for way in WAYS}
    for way in WAYS:
        for (code, _), ms in found[way].items():
            codes[way][code] += ms
    for code in sorted(
        {*codes["plain"], *codes["book_keeping"]}, key=lambda code: -abs(codes["book_keeping"][code] - codes["plain"][code])
    )[:8]:
        print(f"  {code:24} {codes['plain'][code]:8.2f} {codes['book_keeping'][code]:8.2f}")
    print("by result:")
    for kind in sorted({*plain, *private}, key=lambda kind: -abs(private[kind] - plain[kind]))[:24]:
        print(f"  {kind[0]:16} {kind[1]:28} {plain[kind]:8.2f} {private[kind]:8.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 5)
