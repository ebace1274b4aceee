"""Configs of older run folders name declarations where they were then."""

from omegaconf import OmegaConf

from dpx import config
from dpx.config import aliases, recipes


def test_every_former_name_leads_to_a_declaration_of_the_same_kind():
    for former, present in aliases.MODULES.items():
        assert former != present
        cfg = recipes.compose([f"analysis={former.rpartition('.')[2]}", "job=analyse"])
        now = cfg.analysis._target_
        assert now.rpartition(".")[0] == present
        OmegaConf.update(cfg, "analysis._target_", f"{former}.{now.rpartition('.')[2]}")
        assert type(config.make(config.resolved(cfg)["analysis"], "analysis")).__module__ == present
