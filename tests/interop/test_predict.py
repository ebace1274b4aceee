"""Labels and scores of a file's rows are the same from a run and from its exported folder, and are those of its logits."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.released_jobs import _write
from dpx.statement.seals import MANIFEST
from dpx.training.evaluation import of_checkpoint
from tests.composed import composed

from .conftest import train


def predict(run: Path, given: Path, output: Path, **options: str):
    node = {"_target_": "dpx.job.released_jobs.Predict", "input": str(given), "output": str(output), **options}
    cfg = OmegaConf.merge(OmegaConf.load(run / "private" / "config.yaml"), {"job": node})
    experiment, job = config.build(cfg)  # type: ignore[arg-type]
    job(experiment, RunFolder(run))
    with Path(f"{output}.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    lines = [json.loads(line) for line in Path(f"{output}.jsonl").read_text().splitlines()]
    assert [(str(line["row"]), line["label"]) for line in lines] == [(row["row"], row["label"]) for row in rows]
    return lines


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return train(place, "classifier", "train=last_layer", "init.provenance=public")


@pytest.mark.slow
def test_a_run_and_its_export_predict_alike(run: Path, place: Path, tmp_path: Path):
    cfg = OmegaConf.merge(OmegaConf.load(run / "private" / "config.yaml"), {"job": {"_target_": "dpx.job.released_jobs.Export"}})
    experiment, job = config.build(cfg)  # type: ignore[arg-type]
    job(experiment, RunFolder(run))
    own = predict(run, place / "rows.csv", tmp_path / "own")
    assert len(own) == 80 and {line["label"] for line in own} <= {"0", "1"}
    for line in own:
        assert sum(line["scores"].values()) == pytest.approx(1, abs=1e-5)
        assert line["scores"][line["label"]] == max(line["scores"].values()), "written to six places, both may be equal"
    exported = predict(run, place / "rows.csv", tmp_path / "exported", checkpoint=str(run / "release" / "hf"))
    scores = [np.array([list(line["scores"].values()) for line in lines]) for lines in (own, exported)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    assert of_checkpoint(str(run / "release" / "hf")).sequence_length == experiment.data.sequence_length, "longer texts are cut alike"
    named = run / "release" / "hf" / "config.json"
    (named.parent / MANIFEST).unlink()
    for labels in ({"first": "0", "second": "1"}, {"0": "1", "1": "1"}, {"1": "0", "2": "1"}):
        named.write_text(json.dumps(json.loads(named.read_text()) | {"id2label": labels}))
        with pytest.raises(ConfigError, match="does not name each class once under id2label"):
            of_checkpoint(str(named.parent))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_file_that_is_read_is_not_written_over(tmp_path: Path, suffix: str):
    given = tmp_path / f"rows{suffix}"
    given.write_text("text\na\n")
    _, job, _ = composed("job=predict", "job.input=a", "job.output=b")
    with pytest.raises(ConfigError, match=f"^job.output=.*rows: .*rows{suffix} would overwrite the input"):
        dataclasses.replace(job, input=str(given), output=str(tmp_path / "rows"))(composed()[0], RunFolder(tmp_path))
    assert given.read_text() == "text\na\n"


@pytest.mark.parametrize("second", [ConfigError("rows.csv:3", "has an empty text", "Give it text"), np.array([np.nan, np.nan])])
def test_predictions_that_are_there_stay_until_the_new_ones_are_whole(tmp_path: Path, second: object):
    def scores(*given: Any):
        for one in given:
            if isinstance(one, ConfigError):
                raise one
            yield one

    first = np.array([0.25, 0.75])
    assert _write(tmp_path / "out", ["no", "yes"], scores(first)) == 1
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"out.jsonl", "out.csv"} and b'"label": "yes"' in before["out.jsonl"]
    with pytest.raises(ConfigError, match="rows.csv:3: has an empty text|row 2: its scores are not numbers"):
        _write(tmp_path / "out", ["no", "yes"], scores(first, second))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_predicted_is_said_in_a_line(run: Path, place: Path, tmp_path: Path):
    (tmp_path / "a.csv").write_text("words,label\na,1\n")
    with pytest.raises(ConfigError, match=r"a.csv:2: has no column 'text'; its columns are words, label"):
        predict(run, tmp_path / "a.csv", tmp_path / "out")
    with pytest.raises(ConfigError, match="none.csv: no such file. Name a file that ends in one of"):
        predict(run, tmp_path / "none.csv", tmp_path / "out")
    (tmp_path / "a.txt").write_text("words\n")
    with pytest.raises(ConfigError, match="a.txt: dpx cannot read this kind of file"):
        predict(run, tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(ConfigError, match="does not name its labels in its config.json|has no classifier/bias"):
        predict(run, place / "rows.csv", tmp_path / "out", checkpoint=str(place / "model"))
