"""Panels of lines with replicates, drawn to themed SVG. matplotlib (extra `plots`) is imported only when something is drawn."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from dpx.extras import require_extra
from dpx.report.document import Figure
from dpx.report.theme import DASHES, INK, MARKERS, RULE, SERIES, SOFT, themed

# An x that is text is a category of the axis.
Curve = Sequence[tuple[int | float | str, int | float]]

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"],
    "font.size": 10.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.transparent": True,
}


def drawn(name: str, caption: str, paint: Sequence[Callable[[Any], None]]) -> Figure:
    """Returns the figure of panels side by side, for which each function of `paint` draws on the axes of its panel."""
    require_extra("a picture", "plots")
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.text import Text

    # The salt makes ids, and so the file, a function of the content.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        canvas = Canvas(figsize=(4.9 * len(paint), 3.3), layout="constrained")
        for draw, axes in zip(paint, canvas.subplots(1, len(paint), squeeze=False)[0], strict=True):
            draw(axes)
        written, pixels = io.StringIO(), io.BytesIO()
        canvas.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        # Pixels need an installed font, and this one comes with matplotlib; a page has the fonts of the reader's browser.
        for text in canvas.findobj(Text):
            text.set_fontfamily("DejaVu Sans")
        canvas.savefig(pixels, format="png", dpi=110, facecolor="white", transparent=False, metadata={"Software": None})
    return Figure(name, themed(written.getvalue(), name, caption), caption, pixels.getvalue())


def lines(axes: Any, number: int, label: str, curves: Sequence[Curve], mean: Curve, markers: bool = False) -> None:
    """Draws replicates as thin lines and their mean as a thick one; colour, dash and marker by the series' number."""
    # From the sixth on colours repeat, with another dash and marker.
    colour, dash, marker = SERIES[number % 5], DASHES[(number + number // 5) % 5], MARKERS[(number + number // 5) % 5]
    for curve in curves if len(curves) > 1 else ():
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.8, alpha=0.35)
    every = max(1, len(mean) // 6)
    style = {"marker": marker, "markersize": 4.5, "markevery": 1 if markers else every}
    axes.plot(*zip(*mean, strict=True), color=colour, linestyle=dash, linewidth=1.9, label=label, **style)


def scatter(axes: Any, number: int, points: Sequence[tuple[Any, Any]]) -> None:
    """Draws every replicate as a mark."""
    axes.scatter(*zip(*points, strict=True), s=22, marker=MARKERS[number % 5], color=SERIES[number % 5], alpha=0.75, linewidths=0)


def ring(axes: Any, number: int, points: Sequence[tuple[Any, Any]], label: str) -> None:
    """Draws open marks that grow with the series' number, so that equal values of several series are all seen."""
    look = {"s": 14 + 26 * number, "marker": MARKERS[number % 5], "edgecolors": SERIES[number % 5]}
    axes.scatter(*zip(*points, strict=True), facecolors="none", linewidths=1.4, label=label, **look)


def values(axes: Any, points: Sequence[tuple[Any, Any]]) -> None:
    """Writes the value of each mark beside it, on the side where there is room."""
    middle = sum(y for _, y in points) / len(points)
    for x, y in points:
        axes.annotate(f"{y:g}", (x, y), textcoords="offset points", xytext=(0, 7 if y <= middle else -15), ha="center", fontsize=9)


def legend(axes: Any, title: str) -> None:
    """Draws a legend beside axes that hold a series with a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title=title or None, fontsize=9, title_fontsize=9, handlelength=3, loc="upper left", bbox_to_anchor=(1.0, 1.0))
