"""The autotuner: fits the memory, caches by device, and a run keeps its own answer."""

import json

import jax
import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.training import microbatch
from tests.clipping.batches import bert, objective

SUBJECT = objective(bert(layers=1))


@pytest.fixture
def workload():
    experiment = config.build(recipes.compose(["model=micro", "data.sequence_length=16"]))[0]
    return microbatch.Workload.of(experiment.one_step, SUBJECT, experiment.data.sequence_length, experiment.mesh)


@pytest.fixture
def instant(monkeypatch):
    """Probes that cost nothing: 4 examples per call are fastest."""
    monkeypatch.setattr(microbatch, "_rates", lambda *_: {2: 10.0, 4: 30.0, 8: 20.0})


def test_the_fastest_is_chosen_and_cached(workload, instant, tmp_path, monkeypatch):
    assert microbatch.choose(workload, cache=tmp_path) == 4
    monkeypatch.setattr(microbatch, "_rates", lambda *_: pytest.fail("probed again"))
    assert microbatch.choose(workload, cache=tmp_path) == 4


def test_a_run_keeps_its_answer_whatever_the_cache_says(workload, instant, tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    private = tmp_path / "run" / "private"
    assert microbatch.resolve_microbatch("auto", workload, private) == 4
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text(json.dumps({"microbatch": 8}))
    assert microbatch.resolve_microbatch("auto", workload, private) == 4
    assert microbatch.resolve_microbatch("auto", workload, tmp_path / "other") == 8
    for damaged in ("", "{}", "[]", '{"microbatch": 0}', '{"microbatch": "a"}'):
        (private / "microbatch.json").write_text(damaged)
        assert microbatch.resolve_microbatch("auto", workload, private) == 8


def test_nothing_fits(workload, monkeypatch, tmp_path):
    monkeypatch.setattr(microbatch, "_rates", lambda *_: {})
    with pytest.raises(
        ConfigError, match="^microbatch=auto: the smallest microbatch, 2 examples, does not fit in the device's 8,000,000,000 "
    ):
        microbatch.choose(workload, cache=tmp_path)


class Device:
    """A device that reports its memory as an accelerator does."""

    device_kind = "made up"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(("stats", "limit"), [({"bytes_limit": 3_000}, 3_000), ({}, 8_000_000_000), (None, 8_000_000_000)])
def test_the_device_is_asked_for_its_memory_before_the_config(workload, monkeypatch, tmp_path, stats, limit):
    asked = []
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    monkeypatch.setattr(microbatch, "_rates", lambda workload, sizes, limit: asked.append(limit) or {2: 1.0})
    assert microbatch.choose(workload, cache=tmp_path) == 2
    assert asked == [limit]


def test_an_answer_for_less_memory_is_not_taken(workload, instant, monkeypatch, tmp_path):
    microbatch.choose(workload, cache=tmp_path)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device({"bytes_limit": 3_000})])
    monkeypatch.setattr(microbatch, "_rates", lambda *_: {2: 1.0})
    assert microbatch.choose(workload, cache=tmp_path) == 2


def test_only_what_fits_the_limit_is_timed(workload):
    assert microbatch._rates(workload, (2,), 1) == {}


@pytest.mark.slow
def test_real_probes_find_a_size(workload, tmp_path):
    assert microbatch.choose(workload, candidates=(2,), cache=tmp_path) == 2
