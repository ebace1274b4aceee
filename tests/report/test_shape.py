"""Statistics over replicates: known values, and order that is and is not there."""

import math

import pytest

from dpx.pages import pictures
from dpx.pages.read_runs import Run
from dpx_papers.report import shape
from dpx_papers.report.evidence import cell
from dpx_papers.report.shape import Part, Verdict


def test_ties_count_a_half() -> None:
    found = shape.trend({1: [1, 2], 2: [2, 3]})
    assert (found.ascending, found.pairs) == (3.5, 4)


def test_trend_of_three_against_three_in_perfect_order() -> None:
    found = shape.trend({1: [1, 2, 3], 2: [4, 5, 6]})
    # J = 9, mean 4.5, variance (36 * 15 - 2 * 9 * 9) / 72 = 5.25; the exact p is 1/20.
    assert (found.ascending, found.pairs) == (9, 9)
    assert found.p == pytest.approx(0.5 * math.erfc(4.5 / math.sqrt(5.25) / math.sqrt(2)))
    assert found.holds and 0.02 < found.p < 0.05


def test_trend_is_refused_by_noise_and_by_reversed_neighbours() -> None:
    assert not shape.trend({1: [1, 5, 3], 2: [2, 4, 6]}).holds
    # Rising over all, but 3 and 4 stand wholly the other way round.
    found = shape.trend({1: [1, 2], 2: [3, 4], 3: [9, 10], 4: [7, 8]})
    assert found.p < 0.05 and found.reversed == ((3, 4),) and not found.holds
    assert "wholly above" in found.words()


def test_descending_is_the_other_direction() -> None:
    groups = {1: [6.0, 5.0, 4.0], 2: [3.0, 2.0, 1.0]}
    assert shape.trend(groups, falls=True).holds and not shape.trend(groups).holds


def test_slope_is_of_logarithms_unless_linear() -> None:
    points = [(1, 3.0), (2, 12.0), (4, 48.0)]
    assert shape.slope(points) == pytest.approx(2) and shape.slope([(0, 1.0), (2, 5.0)], linear=True) == pytest.approx(2)


def test_an_accuracy_has_the_interval_of_its_rows_and_a_baseline_has_none() -> None:
    assert shape.of_rows([0.0957], "heldout/mlm_accuracy", 1000.0) == "9.57 % [7.9 % to 11.6 %; 1,000 rows]"
    assert shape.of_rows([0.5, 0.6], "heldout/accuracy", 100.0) == "55 ± 7.1 % (n = 2) [45.2 % to 64.4 %; 100 rows]"
    assert shape.of_rows([0.5], "heldout/accuracy", None) == "50 % [rows not noted]"
    assert shape.of_rows([0.5], "baseline/most_frequent_class", 100.0) == "50 %" and shape.of_rows([2.5], "heldout/loss", 9.0) == "2.5"


def test_trend_needs_two_groups() -> None:
    with pytest.raises(ValueError, match="two groups"):
        shape.trend({1: [1, 2]})


def test_the_most_that_two_means_differ_by_shrinks_with_replicates_and_grows_with_their_scatter() -> None:
    near, far = [1.0, 1.02, 1.01], [1.05, 1.04, 1.06]
    # t of 4 degrees of freedom at 0.95 is 2.132; both standard deviations are 0.01.
    assert shape.most_apart(near, far) == pytest.approx(0.04 + 2.132 * math.sqrt(2 * 0.01**2 / 3), rel=1e-3)
    assert shape.most_apart(near * 2, far * 2) < shape.most_apart(near, far) < shape.most_apart([0.9, 1.1, 1.03], far)
    assert shape.most_apart([1.0], far) == math.inf and shape.most_apart([1.0, 1.0], [2.0, 2.0]) == 1.0


def test_a_slope_has_an_interval_from_three_points_on() -> None:
    line = [(2.0**n, 2.0 ** (0.5 * n)) for n in range(4)]
    assert shape.slope_interval(line) == pytest.approx((0.5, 0.5)) and shape.slope_interval(line[:2]) == (-math.inf, math.inf)
    low, high = shape.slope_interval([(x, y * (1.3 if place % 2 else 1.0)) for place, (x, y) in enumerate(line)])
    assert low < 0.5 < high and high - low > 0.3


def test_a_part_of_a_curve_is_a_fraction_of_the_steps() -> None:
    run = Run("x", "1", "-", 0, {}, {}, {}, {"loss": ((10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0))})
    assert cell(run, "loss@0.5:1") == 3.5 and cell(run, "loss@0:0.25") == 1.0


def test_mean_curve_keeps_common_steps() -> None:
    assert pictures.mean_curve([[(1, 1.0), (2, 2.0)], [(2, 4.0), (3, 9.0)]]) == [(2, 3.0)]


@pytest.mark.parametrize(
    ("states", "state"), [("pp", "pass"), ("pf", "fail"), ("pn", "not run"), ("fn", "fail"), ("n", "not run"), ("", "not run")]
)
def test_a_verdict_is_its_worst_part(states: str, state: str) -> None:
    names = {"p": shape.PASS, "f": shape.FAIL, "n": shape.NOT_RUN}
    assert Verdict(tuple(Part("", "", names[s]) for s in states)).state == state
