"""Every field of the config, and every option of its groups, as the one difference between a fork and its parent: refused, `none`, or
charged with all that the parent spent. Which fields may be charged alone is a list."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from dpx import config, packages
from dpx.declaration import ConfigError
from tests.planned import plan

from .conftest import Place

# What a step computes from its rows may be chosen after results were seen: composition holds for whatever is computed at the planned noise,
# rate and units. What only names a run, or says how it is computed or reported, is of no consequence.
_CHARGED = {
    "of the computation": ("clipping_method.", "mesh.", "microbatch", "length_buckets", "schedule.", "profile.", "logger.", "callbacks."),
    "of the name": ("name", "replicate", "tags", "notes", "data.name", "data.directory"),
    "of what is refused": ("data.allow_other_size",),
    "of what a step learns": ("optimizer.", "lr_schedule.", "task.", "model.", "clip.", "tune"),
}
# Groups that are not part of the experiment, or have a separate test.
_NOT_TRIED = ("base", "job", "analysis", "experiment", "debug", "hydra", "paper", "audit", "tune", "data", "init", "model", "task")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{path}.{name}".lstrip("."))
    elif not path.endswith("_target_"):
        yield path, node


def changed(value: Any) -> Any:
    """Another value of the same kind; if the field does not allow it, it is refused, which is right too."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 if value else 0.5
    return {"document": "row", "zero_out": "add_remove"}.get(
        str(value), 3 if value is None else ["other"] if isinstance(value, list) else f"{value}x"
    )


@functools.cache
def base(place: Place) -> dict[str, Any]:
    _, _, written = place.composed("noise.noise_multiplier=2.0")
    return {key: value for key, value in plain(written).items() if key not in ("job", "analysis", "fork", "run")}


def plain(written: str) -> dict[str, Any]:
    """A config's text as plain values."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(written)))


def outcome(place: Place, parent: Path, key: str, value: Any) -> str:
    cfg = OmegaConf.create(base(place) | {"job": {"_target_": "dpx.job.train.Train"}})
    OmegaConf.update(cfg, key, value, merge=False)
    return judged(cfg, parent)


def judged(cfg: Any, parent: Path) -> str:
    try:
        planned = plan(config.build(cfg)[0], f"{parent}@1")
    except ConfigError as refused:
        assert str(refused).count("\n") == 0
        return "refused"
    if planned["guarantee"] in ("none", "not_private"):
        return planned["guarantee"]
    (origin,) = planned["init"]["origins"]
    assert origin["is_fork"] and origin["relation"] == "unknown"
    assert sum(count for run in origin["segments"] for _, count in run["steps"]) == 2
    assert planned["epsilon"]["rdp"] > planned["epsilon_of_this_run"]["rdp"]
    return "charged"


def may_be_charged(key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for names in _CHARGED.values() for name in names)


def test_a_fork_that_differs_in_nothing_is_charged(place, parent):
    assert judged(OmegaConf.create(base(place) | {"job": {"_target_": "dpx.job.train.Train"}}), parent) == "charged"


# Whether a field may be charged that the list allows is of no consequence.
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_field_of_the_config(place, parent, is_whole):
    tried = [(key, value) for key, value in leaves(base(place)) if is_whole or not may_be_charged(key) or key.startswith("task.")]
    found = {key: outcome(place, parent, key, changed(value)) for key, value in tried}
    wrong = [key for key, came in found.items() if came == "charged" and not may_be_charged(key)]
    assert not wrong
    # The list names nothing that no field of it needs.
    for name in ("optimizer.", "task.") if is_whole else ("task.",):
        assert any(came == "charged" for key, came in found.items() if key.startswith(name))
    assert {"refused", "none", "charged"} <= set(found.values())


def test_every_option_of_a_group(place, parent):
    every = {path.parent.name for path in packages.conf_directory().glob("*/*.yaml")} - set(_NOT_TRIED)
    # Of a group whose every field may be charged, so may every option.
    groups = sorted(group for group in every if not may_be_charged(f"{group}."))
    assert {"sampler", "mechanism", "noise", "privacy", "accountant", "batch_schedule", "train", "telemetry"} <= set(groups)
    wrong = []
    for group in groups:
        for option in packages.names_in(group):
            try:
                _, _, written = place.composed(f"{group}={option}", "noise.noise_multiplier=2.0" if group != "noise" else "steps=2")
            except Exception:
                continue
            declared = plain(written)[group]
            if declared == base(place)[group]:
                continue
            if outcome(place, parent, group, declared) == "charged":
                wrong.append(f"{group}={option}")
    # A step of it is one Gaussian release of dp_sgd's cost, and composition holds for any choice of what is summed.
    assert wrong == ["mechanism=rgp"]
