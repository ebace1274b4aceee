"""Verdicts of what needs no training: they hold on the evidence, and each fails on numbers of another shape."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from dpx.pages.analysis_tables import Table
from dpx_papers.mckenna2025 import calibration_profiles, diminishing_batch, fig4_vector_fields, flops_model, table1_models
from dpx_papers.report import analyses
from tests.report import made

HOME = Path(__file__).parents[2] / "experiments" / "mckenna2025"
AXES: dict[str, Sequence[float]] = {name: [2**k for k in range(5)] for name in ("size", "batch_size", "epsilon")}
PLACE = {"size": 2.0**20, "batch_size": 4.0, "epsilon": 4.0}


def stored(name: str) -> dict[str, Table]:
    return analyses.read(HOME)[name]


def rows(name: str, table: str) -> list[dict]:
    return stored(name)[table].as_json()["rows"]


def planes(ratio) -> dict:
    axes = AXES | {"size": [2**k for k in range(10, 15)]}
    return {names: fig4_vector_fields.plane(ratio, axes, PLACE, *names) for names in fig4_vector_fields.PLANES}


def states(parts) -> list[str]:
    return [part.state for part in parts]


def test_arrows_are_judged_on_the_evidence():
    parts = fig4_vector_fields.judged({names: rows("mckenna_fig4_vector_fields", "_".join(names)) for names in fig4_vector_fields.PLANES})
    assert states(parts) == ["pass"] * 3
    assert "Reported, not judged" in parts[1].statistic and "Reported, not judged" in parts[2].statistic


@pytest.mark.parametrize(
    ("ratio", "place"),
    [
        # A doubling takes off more than a half.
        (lambda size, batch_size, epsilon: (size * batch_size * epsilon) ** -2.0, 0),
        # The further a value was doubled, the more the next doubling takes off.
        (lambda size, batch_size, epsilon: 1 / (1 + 1e-5 * size * batch_size**0.1) / (1 + 1e-3 * batch_size) / epsilon**0.1, 1),
        # Both values spend one and the same store.
        (lambda size, batch_size, epsilon: 1 + 2.0**24 / (size * batch_size * epsilon), 2),
    ],
    ids=["too long", "rising", "one store"],
)
def test_arrows_of_another_shape_fail(ratio, place):
    assert states(fig4_vector_fields.judged(planes(ratio)))[place] == "fail"


@pytest.mark.parametrize(("slope", "state"), [(1.04, "pass"), (0.81, "pass"), (0.5, "fail"), (1.3, "fail")])
def test_a_proportion_has_the_slope_of_one(slope, state):
    assert diminishing_batch.judged(slope).state == state


def test_the_turning_point_of_the_evidence_is_proportional():
    assert diminishing_batch.judged(rows("mckenna_diminishing_batch", "slope")[0]["slope"]).state == "pass"


def test_one_reading_gives_table_4_and_none_gives_table_1():
    found = pd.DataFrame(rows("mckenna_table1_models", "models"))
    first, fourth = (table1_models.judged(found, name, name) for name in ("table_1", "table_4"))
    assert states([fourth, first]) == ["pass", "fail"] and "mega" in first.statistic
    swapped = found.rename(columns={"table_1": "table_4", "table_4": "table_1"})
    assert states([table1_models.judged(swapped, name, name) for name in ("table_4", "table_1")]) == ["fail", "pass"]


def test_the_share_of_clipping_and_noise_falls_with_length_or_does_not():
    found = rows("mckenna_flops_model", "clipping_and_noise")
    part = flops_model.judged(found)
    assert part.state == "pass" and "with Grams 0 of 21 fall" in part.statistic
    lengths = sorted({row["S"] for row in found})
    turned = [row | {"S": lengths[-1 - lengths.index(row["S"])]} for row in found]
    assert flops_model.judged(turned).state == "fail"


def test_shares_are_measured_from_every_benchmark_that_is_committed():
    found = flops_model.measured_shares(HOME.parent / "benchmarks", batch_size=1024)
    assert found and {row["model"] for row in found} <= {row["model"] for row in rows("mckenna_flops_model", "flops_of_an_example")}
    assert all(0 < row["update_share"] < 1 for row in found)


def test_profiles_cross_at_the_claim_alone_or_elsewhere():
    found = pd.DataFrame(rows("mckenna_calibration_profiles", "profiles"))
    assert calibration_profiles.judged(found, 8.0).state == "pass"
    assert calibration_profiles.judged(found, 2.0).state == "fail"
    flat = found[["epsilon"]].assign(delta_at_batch_1=1e-3, delta_at_batch_2=1e-3)
    assert calibration_profiles.judged(flat, 8.0).state == "fail"


@pytest.mark.parametrize(
    ("speeds", "state"), [({"mini": 20.0, "tiny": 90.0}, "arithmetic"), ({"tiny": 20.0, "mini": 90.0}, "fail"), ({"tiny": 9.0}, "not run")]
)
def test_a_larger_model_takes_fewer_examples_a_second(speeds, state):
    rows = [{"clipping": "book_keeping", "model": model, "examples_per_s": speed} for model, speed in speeds.items()]
    assert made.verdict("mckenna2025", "M16", benchmark=rows).state == state


def test_each_that_is_computed_writes_its_verdicts():
    for name in ("fig4_vector_fields", "diminishing_batch", "table1_models", "flops_model", "calibration_profiles"):
        document = json.loads((HOME / "analyses" / f"mckenna_{name}.json").read_text())
        assert [table["name"] for table in document["tables"]].count("verdicts") == 1, f"mckenna_{name} has not run since it judges itself"
