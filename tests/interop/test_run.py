"""A run from a checkpoint on labelled rows: its initial weights, what it states, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.console import Console
from dpx.data.prepare import prepare
from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import released
from dpx.files.weights import by_path
from dpx.init.parent import is_adapted_alike
from dpx.init.start import planned_start
from dpx.job.plan import show
from dpx.job.run_plan import plan_of_run
from dpx.models.trained import Adapters
from tests.planned import plan

from .conftest import WORDS, composed, train


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    return train(
        place, "head", "train=last_layer", "model.classifier=pooler", "init.provenance=public", f"data.source.test_paths={place}/test.csv"
    )


def test_frozen_parameters_are_the_checkpoint_and_the_statement_says_what_was_loaded(place: Path, trained: Path):
    stated = json.loads((trained / "release" / "privacy.json").read_text())
    assert stated["guarantee"] == "dp" and any("public" in line for line in stated["assumptions"])
    (origin,) = stated["init"]["origins"]
    assert origin["checkpoint"]["made_new"] == ["classifier/bias", "classifier/kernel"] and not origin["checkpoint"]["left_out"]
    assert "layers/qkv/kernel" in origin["checkpoint"]["loaded"]
    leaves = by_path(released(trained / "release" / "params"))
    from dpx.interop.checkpoint import Checkpoint

    checkpoint = Checkpoint(str(place / "model"))
    held = checkpoint.leaves(checkpoint.select({path: leaf.shape for path, leaf in leaves.items()}))
    for path, values in held.items():
        is_head = path.startswith("pooler")
        assert (values.tobytes() == np.asarray(leaves[path]).tobytes()) is not is_head, path


def test_the_test_set_is_read_at_the_end_and_apart_from_the_dev_rows(trained: Path):
    results = json.loads((trained / "private" / "results.json").read_text())
    assert results["test"].keys() == results["heldout"].keys() == {"loss", "accuracy", "macro_f1", "micro_f1", "matthews"}
    assert results["test"]["accuracy"] * 10 == pytest.approx(round(results["test"]["accuracy"] * 10))
    assert not any("test" in name for line in (trained / "private" / "metrics.jsonl").read_text().splitlines() for name in json.loads(line))
    stated = (trained / "release" / "privacy.json").read_text()
    assert "data.source.select=dev" in stated and "accuracy" not in stated


def test_its_config_says_the_shape_without_the_file(trained: Path):
    cfg: Any = OmegaConf.load(trained / "private" / "config.yaml")
    model = cfg["model"]
    assert model["_target_"] == "dpx.models.shape.Bert" and model["layers"] == 2


def test_unknown_provenance_leaves_no_guarantee_and_a_plan_reads_no_weights(place: Path):
    document = plan(config.build(composed(place))[0])
    assert any("unknown provenance" in reason for reason in document["reasons"])


def test_a_plan_from_a_checkpoint_is_in_whole_sentences(place: Path, capsys: pytest.CaptureFixture[str]):
    show(plan_of_run(config.build(composed(place, "init.provenance=public"))[0]), Console(width=400))
    text = capsys.readouterr().out
    assert "not read yet" not in text and "its checksum is noted when the run starts" in text
    assert "the user vouches (init.provenance=public) that no protected data was used to make" in text
    # Without a parent that is charged, only the epsilon of the run's steps is printed, and only once.
    assert "epsilon of this run's steps" not in text and "starts from" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=micro"], r"has embeddings.LayerNorm.bias of shape \(16,\), not \(32,\), for embeddings/norm/bias. Use model=hf"),
        (["model=micro", "model.heads=4"], "model.heads=4: .* contains a model with 2. Use model=hf"),
        (["data.vocabulary.path={place}/other.txt"], "was trained with another vocabulary than the vocabulary of this run's data"),
        (
            ["train=lora"],
            "train=lora: classifier/bias, classifier/kernel would be initialised at random and never trained.* Add train.head=true",
        ),
        (["train=bias"], "train=bias: classifier/kernel would be initialised at random"),
        (["train=lora", "train.head=true", "train.rank=17"], "rank=17: is not possible for a matrix of shape"),
        (["train=matching", "train.paths=[layers/query/*,classifier/*]"], "layers/query.*: matches no parameter. The nearest are layers/"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(place: Path, overrides: list[str], words: str):
    (place / "other.txt").write_text("\n".join([*SPECIAL_TOKENS, *reversed(WORDS)]) + "\n")
    with pytest.raises(ConfigError, match=words):
        train(place, "refused", *(one.replace("{place}", str(place)) for one in overrides))


@pytest.mark.parametrize(("change", "words"), [("pool=mean", "model.pool=mean"), ("classifier=linear", "model.classifier=linear")])
def test_a_runs_head_is_read_as_it_was_trained(trained: Path, change: str, words: str):
    of_run = OmegaConf.create({"init": {"_target_": "dpx.config.declared_init.FromRun", "run": str(trained)}})
    cfg: Any = OmegaConf.load(trained / "private" / "config.yaml")
    cfg["init"] = of_run["init"]
    experiment, _ = config.build(OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"model.{change}"])))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        planned_start(experiment.init, experiment.receiver)


def test_adapters_with_another_dropout_are_others():
    one = Adapters(rank=2, alpha=4.0, dropout=0.1)
    assert is_adapted_alike(one, Adapters(rank=2, alpha=4.0, dropout=0.1, head=True, targets=("value", "query")))
    for other in (Adapters(rank=2, alpha=4.0), Adapters(rank=2, alpha=4.0, dropout=0.2), Adapters(rank=1, alpha=4.0, dropout=0.1)):
        assert not is_adapted_alike(one, other)


def test_text_is_cut_in_the_case_that_the_checkpoint_was_trained_on(place: Path, tmp_path: Path):
    cased = shutil.copytree(place / "model", tmp_path / "model")
    (cased / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    given = (f"init.path={cased}", f"data.vocabulary.path={cased}/vocab.txt", f"data.directory={tmp_path}/data", "train=last_layer")
    experiment, _ = config.build(composed(place, *given))
    store = prepare(experiment.data, experiment.privacy)
    with pytest.raises(ConfigError, match="treats case, accents or Chinese characters .* Add data.vocabulary.path="):
        planned_start(experiment.init, experiment.receiver, store)
