"""The models of conf/model, as their declarations."""

from pathlib import Path

import yaml

from dpx.models import shape

CONF = Path(__file__).parents[2] / "conf" / "model"


def declared(name: str) -> shape.Model:
    fields = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    module, _, kind = fields.pop("_target_").rpartition(".")
    assert module == "dpx.models.shape"
    return getattr(shape, kind)(**fields)
