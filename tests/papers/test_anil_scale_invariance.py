"""The claim of section 4.3 on a tiny random model, in float64 and in float32."""

import pytest

from dpx import config
from dpx.config import recipes
from dpx.models.shape import Bert
from dpx_papers.anil2021.scale_invariance import CASES, anil_scale_invariance
from tests.report.made import rows_by_table

# Every case is traced and compiled in two precisions at three scales.
pytestmark = pytest.mark.slow
# float64 leaves the LayerNorm's own 1e-12 (beside variances of 1e-7 and more); float32 its rounding.
TOLERANCE = {"float64": 1e-5, "float32": 1e-4}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    model = config.build(recipes.compose(["+experiment=anil_scale_invariance", "model=micro", "model.layers=1"]))[0].model
    assert isinstance(model, Bert)
    analysis = anil_scale_invariance(model=model, alphas=[0.5, 1.0, 3.0], examples=2, tokens=8, vocabulary_size=32)
    return rows_by_table(analysis)["scale_invariance"]


def test_every_case_is_measured_in_both_precisions(rows: list[dict]) -> None:
    assert len(rows) == 2 * 3 * len(CASES)
    assert {(row["scaled by alpha"], row["numbers"]) for row in rows} == {(case[0], n) for case in CASES for n in TOLERANCE}


@pytest.mark.parametrize("case", [case[0] for case in CASES if case[3]])
def test_where_it_holds_output_stays_and_gradient_falls_as_one_over_alpha(rows: list[dict], case: str) -> None:
    for row in (row for row in rows if row["scaled by alpha"] == case):
        tolerance = TOLERANCE[row["numbers"]]
        assert row["relative change of the output"] < tolerance
        assert row["largest error of alpha * gradient"] < tolerance
        assert row["alpha * gradient norm / unscaled"] == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("case", [case[0] for case in CASES if not case[3]])
def test_where_it_does_not_hold_the_output_changes(rows: list[dict], case: str) -> None:
    for row in (row for row in rows if row["scaled by alpha"] == case and row["alpha"] != 1):
        assert row["relative change of the output"] > 1e-4
        assert row["largest error of alpha * gradient"] > 0.1


def test_alpha_of_one_changes_nothing(rows: list[dict]) -> None:
    assert all(row["relative change of the output"] == 0 for row in rows if row["alpha"] == 1)
