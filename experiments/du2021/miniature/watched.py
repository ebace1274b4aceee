"""A run as `python -m dpx` starts it, and the words that each of its steps shows, counted beside it in `$WORDS`, a CSV file.

python experiments/du2021/miniature/watched.py <overrides of dpx>

Counted is the run's own gradient: a word is recovered if its row of the word table's gradient is not exactly zero, where the gradient is
what the step adds up and hands to the optimiser, with the run's noise, weights and rows. It needs mechanism=none or dp_fp with a trained
word table. Nothing of the run changes. The file holds counts alone: (run, step, rows, words, recovered, wrong).
"""

import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = ("run", "step", "rows", "words", "recovered", "wrong")
# Padding, [CLS] and [SEP] are not words.
MARKS = ("pad_id", "cls_id", "sep_id")


def watch(path: Path) -> None:
    """From here on every step's sum is compared with the words of its rows, and a line is added to `path`."""
    from dpx.training import loop

    chunks, sums, seen = loop.chunks, loop._sums, []

    def watched_chunks(*given: Any) -> Any:
        for chunk in chunks(*given):
            seen.append(tuple(np.asarray(value) for value in (chunk.rows_KB["tokens"], chunk.rows_KB["length"], chunk.is_padding_KB)))
            yield chunk

    def watched_sums(run: Any, secret: Any, step: int, *rest: Any) -> Any:
        seen.clear()
        found, tokens = sums(run, secret, step, *rest)
        gradient_VH = np.asarray(found["gradient"]["embeddings"]["word"]).sum(0)
        marks = {int(getattr(run.store.manifest, name)) for name in MARKS}
        read = set(np.flatnonzero(np.any(gradient_VH != 0, axis=1)).tolist()) - marks
        words, rows = set(), 0
        for tokens_KBT, length_KB, is_padding_KB in seen:
            is_real = ~is_padding_KB
            rows += int(is_real.sum())
            is_text = is_real[..., None] & (np.arange(tokens_KBT.shape[-1]) < length_KB[..., None])
            words |= set(tokens_KBT[is_text].tolist())
        words -= marks
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(
                (run.experiment.name, step, rows, len(words), len(words & read), len(read - words))
            )
        return found, tokens

    loop.chunks, loop._sums = watched_chunks, watched_sums


def main() -> None:
    watch(Path(os.environ["WORDS"]))
    sys.argv[0] = "python -m dpx"
    from dpx.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
