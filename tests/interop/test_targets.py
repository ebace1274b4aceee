"""Numbers and several labels: from a file through training, the claim and predictions to the classes of transformers."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.results import interval_of, read_results
from dpx.files.run_folder import RunFolder
from dpx.interop.written import in_units_of_target
from dpx.task.declared_targets import Regression

from ..training.sharing import run_job
from .conftest import WORDS

NAMES = ("calm", "loud", "new")


@pytest.fixture(scope="module")
def rows(place: Path) -> Path:
    """Texts of which some have no number, and some lack a label."""
    draws = np.random.RandomState(2)
    with (place / "targets.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "score", *NAMES])
        for number in range(80):
            truths = ["" if draws.random() < 0.1 else int(one) for one in draws.random(3) < 0.5]
            table.writerow([" ".join(draws.choice(WORDS, 6)), "" if number % 9 == 0 else round(draws.uniform(0, 5), 2), *truths])
    return place / "targets.csv"


def trained(place: Path, rows: Path, name: str, *given: str) -> Path:
    common = ["init=hf", f"init.path={place}/model", "init.provenance=public", "data=table", f"data.source.paths={rows}"]
    common += ["data.heldout_fraction=0.2", "data.sequence_length=12", f"data.directory={place}/data", "steps=2", "microbatch=8"]
    common += ["batch_schedule.size=8", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-3"]
    cfg = recipes.compose([*common, *given])
    experiment, job = config.build(cfg)
    path = place / "outputs" / name
    run_job((experiment, job, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg)))), path, None, None)
    return path


def of_run(run: Path, job: str, **options: str) -> None:
    cfg = OmegaConf.merge(OmegaConf.load(run / "private" / "config.yaml"), {"job": {"_target_": f"dpx.job.released_jobs.{job}", **options}})
    experiment, made = config.build(cfg)  # type: ignore[arg-type]
    made(experiment, RunFolder(run))


def predicted(run: Path, given: Path, output: Path, **options: str) -> list[dict]:
    of_run(run, "Predict", input=str(given), output=str(output), **options)
    with Path(f"{output}.csv").open(newline="") as table:
        assert len(list(csv.DictReader(table))) == 80
    return [json.loads(line) for line in Path(f"{output}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def number(place: Path, rows: Path) -> Path:
    return trained(place, rows, "number", "data.source.target_field=score", "task=regression", "task.mean=2.5", "task.scale=1.5")


@pytest.fixture(scope="module")
def several(place: Path, rows: Path) -> Path:
    return trained(place, rows, "several", f"data.source.label_names=[{','.join(NAMES)}]", "task=multi_label")


def of_transformers(folder: Path, texts: list[str]) -> tuple[dict, np.ndarray]:
    """Config and outputs of the exported folder by transformers."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        outputs = model(**tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")).logits
    return json.loads((folder / "config.json").read_text()), outputs.numpy()


def texts_of(rows: Path) -> list[str]:
    with rows.open(newline="") as table:
        return [row["text"] for row in csv.DictReader(table)]


def test_a_number_is_trained_judged_predicted_and_exported_in_its_units(number: Path, rows: Path, tmp_path: Path):
    results, claim = read_results(number / "private"), json.loads((number / "release" / "privacy.json").read_text())
    assert results.metric == "pearson" and {"rmse", "spearman", "constant_rmse"} <= set(results.heldout)
    assert results.baselines["constant"] == 0.0 and results.rows is not None and results.rows < 20, "rows without a number are not judged"
    assert interval_of("pearson", results.heldout["pearson"], results.rows) is not None
    assert (
        claim["guarantee"] == "dp"
        and "the mean and the scale of the target were declared without looking at the protected rows" in claim["assumptions"]
    )
    of_run(number, "Export")
    own = predicted(number, rows, tmp_path / "own")
    exported = predicted(number, rows, tmp_path / "exported", checkpoint=str(number / "release" / "hf"))
    numbers = np.array([line["score"] for line in own])
    np.testing.assert_allclose(numbers, [line["score"] for line in exported], atol=1e-5)
    written, outputs = of_transformers(number / "release" / "hf", texts_of(rows))
    assert written["problem_type"] == "regression" and written["id2label"] == {"0": "score"}
    np.testing.assert_allclose(outputs[:, 0], numbers, atol=2e-5)


def test_several_labels_are_trained_judged_predicted_and_exported(several: Path, rows: Path, tmp_path: Path):
    results, claim = read_results(several / "private"), json.loads((several / "release" / "privacy.json").read_text())
    assert results.metric == "subset_accuracy" and {"micro_f1", "macro_f1", "constant_micro_f1"} <= set(results.heldout)
    assert 0 < results.baselines["most_frequent_labels"] < 1
    assert "the list of 3 labels was declared without looking at the protected rows" in claim["assumptions"]
    of_run(several, "Export")
    own = predicted(several, rows, tmp_path / "own")
    exported = predicted(several, rows, tmp_path / "exported", checkpoint=str(several / "release" / "hf"))
    scores = np.array([[line["scores"][name] for name in NAMES] for line in own])
    np.testing.assert_allclose(scores, [[line["scores"][name] for name in NAMES] for line in exported], atol=1e-5)
    assert all(line["label"] == [name for name in NAMES if line["scores"][name] > 0.5] for line in own)
    written, outputs = of_transformers(several / "release" / "hf", texts_of(rows))
    assert written["problem_type"] == "multi_label_classification" and written["id2label"] == {"0": "calm", "1": "loud", "2": "new"}
    np.testing.assert_allclose(1 / (1 + np.exp(-outputs)), scores, atol=2e-5)


def test_a_head_without_a_bias_holds_no_mean():
    leaves = {"classifier/kernel": np.ones((2, 1), np.float32)}
    held = in_units_of_target(Regression(mean=0.0, scale=3.0), leaves)
    np.testing.assert_array_equal(held["classifier/kernel"], [[3.0], [3.0]])
    with pytest.raises(ConfigError, match=r"task.mean=1.0: the classifier of a decoder has no bias"):
        in_units_of_target(Regression(mean=1.0, scale=3.0), leaves)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_adapters_and_head_are_loaded_by_peft(place: Path, rows: Path, tmp_path: Path, task: str):
    transformers, peft, torch = (pytest.importorskip(package) for package in ("transformers", "peft", "torch"))
    given = ["data.source.target_field=score", "task.mean=2.5", "task.scale=1.5"]
    given = given if task == "regression" else [f"data.source.label_names=[{','.join(NAMES)}]"]
    run = trained(place, rows, f"adapted_{task}", f"task={task}", *given, "train=lora", "train.head=true", "train.rank=2")
    of_run(run, "Export", format="peft", to=str(tmp_path / "adapters"))
    own = predicted(run, rows, tmp_path / "own")
    count = 1 if task == "regression" else len(NAMES)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(place / "model", num_labels=count)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapters")
    with torch.no_grad():
        outputs = model(**tokenizer(texts_of(rows), padding=True, truncation=True, max_length=12, return_tensors="pt")).logits.numpy()
    scores = [[line["score"]] if task == "regression" else [line["scores"][name] for name in NAMES] for line in own]
    np.testing.assert_allclose(outputs if task == "regression" else 1 / (1 + np.exp(-outputs)), scores, atol=2e-5)
    # Usage as the card has it.
    assert f"num_labels={count}" in (tmp_path / "adapters" / "README.md").read_text()
