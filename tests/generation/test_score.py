"""`experiments/e2e/score.py`: each completion is scored against all references of its meaning."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "experiments" / "e2e" / "score.py"
SPEC = importlib.util.spec_from_file_location("score", PATH)
assert SPEC is not None and SPEC.loader is not None
score = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(score)

ROWS = [("name : Mill", "The Mill is a pub ."), ("name : Mill", "A pub is called The Mill ."), ("name : Vaults", "Vaults is cheap .")]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    rows, completions = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"meaning": meaning, "reference": reference}) + "\n" for meaning, reference in ROWS))
    said = [(1, "name : Mill\n", " A pub is called The Mill .\n"), (3, "name : Vaults\n", "Vaults is not cheap at all .")]
    completions.write_text("".join(json.dumps({"row": row, "prompt": asked, "completion": text}) + "\n" for row, asked, text in said))
    return completions, rows


def test_a_completion_has_all_references_of_its_meaning(files):
    assert score.pairs(*files) == [
        ("A pub is called The Mill .", ["The Mill is a pub .", "A pub is called The Mill ."]),
        ("Vaults is not cheap at all .", ["Vaults is cheap ."]),
    ]
    files[1].write_text(json.dumps({"meaning": "name : Inn", "reference": "An inn ."}) + "\n")
    with pytest.raises(SystemExit, match="row 1 is not a completion of that row"):
        score.pairs(*files)


def test_scores_are_those_of_a_count_by_hand(files):
    for library in ("sacrebleu", "rouge_score"):
        pytest.importorskip(library)
    found = score.scores(score.pairs(*files))
    # All 7, 6, 5 and 4 n-grams of the first completion; of the second "Vaults", "is", "cheap" and ".", and "Vaults is". No text is short.
    precisions = [11 / 14, 7 / 12, 5 / 10, 4 / 8]
    assert found["bleu"] == pytest.approx(100 * math.exp(sum(map(math.log, precisions)) / 4), abs=0.01)
    # ROUGE drops punctuation: all 6 words of the first; of the second "Vaults is cheap", 3 of its 6 and 3 of 3.
    assert found["rouge_l"] == pytest.approx(100 * (1 + 2 * 0.5 / 1.5) / 2, abs=0.01)
    assert found["references"] == 3 and "nrefs:var" in found["bleu_signature"] and "rougeL" in found["rouge_l_signature"]
