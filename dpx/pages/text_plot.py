"""Draws curves in a terminal: a few rows of characters, with the range of both axes."""

import math
from collections.abc import Sequence

Points = Sequence[tuple[float | int, float | int | None]]
MARKS = "●○+"


def text_plot(
    curves: dict[str, Points], x_label: str, y_label: str, width: int = 60, height: int = 10, log_x: bool = False, log_y: bool = False
) -> str:
    """Returns a plot with one character per point and curve, the first curve on top.

    Points without a finite value are left out; the result is "" if no point remains.
    """
    known = {name: [point for point in points if _drawable(point, log_x, log_y)] for name, points in curves.items()}
    everything = [point for points in known.values() for point in points]
    if not everything:
        return ""
    xs, ys = _range([x for x, _ in everything], log_x), _range([y for _, y in everything if y is not None], log_y)
    canvas = [[" "] * width for _ in range(height)]
    for mark, points in reversed(list(zip(MARKS, known.values(), strict=False))):
        for x, y in points:
            canvas[height - 1 - _place(y, ys, log_y, height)][_place(x, xs, log_x, width)] = mark
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, known, strict=False))
    left = [f"{value:.3g}" for value in (ys[1], ys[0])]
    edge = max(map(len, left))
    body = [
        f"{(left[0] if number == 0 else left[1] if number == height - 1 else ''):>{edge}} │{''.join(line)}"
        for number, line in enumerate(canvas)
    ]
    foot = f"{'':>{edge}} └{'─' * width}"
    ends = [f"{value:.3g}" for value in xs]
    below = f"{'':>{edge}}  {ends[0]}{x_label:^{max(0, width - len(ends[0]) - len(ends[1]))}}{ends[1]}"
    return "\n".join([f"{y_label}   {legend}" if len(known) > 1 else y_label, *body, foot, below])


def _drawable(point: tuple[float | int, float | int | None], log_x: bool, log_y: bool) -> bool:
    x, y = point
    return y is not None and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)


def _range(values: Sequence[float | int], log: bool) -> tuple[float, float]:
    low, high = float(min(values)), float(max(values))
    if low == high:
        return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return low, high


def _place(value: float | int | None, ends: tuple[float, float], log: bool, cells: int) -> int:
    assert value is not None
    low, high = (math.log(end) for end in ends) if log else ends
    return round(((math.log(value) if log else value) - low) / (high - low) * (cells - 1))
