"""`+experiment=vaultgemma_1b`: sizes that give the released file's parameters, and an epsilon that is not a bound."""

import dataclasses

import pytest

from dpx.config import build, recipes
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.job.plan import Plan
from dpx.models.families import Gemma
from dpx.models.model_protocol import count

RELEASED = 1_038_741_120  # metadata of google/vaultgemma-1b
NAME = "vaultgemma_1b"


def _planned(*overrides: str) -> dict:
    experiment, job = build(recipes.compose([f"+experiment={NAME}", *overrides]))
    assert isinstance(job, Plan), "a plan only"
    return to_json(job.document(experiment))


@pytest.fixture(scope="module")
def planned() -> dict:
    return _planned()


# Slow: sizes of declared models are counted in tests/models.
@pytest.mark.slow
def test_the_quoted_sizes_are_a_billion_and_with_four_key_value_heads_the_released_file(planned):
    experiment, _ = build(recipes.plan_config(NAME, []))
    model = experiment.model
    assert isinstance(model, Gemma)
    of_four = dataclasses.replace(model, key_value_heads=4)
    assert count(of_four.parameter_shapes(256_000)) == RELEASED
    assert planned["parameters"] == count(model.parameter_shapes(256_000)) == RELEASED - 26 * 2 * 3 * 256 * 1152 == 992_734_848
    assert 2 * model.feed_forward == 13_824
    assert not [path for path in model.parameter_shapes(256_000) if "bias" in path]
    # Were 13,824 the width of each of the two maps, it would be a model of 1.6 billion.
    assert count(dataclasses.replace(model, feed_forward=13_824).parameter_shapes(256_000)) > 1.6e9


def test_what_is_assumed_is_no_bound(planned):
    assert (planned["guarantee"], planned["epsilon"], planned["epsilon_of_this_run"]) == ("none", {}, {})
    (one,) = planned["unsupported"]
    assert one["name"] == "epsilon/pld" and 1.7 < one["value"] < 1.8
    assert all(key in one["reason"] for key in ("data.declared_size", "sampler.slack", "privacy.unit", "privacy.assumed"))
    assert planned["noise_multiplier"] == 0.614 and planned["examples"] == 100_000 * 518_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        (["batch_schedule.size=506"], 0, 0.003),
        (["data.declared_size=9090909091"], 2.0, 2.12),
        (["data.declared_size=9800000000", "sampler=poisson", "privacy.assumed=[data.declared_size]"], 1.99, 2.01),
    ],
)
def test_other_readings(overrides, low, high):
    assert low < _planned(*overrides)["unsupported"][0]["value"] < high


def test_a_key_that_is_not_there_cannot_be_assumed():
    with pytest.raises(ConfigError, match=r"privacy.assumed=data.size: no such key"):
        build(recipes.compose(["+privacy.assumed=[data.size]"]))
