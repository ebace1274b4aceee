"""What a private fine-tuning step costs beside autodiff and beside Opacus, on one machine, as ratios of programs that take turns.

In an environment with dpx and torch, transformers, peft and opacus:
    python experiments/fine_tuning/speed.py <checkpoint folder> [--lengths 32 128] [--batch 32] [--rounds 9]

The checkpoint gives the shape alone: weights, tokens and labels are random. Each row of the table is a way to sum one batch's gradients;
ratios are medians over rounds, with the least and the most.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dpx.config import build, recipes
from dpx_papers.benchmark.job import interleaved
from dpx_papers.benchmark.setting import Setting
from dpx_papers.benchmark.worker import worker

HERE = Path(__file__).parent
OURS, THEIRS = ("autodiff", "private"), ("torch", "opacus_hooks", "opacus_ghost")


def settings(checkpoint: Path, train: str, length: int, batch: int) -> Iterator[tuple[str, Setting]]:
    """The two processes of a row of the table: ours, and torch's with the same shape, batch and length."""
    given = [f"init.path={checkpoint}", "init=hf", "init.provenance=public", "model=hf", "model.pool=cls", "task=classification"]
    given += ["data=synthetic_labels", f"data.sequence_length={length}", f"train={train}"]
    experiment, _ = build(recipes.compose(given if train == "all" else [*given, "train.head=true"]))
    for module, variants in (("speed_ours", OURS), ("speed_torch", THEIRS)):
        yield module, Setting(experiment, variants, ("float32",), batch, (batch,))


def measured(checkpoint: Path, train: str, length: int, batch: int, rounds: int) -> list[list[str]]:
    """Rows of the table for what is trained at one length."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(*one)) for one in settings(checkpoint, train, length, batch)]
        seconds = dict(zip((*OURS, *THEIRS), interleaved(workers, rounds), strict=True))
    return [
        [train, str(length), name, f"{batch / statistics.median(times):.1f}"]
        + [ratio(seconds[base], times) for base in ("autodiff", "torch", "opacus_hooks", "opacus_ghost")]
        for name, times in seconds.items()
    ]


def ratio(base: list[float], own: list[float]) -> str:
    """How many times as fast as `base`, round by round."""
    each = [theirs / ours for theirs, ours in zip(base, own, strict=True)]
    return f"{statistics.median(each):.2f} [{min(each):.2f}, {max(each):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    columns = ("trained", "tokens", "way", "examples/s", "to autodiff", "to torch", "to Opacus, hooks", "to Opacus, ghost")
    print(f"{os.cpu_count()} cores, batch {given.batch}, {given.rounds} rounds: median [least, most]\n")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns), flush=True)
    for train, length in itertools.product(("all", "lora"), given.lengths):
        for row in measured(given.checkpoint, train, length, given.batch, given.rounds):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
