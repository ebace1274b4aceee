"""A run's explanation and card say whether it moved what it trained by more than its noise would have."""

import copy
import dataclasses
import functools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config.declared_init import FromRun
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import RunFolder
from dpx.files.weights import Tensors, by_path, write
from dpx.job.change import sentences_of
from dpx.job.explain import Explain
from dpx.job.released_jobs import Export
from dpx.mechanism.banded import Banded
from dpx.mechanism.rgp import Rgp
from dpx.optimizer import Optax
from dpx.statement.seals import read_run_statement
from dpx.statement.statement_records import RunStatement
from dpx.training import change_measured
from dpx.training.change_measured import Change

from .conftest import WORDS, train

LORA = ("train=lora", "train.head=true", "train.rank=2")
PARTS = {"lora": LORA, "last_layer": ("train=last_layer",), "all": ("train=all",)}
# Seeded: what noise alone does in one run of a thousand is not left to chance.
FIXED = (
    "seed=1",
    "steps=12",
    "init.provenance=public",
    "lr_schedule.decay=constant",
    "lr_schedule.warmup_steps=0",
    "batch_schedule.size=32",
)
# A rate that float32 rounds to zero, noise that hides every gradient, and noise that hides none.
KINDS = {
    "still": ("lr_schedule.learning_rate=1e-60",),
    "loud": ("noise.noise_multiplier=30000",),
    "quiet": ("noise.noise_multiplier=0.001",),
}


@pytest.fixture(scope="module", autouse=True)
def simulated_once():
    """What noise alone does is simulated once for each of the runs, however often a run is compared."""
    kept, moments = {}, change_measured.moments

    def once(*given: Any) -> Any:
        name = pickle.dumps(given)
        if name not in kept:
            kept[name] = moments(*given)
        return kept[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_measured, "moments", once)
        yield


@pytest.fixture(scope="module")
def runs(place: Path) -> Callable[[str, str], Path]:
    """Runs on rows that nearly all have one label, by what they train and by their noise."""
    draws = np.random.RandomState(1)
    rows = [f"{' '.join(draws.choice(WORDS, 6))},{int(number % 16 > 0)}" for number in range(80)]
    (place / "alike.csv").write_text("\n".join(["text,label", *rows]) + "\n")

    @functools.cache
    def run(part: str, kind: str) -> Path:
        # Each in a folder of its own: a run that did not move releases the arrays of the checkpoint, from which no other may then begin.
        return train(place, f"{part}_{kind}/run", f"data.source.paths={place}/alike.csv", *PARTS[part], *FIXED, *KINDS[kind])

    return run


def declared(run: Path) -> Any:
    return config.build(OmegaConf.load(run / "private" / "config.yaml"))[0]  # type: ignore[arg-type]


def stated_by(run: Path) -> RunStatement:
    stated = read_run_statement(run / "release" / "privacy.json")
    assert isinstance(stated, RunStatement)
    return stated


def change(run: Path) -> Change:
    (_, found) = sentences_of(declared(run), run / "release", stated_by(run))
    assert found is not None
    return found


@pytest.mark.parametrize("part", ["lora", *(pytest.param(part, marks=pytest.mark.slow) for part in ("last_layer", "all"))])
def test_a_rate_of_zero_noise_alone_and_learning_are_told_apart(runs: Callable[[str, str], Path], part: str):
    still, loud, quiet = (change(runs(part, kind)) for kind in KINDS)
    assert still.whole.change == 0 and still.verdict == "unmoved" and ". WARNING: " in still.sentence()
    assert loud.verdict == "within" and loud.whole.ratio == pytest.approx(1, abs=0.1)
    assert ". Inconclusive: " in loud.sentence() and " The test sees changes from 1." in loud.sentence()
    assert quiet.verdict == "moved" and "WARNING" not in quiet.sentence() and " The test sees changes from 1." in quiet.sentence()
    assert not any("\n" in one.sentence() for one in (still, loud, quiet))


# Slow: the sentences are held above; where cards and explanations get them is one call.
@pytest.mark.slow
def test_explanation_and_card_repeat_it(runs: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]):
    loud, quiet = runs("lora", "loud"), runs("lora", "quiet")
    for run in (loud, quiet):
        Explain()(declared(run), RunFolder(run))
        document = json.loads((run / "release" / "explain.json").read_text())
        (rows,) = [table["rows"] for table in document["tables"] if table["name"] == "what_training_changed"]
        assert {row["parameter"] for row in rows} >= {"layers/lora/query/b", "layers/lora/value/b", "all of these"}
        assert sum("Inconclusive" in line for line in document["words"]) == (run == loud)
    shown = capsys.readouterr().out
    assert "where noise alone gives" in shown and "What it learnt: " in shown and "Without learning: " in shown
    Export()(declared(loud), RunFolder(loud))
    card = (loud / "release" / "hf" / "README.md").read_text()
    assert "## What training changed" in card and ". Inconclusive: a change by the data of this size or less is hidden by the noise" in card
    assert "- Figures on held-out rows are not here: they depend on those rows without noise." in card


def test_it_is_computed_from_what_is_released_and_public(runs: Callable[[str, str], Path], place: Path, tmp_path: Path):
    run = runs("lora", "quiet")
    experiment, stated = declared(run), stated_by(run)
    shutil.copytree(run / "release", tmp_path / "release")
    assert sentences_of(experiment, tmp_path / "release", stated)[1] == change(run)
    # Adapters' first factors and the new head were drawn from the secret.
    compared = {one.parameter for one in change(run).parts}
    trained = set(by_path(released(run / "release" / "params"))) - compared
    assert {"layers/lora/query/a", "classifier/kernel"} <= trained and "layers/lora/query/b" in compared
    assert "(the others were drawn from the run's secret" in change(run).sentence()
    other = shutil.copytree(place / "model", tmp_path / "model")
    found = Tensors(other)
    held = dict(found.read(found.shapes))
    write(other / "model.safetensors", held | {"pooler.dense.bias": held["pooler.dense.bias"] + np.float32(1)})
    for path, words in (
        (other, "other weights are now in the place of"),
        (tmp_path / "gone", "the weights that the run began"),
    ):
        moved = dataclasses.replace(experiment, init=dataclasses.replace(experiment.init, path=str(path)))
        (line,), found = sentences_of(moved, run / "release", stated)
        assert found is None and line.startswith(f"What training changed is not compared with noise alone: init=hf: {words}")
        assert str(tmp_path) not in line, "it is on the card, where no path of a machine is"


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"optimizer": Optax(name="lamb")}, "optimizer=lamb: its update of a number reads other numbers, which is not simulated"),
        ({"mechanism": Rgp(rank=2)}, "mechanism=rgp: its noise is not independent noise on gradients"),
        ({"mechanism": Banded(bands=2)}, "mechanism=banded: its noise is not independent noise on gradients"),
        ({"init": FromRun(run="outputs/a", step=3)}, "init=run: the run began from a checkpoint of another run"),
    ],
)
def test_what_cannot_be_compared_is_said(runs: Callable[[str, str], Path], replaced: dict[str, Any], words: str):
    run = runs("lora", "quiet")
    # Parts of an experiment that is checked as a whole are replaced one by one.
    experiment = copy.copy(declared(run))
    for name, value in replaced.items():
        object.__setattr__(experiment, name, value)
    (line,), found = sentences_of(experiment, run / "release", stated_by(run))
    assert found is None and words in line
