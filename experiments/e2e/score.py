"""Scores completions of the meanings of E2E (Novikova et al. 2017) against all references of each meaning.

    python -m dpx job=generate run=<folder> generate.prompts=$DPX_DATA/e2e/test.jsonl.gz generate.beams=4
    python experiments/e2e/score.py <completions>.jsonl

prints BLEU by sacrebleu with its signature, and ROUGE-L by rouge-score: the F-measure against the reference that gives the highest, on
average over meanings (extra `parity`). A second argument names another file of rows in place of $DPX_DATA/e2e/test.jsonl.gz; it must be the
file whose rows were completed, since a completion names its row.
"""

import gzip
import json
import os
import sys
from collections import defaultdict
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any


def pairs(completions: Path, rows: Path) -> list[tuple[str, list[str]]]:
    """Returns each completion with all references of its meaning. Raises `SystemExit` for a row that the file does not have."""
    with gzip.open(rows, "rt") if rows.name.endswith(".gz") else rows.open() as file:
        told = [json.loads(line) for line in file]
    references = defaultdict(list)
    for one in told:
        references[one["meaning"]].append(one["reference"])
    found = []
    for line in map(json.loads, completions.read_text().splitlines()):
        if not (0 < line["row"] <= len(told) and told[line["row"] - 1]["meaning"] in line["prompt"]):
            sys.exit(f"{completions}: row {line['row']} is not a completion of that row of {rows}. Name the file that was completed")
        found.append((line["completion"].strip(), references[told[line["row"] - 1]["meaning"]]))
    return found


def scores(found: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Returns both scores, from 0 to 100, and how each was computed."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

    bleu, rouge = BLEU(), RougeScorer(["rougeL"], use_stemmer=False)
    texts = [text for text, _ in found]
    # The n-th references of all meanings, with None for a meaning that has fewer.
    streams = [list(stream) for stream in zip_longest(*(references for _, references in found))]
    best = [rouge.score_multi(references, text)["rougeL"].fmeasure for text, references in found]
    return {
        "meanings": len(found),
        "references": sum(len(references) for _, references in found),
        "bleu": round(bleu.corpus_score(texts, streams).score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "rouge_l": round(100 * sum(best) / len(best), 2),
        "rouge_l_signature": f"rouge-score {version('rouge-score')}, rougeL F-measure, best reference, no stemmer",
    }


if __name__ == "__main__":
    given = [Path(one) for one in sys.argv[1:]]
    print(json.dumps(scores(pairs(given[0], given[1] if given[1:] else Path(os.environ["DPX_DATA"], "e2e", "test.jsonl.gz"))), indent=1))
