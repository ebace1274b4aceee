"""Configs of older run folders name declarations where they were then."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import aliases, recipes
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.launch.finished import has_finished
from dpx.report.collect import knobs_of
from dpx.task.declarations import MaskedLanguageModel
from dpx.training.fingerprint import claim_of

from .training.conftest import declare


def test_every_former_name_leads_to_a_declaration_of_the_same_kind():
    for former, present in aliases.MODULES.items():
        assert former != present
        cfg = recipes.compose([f"analysis={former.rpartition('.')[2]}", "job=analyse"])
        now = cfg.analysis._target_
        assert now.rpartition(".")[0] == present
        OmegaConf.update(cfg, "analysis._target_", f"{former}.{now.rpartition('.')[2]}")
        assert type(config.make(config.resolved(cfg)["analysis"], "analysis")).__module__ == present


def as_saved_before(plain: dict[str, Any]) -> dict[str, Any]:
    """A resolved config as a folder of a former version holds it."""
    task = {"masked_slots" if key == "max_masked_positions" else key: value for key, value in plain["task"].items()}
    return plain | {"task": task}


def test_a_config_with_a_former_key_is_the_same_run_and_the_same_claim(tmp_path):
    now = config.resolved(recipes.compose(["name=aliases", "task.max_masked_positions=7"]))
    before = as_saved_before(now)
    assert before != now and config.identity(before) == config.identity(now)
    assert config.run_name(OmegaConf.create(before)) == config.run_name(OmegaConf.create(now))
    assert knobs_of(before) == knobs_of(now)
    assert config.build(OmegaConf.create(before))[0] == config.build(OmegaConf.create(now))[0]
    for name in ("release/params", "release/privacy.json", "private/results.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "private" / "status.json").write_text('{"train": {"state": "finished"}}')
    (tmp_path / "release" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(before)))
    assert has_finished(tmp_path, now)


def test_the_claim_calls_a_key_by_its_first_name():
    """Its checksum stands in ledgers; under another name a run could not go on, and what starts from it would lose its guarantee."""
    task, declared = claim_of(declare())["task"], declare().task
    assert isinstance(declared, MaskedLanguageModel)
    assert task["masked_slots"] == declared.max_masked_positions and {"max_masked_positions", "_target_"}.isdisjoint(task)


@pytest.mark.parametrize("overrides", [["task.masked_slots=7"], ["+task.masked_slots=7"]])
def test_a_former_key_is_refused_where_a_user_writes_it(overrides):
    with pytest.raises(Exception) as raised:
        config.build(recipes.compose(["name=aliases", *overrides]))
    refused = as_refused(raised.value)
    assert isinstance(refused, ConfigError) and refused.value == "task.masked_slots"
    assert "task.max_masked_positions" in refused.fix
