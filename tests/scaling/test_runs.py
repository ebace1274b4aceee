"""Measurements from run folders: whole windows of steps, exact parameters, and runs that are still going on."""

import csv
import functools
import json

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx.config import recipes, resolved
from dpx.cost import measured_runs
from dpx.cost.measured_runs import NUMBERS, TEXT, Measurements
from dpx.declaration import ConfigError


@functools.cache
def released(*overrides):
    """The config of a point of the laptop grid as YAML."""
    point = ["hydra.mode=RUN", "data=text", "data.source.paths=x", *overrides]
    return OmegaConf.to_yaml(resolved(recipes.compose(["+experiment=laptop/mckenna_grid", *point])))


def folder(path, losses, *overrides):
    """A run of the laptop grid as it leaves its config and metrics."""
    (path / "release").mkdir(parents=True)
    (path / "private").mkdir()
    (path / "release" / "config.yaml").write_text(released(*overrides))
    lines = [json.dumps({"step": step, "train/loss": loss, "train/examples": 128.0}) for step, loss in enumerate(losses, 1)]
    (path / "private" / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_records_are_means_of_whole_windows():
    steps, means = measured_runs.record_means(np.arange(250.0), np.ones(250, bool))
    assert steps.tolist() == [100, 200] and means.tolist() == [49.5, 149.5]


def test_steps_without_examples_do_not_count():
    losses = np.array([1.0, 0.0, 3.0, 9.0, 0.0, 0.0, 5.0, np.inf])
    steps, means = measured_runs.record_means(losses, losses > 0, every=2)
    assert steps.tolist() == [2, 4, 8] and means.tolist() == [1.0, 6.0, np.inf]


def test_runs_become_rows_and_what_is_no_run_is_named(tmp_path):
    folder(tmp_path / "laptop_mckenna_grid-a", np.linspace(7, 6, 200))
    folder(
        tmp_path / "laptop_mckenna_grid-b", np.linspace(7, 6, 150), "model=width_32", "noise.noise_batch_ratio=0.0009765625", "replicate=1"
    )
    folder(tmp_path / "laptop_mckenna_grid-c", [7.0])
    (tmp_path / "laptop_mckenna_grid-c" / "release" / "config.yaml").unlink()
    folder(tmp_path / "laptop_mckenna_grid-d", [7.0] * 99 + [float("inf")])
    for name, file, text in (
        ("e", "release/config.yaml", "a: ["),
        ("f", "release/config.yaml", "{}"),
        ("g", "private/metrics.jsonl", "[]"),
    ):
        folder(tmp_path / f"laptop_mckenna_grid-{name}", np.linspace(7, 6, 200))
        (tmp_path / f"laptop_mckenna_grid-{name}" / file).write_text(text)
    found, left_out = measured_runs.measured(tmp_path, "laptop_mckenna_grid-")
    assert found.step.tolist() == [100, 200, 100] and found.model.tolist() == ["width_16", "width_16", "width_32"]
    assert found.noise_batch_ratio.tolist() == [2**-15, 2**-15, 2**-10] and found.replicate.tolist() == [0, 0, 1]
    # Tables of 1,024 + 32 + 2 rows, two layers of 12 H^2 + 13 H, and the head.
    assert found.parameters[0] == (1024 + 32 + 2) * 16 + 2 * 16 + 2 * (12 * 16**2 + 13 * 16) + 16 * 16 + 16 + 2 * 16 + 1024
    assert [line[: len("laptop_mckenna_grid-c")] for line in left_out] == [f"laptop_mckenna_grid-{name}" for name in "cdefg"]
    assert "not a finite number" in left_out[1]


def test_of_two_runs_with_the_same_settings_the_longer_counts(tmp_path):
    for name, steps in (("a", 200), ("b", 300), ("c", 300)):
        folder(tmp_path / name, np.full(steps, float(ord(name))))
    found, left_out = measured_runs.measured(tmp_path)
    assert found.loss.tolist() == [ord("b")] * 3
    assert [line.split("; ")[0] for line in left_out] == ["a: the settings of b", "c: the settings of b"]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run"):
        measured_runs.measured(tmp_path)


@pytest.mark.parametrize("row", ["width_16,24848", "width_16,24848,0,1,0,128,32,100,much", "width_16,24848,0,1,0,128,32,100,nan"])
def test_a_row_that_is_none_is_refused(row, tmp_path):
    (tmp_path / "losses.csv").write_text(f"{','.join((*TEXT, *NUMBERS))}\n{row}\n")
    with pytest.raises(ConfigError, match="is not a number|not a finite number"):
        Measurements.read(tmp_path / "losses.csv")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "width_16,24848,0,1,0,128,32,100,5\nwidth_16,24848,0,1,0,128,32,100,6",
            "width_16 at ratio 0, rate 1, replicate 0, step 100: has two",
        ),
        ("width_16,24848,-0.5,1,0,128,32,100,5", "noise_batch_ratio: contains a value below 0"),
        ("width_16,24848,0,1,0,128,32,100,5\nwidth_16,24848,0,1", "row 2, column replicate: None is not a number"),
        ("Gr\xf6\xdfe,24848,0,1,0,128,32,100,5", "is not a CSV table in UTF-8"),
        ("x" * 200_000, "is not a CSV table in UTF-8"),
    ],
)
def test_a_table_that_is_none_is_refused_in_one_line(text, words, tmp_path, request):
    # The limit is the process's, and reading a corpus raises it.
    request.addfinalizer(functools.partial(csv.field_size_limit, csv.field_size_limit(131_072)))
    (tmp_path / "losses.csv").write_text(f"{','.join((*TEXT, *NUMBERS))}\n{text}\n", encoding="latin-1")
    with pytest.raises(ConfigError, match=words):
        Measurements.read(tmp_path / "losses.csv")


def test_a_mark_of_byte_order_is_no_part_of_a_name(tmp_path):
    (tmp_path / "losses.csv").write_text(f"{','.join((*TEXT, *NUMBERS))}\nwidth_16,24848,0,1,0,128,32,100,5\n", encoding="utf-8-sig")
    assert Measurements.read(tmp_path / "losses.csv").model.tolist() == ["width_16"]


@pytest.mark.parametrize("match", ["/x", "**", "[a", "?"])
def test_what_folders_begin_with_is_no_pattern(match, tmp_path):
    folder(tmp_path / "a", np.full(200, 7.0))
    with pytest.raises(ConfigError, match="no run in this folder has a record"):
        measured_runs.measured(tmp_path, match)
