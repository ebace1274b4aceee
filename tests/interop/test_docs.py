"""`dpx/docs/fine_tuning.md`: every command runs, in order, on a file and a checkpoint like those it speaks of."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import dpx
from dpx.data.vocabulary import SPECIAL_TOKENS
from tests.interop.cases import Case
from tests.interop.conftest import WORDS
from tests.processes import answers

PAGE = (Path(dpx.__file__).parent / "docs" / "fine_tuning.md").read_text()
# What makes the page's commands quick, and fits its checkpoint of 16 positions.
QUICK = ("steps=2", "microbatch=8", "batch_schedule.size=8", "data.sequence_length=12", "privacy.delta=1e-3")
QUICK += ("schedule.evaluation_rows=16", "data.heldout_fraction=0.2", "noise=multiplier", "noise.noise_multiplier=2.0")


def _write(path: Path, rows: int, seed: int) -> None:
    drawn = np.random.RandomState(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "author"])
        for number in range(rows):
            table.writerow([" ".join(drawn.choice(WORDS, 6)), ("no", "yes")[number % 2], f"a{number // 4}"])


@pytest.mark.slow
def test_fine_tuning_from_a_file_to_weights_for_others(tmp_path: Path):
    folder = Case.read("bert_body_a").write(tmp_path / "checkpoint")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    _write(tmp_path / "reviews.csv", 160, 1)
    _write(tmp_path / "new.csv", 10, 2)
    lines = [shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 12 and all(line[:3] == ["python", "-m", "dpx"] for line in lines)
    given = [line[3:] + list(QUICK if any(word.startswith("name=") for word in line) else ()) for line in lines]
    said = answers([(tmp_path, line) for line in given], trains_alike=True)
    assert [answer.stderr for answer in said if answer.returncode] == []
    assert "protected" in said[0].stdout + said[1].stdout and "dp" in said[4].stdout
    assert "measured.csv" in said[2].stdout and "epsilon (pld)" in said[3].stdout
    assert sorted(path.name for path in (tmp_path / "for_others").iterdir()) >= ["README.md", "config.json", "dpx_config.yaml"]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    own, others = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("predictions", "again")
    )
    assert [line["label"] for line in own] == [line["label"] for line in others] and len(own) == 10
