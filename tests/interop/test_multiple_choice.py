"""The right one of several texts, in the layout of the CaseHOLD preset: from a checkpoint through training, measuring, predicting and
weights for others."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.data.prepare import prepare
from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import RunFolder
from dpx.files.weights import nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import written
from dpx.models.shape import Bert
from dpx.task.declared_task import MultipleChoice
from dpx.task.objective import objective
from tests.planned import plan

from ..training.sharing import run_job
from . import cases
from .conftest import WORDS

CHOICES, ROWS = 5, 60
ENCODERS = [("roberta_classes_a", "RobertaForMultipleChoice"), ("distilbert_classes_a", "DistilBertForMultipleChoice")]


@pytest.fixture(scope="module")
def root(place: Path) -> Iterator[Path]:
    """Made-up rows where the preset looks for CaseHOLD."""
    folder = place / "tasks" / "casehold"
    folder.mkdir(parents=True)
    draws = np.random.RandomState(5)
    said = lambda words: " ".join(draws.choice(WORDS, words))  # noqa: E731
    rows = [{"context": said(6), "endings": [said(3) for _ in range(CHOICES)], "label": int(draws.randint(CHOICES))} for _ in range(ROWS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "test_1000.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPX_DATA", str(place / "tasks"))
        yield place


def composed(root: Path, *overrides: str):
    given = ["init=hf", f"init.path={root}/model", "init.provenance=public", "model=hf", "data=casehold", "task=multiple_choice"]
    given += ["data.vocabulary.size=64", "data.sequence_length=14", "data.heldout_fraction=0.3", f"data.directory={root}/data"]
    given += ["steps=2", "microbatch=4", "batch_schedule.size=8", "privacy.delta=1e-3", "accountant=rdp", "schedule.evaluation_rows=16"]
    return recipes.compose([*given, "noise=multiplier", "noise.noise_multiplier=2.0", "train=lora", "train.head=true", *overrides])


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    cfg = composed(root)
    experiment, job = config.build(cfg)
    path = root / "outputs" / "choices"
    run_job((experiment, job, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg)))), path, None, None)
    return path


def of_run(run: Path, job: str, **options: str) -> None:
    cfg = OmegaConf.merge(OmegaConf.load(run / "private" / "config.yaml"), {"job": {"_target_": job, **options}})
    experiment, made = config.build(cfg)  # type: ignore[arg-type]
    made(experiment, RunFolder(run))


def predicted(run: Path, given: Path, output: Path, **options: str) -> np.ndarray:
    """Scores [rows, choices]; the label of each row is the best of them."""
    of_run(run, "dpx.job.released_jobs.Predict", input=str(given), output=str(output), **options)
    lines = [json.loads(line) for line in Path(f"{output}.jsonl").read_text().splitlines()]
    with Path(f"{output}.csv").open(newline="") as table:
        assert [row["label"] for row in csv.DictReader(table)] == [line["label"] for line in lines]
    scores = np.array([[line["scores"][str(choice)] for choice in range(CHOICES)] for line in lines])
    # Written to six places, two choices may be equally good.
    assert scores[np.arange(len(lines)), [int(line["label"]) for line in lines]].tolist() == scores.max(axis=1).tolist()
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-5)
    return scores


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    of_run(run, "dpx.job.released_jobs.Export")
    return run / "release" / "hf"


@pytest.mark.slow
def test_it_is_planned_trained_and_measured(root: Path, run: Path):
    assert plan(config.build(composed(root))[0])["steps"] == 2
    results, stated = (json.loads((run / place).read_text()) for place in ("private/results.json", "release/privacy.json"))
    assert stated["guarantee"] == "dp" and any("5 labels was declared" in line for line in stated["assumptions"])
    assert results["heldout"].keys() == {"loss", "accuracy", "macro_f1", "micro_f1", "matthews"}
    assert results["baselines"].keys() == {"most_frequent_choice", "start", "untrained"}
    of_run(run, "dpx.job.released_jobs.Evaluate")
    again = json.loads((run / "private" / "evaluation.json").read_text())
    assert again["accuracy"] == results["heldout"]["accuracy"]
    assert again["most_frequent_choice_accuracy"] == results["baselines"]["most_frequent_choice"]


@pytest.mark.slow
def test_a_run_and_its_export_choose_alike_and_by_their_logits(root: Path, run: Path, exported: Path, tmp_path: Path):
    rows = root / "tasks" / "casehold" / "test_1000.jsonl.gz"
    own = predicted(run, rows, tmp_path / "own")
    named = {"text_field": "context", "choices_field": "endings"}
    assert own.shape == (ROWS, CHOICES)
    np.testing.assert_allclose(own, predicted(run, rows, tmp_path / "other", checkpoint=str(exported), **named), atol=1e-5)
    experiment, _ = config.build(OmegaConf.load(run / "private" / "config.yaml"))  # type: ignore[arg-type]
    store = prepare(experiment.data, experiment.privacy)
    of: Any = objective(experiment.model, experiment.task, cases.VOCABULARY, store.manifest)
    batch = of.batch(jnp.zeros(2, jnp.uint32), store.rows("heldout", np.arange(store.manifest.rows["heldout"])))
    logits = np.asarray(jax.jit(of.logits)(released(run / "release" / "params"), batch))
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for row in scores:
        assert np.abs(own - row).max(axis=1).min() < 1e-5, "held-out rows are among those of the file"


@pytest.mark.slow
def test_what_a_file_lacks_is_said_in_a_line(root: Path, run: Path, exported: Path, tmp_path: Path):
    rows, out = root / "tasks" / "casehold" / "test_1000.jsonl.gz", tmp_path / "out"
    with pytest.raises(ConfigError, match=r"job.choices_field=None: the classifier chooses among 5 texts\. Name the column"):
        predicted(run, rows, out, checkpoint=str(exported), text_field="context")
    with pytest.raises(ConfigError, match=r"job.pair_field=label: with choices, each choice already is the second text of a row"):
        predicted(run, rows, out, pair_field="label")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"context": "bade", "endings": ["bade", "bide"]}) + "\n")
    with pytest.raises(ConfigError, match=r"short.jsonl:1: does not have 5 texts under 'endings'\. Give every row 5 texts"):
        predicted(run, short, out)


def other_encoder(name: str, folder: Path) -> Checkpoint:
    """A multiple-choice checkpoint, with the class of its family."""
    body = Checkpoint(str(cases.Case.read(name).write(folder / "body"))).model
    model = Bert(**{**vars(body), "classifier": "relu" if name.startswith("distil") else "pooler"})  # type: ignore[arg-type]
    task = MultipleChoice(choices=CHOICES)
    leaves = {path: cases.values(path, shape) for path, shape in task.parameter_shapes(model, cases.VOCABULARY).items()}
    found = written(model, task, leaves, cases.VOCABULARY, [], type("Special", (), {"pad_id": 1}))
    (folder / "config.json").write_text(json.dumps(found.config))
    weights.write(folder / "model.safetensors", found.tensors)
    return Checkpoint(str(folder))


@pytest.mark.parametrize(("name", "architecture"), ENCODERS)
def test_other_encoders_go_out_under_their_own_classes(name: str, architecture: str, tmp_path: Path):
    checkpoint = other_encoder(name, tmp_path)
    assert checkpoint.config["architectures"] == [architecture] and len(checkpoint.config["id2label"]) == CHOICES
    assert choosing(checkpoint)[0].classifier == ("relu" if name.startswith("distil") else "pooler")


def choosing(checkpoint: Checkpoint) -> tuple[Any, Any, Any]:
    """The model of a checkpoint that chooses, its objective, and its parameters, none of them made new."""
    model, special = checkpoint.model, SpecialIds(pad_id=1, unk_id=0, cls_id=2, sep_id=3, mask_id=4)
    of: Any = objective(model, MultipleChoice(choices=CHOICES), cases.VOCABULARY, special)
    taken = checkpoint.select(of.task.parameter_shapes(model, cases.VOCABULARY))
    assert not taken.made_new and not taken.left_out
    return model, of, jax.tree.map(jnp.asarray, nested(checkpoint.leaves(taken)))


def drawn_rows() -> dict[str, np.ndarray]:
    """Two rows of pairs, of unlike lengths."""
    draws, places = np.random.RandomState(3), np.arange(12)
    length, start = draws.randint(7, 13, (2, CHOICES)), draws.randint(3, 6, (2, CHOICES))
    tokens = np.where(places < length[..., None], draws.randint(5, cases.VOCABULARY, (2, CHOICES, 12)), 1)
    return {"tokens": tokens, "length": length, "segment_start": start, "label": np.zeros(2, np.int32), "record": np.arange(2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exported", *(name for name, _ in ENCODERS)])
def test_transformers_chooses_alike(name: str, exported: Path, tmp_path: Path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    checkpoint = Checkpoint(str(exported)) if name == "exported" else other_encoder(name, tmp_path)
    _, of, params = choosing(checkpoint)
    rows = drawn_rows()
    places, length, start = np.arange(12), rows["length"][..., None], rows["segment_start"][..., None]
    given = {"input_ids": rows["tokens"], "attention_mask": places < length}
    given |= {"token_type_ids": (places >= start) & (places < length)} if name == "exported" else {}
    model = transformers.AutoModelForMultipleChoice.from_pretrained(str(checkpoint.folder)).eval()
    with torch.no_grad():
        theirs = model(**{key: torch.tensor(np.array(values, np.int64)) for key, values in given.items()}).logits.numpy()
    np.testing.assert_allclose(jax.jit(of.logits)(params, of.batch(jnp.zeros(2, jnp.uint32), rows)), theirs, atol=1e-5)
