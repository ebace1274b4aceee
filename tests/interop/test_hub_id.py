"""`init=hf` with a name on the hub: its files are fetched once by `huggingface_hub`, which is stubbed here, and are then a folder."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dpx import config
from dpx.config import recipes
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.interop.checkpoint import Checkpoint
from tests.planned import plan

from .conftest import composed

NAME = "owner/tiny"


@pytest.fixture
def asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the hub was asked for; it answers with the folder of the checkpoint."""
    found: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        found.append((name, allow_patterns))
        if name != NAME:
            raise FileNotFoundError(f"no repository\n{name}")
        return str(place / "model")

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(weights, "is_installed", lambda package: package == "huggingface_hub")
    return found


def test_a_name_gives_the_model_the_weights_and_the_tokenizer(asked: list[Any], place: Path):
    cfg = composed(place, f"init.path={NAME}", "init.provenance=public", "train=last_layer")
    experiment, _ = config.build(cfg)
    local, _ = config.build(composed(place, "init.provenance=public", "train=last_layer"))
    assert cfg.data.vocabulary.path == NAME and experiment.model == local.model
    of_name, of_folder = plan(experiment), plan(local)
    # By either it may be known that it was trained on this data.
    names = [planned["init"]["origins"][0]["checkpoint"].pop("names") for planned in (of_name, of_folder)]
    assert names == [[NAME], ["model"]] and of_name["init"]["origins"][0]["name"] == NAME
    # The statements differ in the name alone.
    assert json.loads(json.dumps(of_name).replace(NAME, "model")) == json.loads(json.dumps(of_folder))
    checkpoint = Checkpoint(NAME)
    assert checkpoint.folder == place / "model" and dataclasses.replace(checkpoint.model, classifier="linear_tanh") == local.model
    assert {name for name, _ in asked} == {NAME}
    patterns = asked[0][1]
    assert "*.safetensors" in patterns and not any(one.endswith((".bin", ".pt", ".h5")) for one in patterns), "no pickle is fetched"


def test_a_run_prepares_its_rows_with_the_tokenizer_of_the_name(asked: list[Any], place: Path):
    (named, _), (local, _) = (
        config.build(composed(place, *given, "init.provenance=public", "train=last_layer")) for given in ([f"init.path={NAME}"], [])
    )
    assert prepare(named.data, named.privacy).folder == prepare(local.data, local.privacy).folder
    assert asked


def test_a_name_that_cannot_be_fetched_is_one_line(asked: list[Any], place: Path, monkeypatch: pytest.MonkeyPatch):
    line = r"^init.path=owner/none: is not a folder, and dpx could not download it as a hub id \(FileNotFoundError\)\. "
    with pytest.raises(ConfigError, match=line) as refused:
        config.build(recipes.compose(["init=hf", "init.path=owner/none", "model=hf"]))
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(weights, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"^init.path=owner/none: no such folder\. Name a folder that holds config.json"):
        Checkpoint("owner/none")
    before = len(asked)
    for path in ("./owner/none", "/owner/none", "~/none", "a/b/c"):
        with pytest.raises(ConfigError, match="no such folder"):
            Checkpoint(path)
    assert len(asked) == before
