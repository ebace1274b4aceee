"""Scales and labels of the axes of a picture, so that no two labels overlap and no legend is drawn twice."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from dpx.pages.analysis_tables import Lines


def set_scales(panel: Lines, axes: Any) -> None:
    """Sets the scales of both axes, with ticks that are labelled as a reader writes numbers."""
    if panel.x == "step" and panel.x_scale == "linear":
        # A short run has no step 12.5.
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(**{f"{axis}scale": "log" for axis, scale in (("x", panel.x_scale), ("y", panel.y_scale)) if scale == "log"})
    if panel.x_scale == "category":
        axes.margins(x=0.15)
        if panel.y_scale == "linear":
            # Room above the highest mark, which the range from 0 would leave at the edge.
            axes.set_ylim(0, 1.08 * axes.dataLim.y1)
        axes.tick_params(axis="x", labelrotation=30)
        for tick in axes.get_xticklabels():
            tick.set_horizontalalignment("right")
    for scale, axis in ((panel.x_scale, axes.xaxis), (panel.y_scale, axes.yaxis)):
        low, high = axis.get_view_interval()
        if scale == "linear" and high > 10_000:
            axis.set_major_formatter(lambda value, _: f"{value / 1000:g}K")
        if scale == "log":
            is_plain = bool(1e-3 < low and high < 10_000)
            if is_plain:
                axis.set_major_formatter("{x:g}")
            # An axis of less than a power of ten would have one label or two.
            shown = "23456789" if high < 4 * low else "25" if high < 60 * low or (is_plain and axis is axes.yaxis) else ""
            axis.set_minor_formatter(functools.partial(_between, is_plain=is_plain, shown=shown))


def _between(value: float, _: Any, is_plain: bool, shown: str) -> str:
    """Returns the label of a tick between powers of ten, if it begins with one of the digits of `shown`."""
    first, _, power = f"{value:e}".partition("e")
    if first[0] not in shown:
        return ""
    return f"{value:g}" if is_plain else rf"${first[0]}{{\times}}10^{{{int(power)}}}$"


def drop_repeated_legends(panels: Sequence[Any], columns: int) -> None:
    """Keeps one legend of equal ones, beside the last panel of a line: of the first line, or of their own."""
    first = panels[min(columns, len(panels)) - 1]
    for number, axes in enumerate(panels):
        kept = (first, panels[min(columns * (number // columns + 1), len(panels)) - 1])
        if axes is not first and (own := _legend(axes)) and any(one is not axes and own == _legend(one) for one in kept):
            axes.get_legend().remove()


def _legend(axes: Any) -> list[str]:
    found = axes.get_legend()
    return [text.get_text() for text in (found.get_title(), *found.get_texts())] if found else []


def keep_apart(canvas: Any) -> None:
    """Drops the labels between powers of ten where two labels of an axis would overlap, and turns those of an x axis that still do, as far
    as it takes."""
    canvas.draw_without_rendering()
    from matplotlib.ticker import NullFormatter

    crowded = [axis for axes in canvas.axes for axis in (axes.xaxis, axes.yaxis) if _overlaps(axis)]
    for axis in crowded:
        axis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis for axes in canvas.axes):
        for degrees in (30, 60, 90):
            if not _overlaps(axis):
                break
            axis.set_tick_params(labelrotation=degrees)
            for tick in axis.get_ticklabels():
                tick.set_horizontalalignment("right")


def _overlaps(axis: Any) -> bool:
    """Returns whether two labels of the ticks of an axis overlap; turned ones do if their lines are closer than a letter is high."""
    shown = [tick for tick in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)) if tick.get_text() and tick.get_visible()]
    boxes = [tick.get_window_extent() for tick in shown]
    turned = math.radians(max((tick.get_rotation() for tick in shown), default=0.0))
    if turned:
        height = axis.figure.dpi / 72 * shown[0].get_fontsize()
        places = sorted(box.x1 for box in boxes)
        return any((later - place) * math.sin(turned) < height for place, later in itertools.pairwise(places))
    edges = sorted((box.x0, box.x1) if axis.axis_name == "x" else (box.y0, box.y1) for box in boxes)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(edges))
