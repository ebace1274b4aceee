"""The headline's plan against the published and the computed values; memory by hand on a small case."""

import json
from pathlib import Path

import pytest

from dpx import config, recipes
from dpx.declaration import Refused
from dpx.job.plan import Plan, largest_microbatch, plan
from dpx.models.memory import activations, step_memory
from dpx.models.shape import Bert
from dpx.run_folder import RunFolder

FIELDS = {
    "parameters",
    "examples",
    "epochs",
    "flops",
    "device_hours",
    "memory_bytes_per_device",
    "noise_multiplier",
    "noise_batch_ratio",
    "delta",
    "epsilon",
    "guarantee",
    "not_covered",
    "steps",
    "devices",
    "assumptions",
}


def _plan(*overrides: str) -> dict:
    return plan(config.build(recipes.compose(list(overrides)))[0])


@pytest.fixture(scope="module")
def headline() -> dict:
    return _plan("+experiment=anil_2m_batch")


def test_headline_matches_the_paper(headline: dict) -> None:
    assert headline["parameters"] == 336_226_108
    assert headline["examples"] == 2_097_152 * 20_000
    assert headline["noise_multiplier"] == pytest.approx(1.2151, rel=2e-3)
    assert headline["epsilon"]["rdp"] == pytest.approx(5.36, rel=1e-3)
    assert headline["epsilon"]["pld"] == pytest.approx(5.10, rel=1e-2)
    assert headline["flops"] == pytest.approx(1.08e22, rel=2e-2)
    assert headline["device_hours"] == pytest.approx(7616, rel=1e-2)
    assert headline["guarantee"] == "dp" and headline["fits"]


def test_plan_has_every_public_field(headline: dict) -> None:
    assert headline.keys() >= FIELDS
    json.dumps(headline, allow_nan=False)


def test_other_vocabulary_has_its_exact_count() -> None:
    assert _plan("+experiment=anil_2m_batch", "data.vocabulary.size=32000")["parameters"] == 337_741_058


def test_non_private_baseline_claims_nothing() -> None:
    found = _plan("+experiment=anil_nonprivate_baseline")
    assert found["flops"] == pytest.approx(1.19e20, rel=1e-2)
    assert (found["guarantee"], found["epsilon"], found["noise_multiplier"], found["delta"]) == ("not_private", {}, None, None)


def test_a_fixed_seed_leaves_no_guarantee() -> None:
    found = _plan("+experiment=anil_2m_batch", "seed=1")
    assert found["guarantee"] == "none" and "fixed_seed" in found["reasons"][0]


def test_a_download_is_not_started_by_a_plan() -> None:
    with pytest.raises(Refused, match="data.declared_size"):
        _plan("data=hub", "data.declared_size=null")


def test_delta_at_or_above_one_over_n_is_refused() -> None:
    with pytest.raises(Refused, match="not below 1/N"):
        _plan("data=hub", "privacy.delta=1e-8")


def test_job_writes_the_plan_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment, _ = config.build(recipes.compose(["+experiment=anil_2m_batch"]))
    Plan()(experiment, RunFolder(tmp_path))
    assert json.loads((tmp_path / "release" / "plan.json").read_text())["parameters"] == 336_226_108
    assert "336,226,108" in capsys.readouterr().out


BERT = Bert(name="two", layers=2, width=4, heads=1, feed_forward=8)


def test_activations_by_hand() -> None:
    # per layer 3*(40 + 24) + 2*9 = 210; embeddings 3*3*4 = 36; one slot 2*10 + 8 = 28
    assert activations(BERT, 10, 3, 1) == 2 * 210 + 36 + 28


def test_memory_by_hand() -> None:
    found = step_memory(BERT, parameters=1000, vocabulary_size=10, sequence_length=3, masked_slots=1, microbatch=2, fsdp=1, method="vmap")
    assert (found.at_rest, found.gathered, found.accumulator, found.update) == (12_000, 0, 4_000, 12_000)
    assert found.microbatch == 4_000 + 2 * (4_000 + 4 * 484)
    assert found.peak == 12_000 + 4_000 + found.microbatch


def test_sharding_divides_what_is_at_rest_and_adds_the_gathered_copy() -> None:
    found = step_memory(BERT, parameters=1000, vocabulary_size=10, sequence_length=3, masked_slots=1, microbatch=2, fsdp=4, method="ghost")
    assert (found.at_rest, found.gathered, found.update) == (3_000, 4_000, 3_000)
    assert found.microbatch == 4_000 + 2 * 4 * 484


def test_book_keeping_keeps_two_cotangents_of_a_layer_more() -> None:
    shape = {"parameters": 1000, "vocabulary_size": 10, "sequence_length": 3, "masked_slots": 1, "microbatch": 2, "fsdp": 1}
    more = step_memory(BERT, method="book_keeping", **shape).microbatch - step_memory(BERT, method="ghost", **shape).microbatch
    assert more == 2 * 4 * (2 * 3 * (4 + 8))


def test_memory_does_not_grow_with_the_logical_batch(headline: dict) -> None:
    small = _plan("+experiment=anil_2m_batch", "batch_schedule.size=65536")
    assert small["memory_bytes_per_device"] == headline["memory_bytes_per_device"]


def test_largest_microbatch_is_the_last_that_fits() -> None:
    experiment, _ = config.build(recipes.compose(["+experiment=anil_2m_batch", "microbatch=auto"]))
    chosen = largest_microbatch(experiment, 336_226_108, 30_522)
    assert chosen & (chosen - 1) == 0
    assert plan(experiment)["microbatch"] == chosen
    assert plan(experiment)["memory_bytes_per_device"] <= 0.8 * experiment.mesh.memory_bytes
