"""Curves in characters: corners, logarithms, and points that cannot be drawn."""

import math

from dpx.job.account import text_plot


def test_the_ends_of_a_curve_are_in_the_corners() -> None:
    title, *body, foot, below = text_plot({"f": [(0, 0), (1, 5), (2, 10)]}, "x", "y", width=21, height=5).splitlines()
    assert title == "y" and len(body) == 5
    assert body[0] == "10 │" + " " * 20 + "●" and body[2] == "   │" + " " * 10 + "●" + " " * 10 and body[4] == " 0 │●" + " " * 20
    assert foot == "   └" + "─" * 21 and below.strip().startswith("0") and below.endswith("2")


def test_a_power_is_straight_on_two_logarithms() -> None:
    _, *body, _, _ = text_plot({"f": [(1, 1), (10, 100), (100, 10_000)]}, "x", "y", 21, 5, log_x=True, log_y=True).splitlines()
    assert [line.index("●") for line in body if "●" in line] == [27, 17, 7]


def test_two_curves_are_told_apart_and_the_first_lies_on_top() -> None:
    plot = text_plot({"one": [(0, 0), (1, 1)], "two": [(0, 0), (1, 0.5)]}, "x", "y", 10, 3)
    assert "● one   ○ two" in plot and plot.count("●") == 3 and plot.count("○") == 2


def test_values_without_a_place_are_left_out() -> None:
    assert text_plot({"f": [(1, None), (2, math.inf), (0, 1)]}, "x", "y", log_x=True) == ""
    assert "●" in text_plot({"f": [(1, 1.0)]}, "x", "y")
