"""A file that dpx has never seen, through data=table, and the same rows through a preset: one seeded run."""

import csv
import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import dpx
from tests.composed import composed
from tests.training.sharing import run_job, shared_programs

WORDS = [f"{first}{second}" for first in "bdfgklm" for second in "aeiou"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files where the preset of SST-2 looks for them, and as CSV with other column names and text labels."""
    draws = np.random.RandomState(0)
    drawn = [(" ".join(draws.choice(WORDS, 5)), number % 2) for number in range(120)]
    (tmp_path / "sst2").mkdir()
    for name, some in (("train", drawn[:100]), ("dev", drawn[100:])):
        lines = "\n".join(["sentence\tlabel", *(f"{text}\t{label}" for text, label in some)]) + "\n"
        (tmp_path / "sst2" / f"{name}.tsv.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["number", "said", "mood"])
            writer.writerows((number, text, ("bad", "good")[label]) for number, (text, label) in enumerate(some))
    monkeypatch.setenv("DPX_DATA", str(tmp_path))
    (tmp_path / "vocabulary.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return tmp_path


@pytest.mark.slow
def test_a_table_and_a_preset_of_the_same_rows_give_the_same_run(folder: Path):
    given = ["model=micro", "model.layers=1", "task=classification", "seed=3", "steps=2", "microbatch=8"]
    given += ["batch_schedule.size=16", "data.sequence_length=16"]
    given += [f"data.vocabulary.path={folder}/vocabulary.txt", "data.vocabulary.size=64", f"data.directory={folder}/data"]
    given += ["privacy.delta=1e-4", "accountant=rdp", "noise=multiplier", "noise.noise_multiplier=1.0", "data.heldout_fraction=0.2"]
    table = [
        "data=table",
        f"data.source.paths={folder}/train.csv",
        f"data.source.test_paths={folder}/dev.csv",
        "data.public_fraction=0",
    ]
    table += ["data.source.text_field=said", "data.source.label_field=mood", "data.source.labels=[bad,good]"]
    with shared_programs():
        for name, of in (("table", table), ("preset", ["data=glue_sst2"])):
            assert run_job(composed(*given, *of), folder / name)
    own, preset = (dpx.load(folder / name) for name in ("table", "preset"))
    jax.tree.map(np.testing.assert_array_equal, own.params, preset.params)
    assert own.privacy["spent"] == preset.privacy["spent"] and own.privacy["declared_size"] == preset.privacy["declared_size"]
    metrics = [json.loads((folder / name / "private" / "results.json").read_text()) for name in ("table", "preset")]
    assert all(metrics[0][split] == metrics[1][split] for split in ("heldout", "test"))
