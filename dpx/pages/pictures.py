"""Pictures of tables as figures: SVG, PNG and PDF, in one style (`figures.mplstyle`). Only drawing imports matplotlib (extra `plots`)."""

import functools
import io
import itertools
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError
from dpx.files.run_folder import as_printed
from dpx.packages import require_extra
from dpx.pages.analysis_tables import Arrows, Cells, Lines, Picture, Table
from dpx.pages.page_document import Figure, one_line

Row = dict[str, Any]
# An x that is text is a category of the axis.
Points = Sequence[tuple[Any, Any]]

_STYLE = Path(__file__).with_name("figures.mplstyle")
_LONGEST = 120
# No date, and no name of a program or of a host, so that a file is a function of what it shows.
KINDS: dict[str, dict[str, None]] = {
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "png": {"Software": None},
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}


def write(pictures: Sequence[Picture], tables: Sequence[Table], folder: Path) -> str:
    """Draws each picture to `<name>.svg`, `.png` and `.pdf` in `folder`; returns what to tell the user, without matplotlib why not."""
    if not pictures:
        return ""
    try:
        figures = draw(pictures, tables)
    except ConfigError as refusal:
        return f"no pictures: {refusal.reason}. {refusal.fix}"
    save(figures, folder)
    return "pictures: " + ", ".join(as_printed(folder / f"{figure.name}.svg") for figure in figures)


def save(figures: Sequence[Figure], folder: Path) -> None:
    """Writes the files of each figure into `folder`."""
    for figure in figures:
        for kind in KINDS:
            (folder / f"{figure.name}.{kind}").write_bytes(figure.drawn(kind))


def draw(pictures: Sequence[Picture], tables: Sequence[Table]) -> list[Figure]:
    """Draws one figure per picture; raises `ConfigError` without matplotlib, `KeyError` for a table or column that is not there."""
    rows = {table.name: table.as_json()["rows"] for table in tables}

    def paint(canvas: Any, picture: Picture) -> None:
        canvas.set_layout_engine("constrained")
        lines, columns = _shape(picture)
        places = list(canvas.subplots(lines, columns, squeeze=False).flat)
        for panel, axes in zip(picture.panels, places, strict=False):
            _draw(panel, rows[panel.table], axes)
        for axes in places[len(picture.panels) :]:
            axes.remove()
        # Of equal legends one is kept, beside the last panel of a line: of the first line, or of their own.
        panels = places[: len(picture.panels)]
        first = panels[min(columns, len(panels)) - 1]
        for number, axes in enumerate(panels):
            kept = (first, panels[min(columns * (number // columns + 1), len(panels)) - 1])
            if axes is not first and (own := _legend(axes)) and any(one is not axes and own == _legend(one) for one in kept):
                axes.get_legend().remove()
        keep_apart(canvas)

    inches = ((4.9 * columns, 3.3 * lines) for lines, columns in map(_shape, pictures))
    return [_saved(one.name, one.caption, functools.partial(paint, picture=one), size) for one, size in zip(pictures, inches, strict=True)]


def _shape(picture: Picture) -> tuple[int, int]:
    """Returns how many lines and columns of panels there are."""
    count = len(picture.panels)
    columns = max(1, min(count, picture.columns or (2 if count == 4 else 3)))
    return -(-count // columns), columns


def legend(name: str, caption: str, series: Sequence[str]) -> Figure:
    """Draws the legend of pictures whose lines are `series`."""

    def paint(canvas: Any) -> None:
        from matplotlib.lines import Line2D

        labels = ["\n".join(textwrap.wrap(_plain(one), 44)) for one in series]
        handles = [Line2D([], [], label=one, **_look(number)) for number, one in enumerate(labels)]
        canvas.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 1), fontsize=10, handlelength=4, borderaxespad=0)

    return _saved(name, caption, paint, (0.5, 0.5), bbox_inches="tight", pad_inches=0.02)


def _saved(name: str, caption: str, paint: Callable[[Any], None], inches: tuple[float, float], **cut: Any) -> Figure:
    """Returns what `paint` draws on a canvas of `inches`."""
    require_extra("a picture", "plots")
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    # The salt makes ids, and so the file, a function of the content.
    style: Any = [_STYLE, {"svg.hashsalt": name}]
    with matplotlib.style.context(style):
        canvas = Canvas(figsize=inches)
        paint(canvas)

    @functools.cache
    def drawn(kind: str) -> bytes:
        with matplotlib.style.context(style):
            canvas.savefig(written := io.BytesIO(), format=kind, metadata=KINDS[kind], **cut)
        return written.getvalue()

    return Figure(name, caption, drawn)


def _cycle(key: str) -> list[Any]:
    """Returns what the style gives the series: `color`, `marker` or `linestyle`."""
    import matplotlib

    return matplotlib.rcParams["axes.prop_cycle"].by_key()[key]


def _colour(number: int, of: int = 0) -> str:
    """Returns the colour of a series: that of its number, or its place on a scale of `of` colours."""
    import matplotlib
    from matplotlib.colors import to_hex

    # The scale's last colours are too light on white.
    return to_hex(matplotlib.colormaps[matplotlib.rcParams["image.cmap"]](0.88 * number / (of - 1))) if of else _cycle("color")[number % 5]


def _soft() -> str:
    """Returns the colour of axes, for what is not a series."""
    import matplotlib

    return matplotlib.rcParams["axes.edgecolor"]


def _draw(panel: Lines | Arrows | Cells, rows: list[Row], axes: Any) -> None:
    x, y = (_name(columns) if isinstance(columns, str) else "" for columns in (panel.x, panel.y))
    # A longer label than the axes are high would be cut.
    axes.set(title=_plain(panel.title), xlabel=_plain(panel.x_label or x), ylabel=textwrap.fill(_plain(panel.y_label or y), 32))
    {Lines: _lines, Arrows: _arrows, Cells: _cells}[type(panel)](panel, rows, axes)


def _lines(panel: Lines, rows: list[Row], axes: Any) -> None:
    kept = selected(rows, panel.where)
    names, number, columns = {column: shown for column, shown in panel.names}, 0, (*panel.y, *panel.marks)
    values = in_order([row[panel.by] for row in kept]) if panel.by else [None]
    groups = {value: [row for row in kept if not panel.by or row[panel.by] == value] for value in values}
    of_column: dict[str, list[Points]] = {
        column: [[(_place(panel, row), row[column]) for row in own if row[column] is not None] for own in groups.values()]
        for column in columns
    }
    # What is the same for every value, such as a rule, is drawn once.
    shared = [column for column in panel.marks if len(groups) > 1 and all(one == of_column[column][0] for one in of_column[column])]
    # A mark beside the line of its value has its colour.
    paired = bool(panel.by) and len(panel.y) == 1 and bool(set(panel.marks) - set(shared))
    is_scale = len(values) > 5 and _are_numbers(values) and (paired or len(columns) - len(shared) == 1) and not panel.series
    of = len(values) if is_scale else 0
    last: list[tuple[str, Points]] = []
    for place, (value, own) in enumerate(groups.items()):
        number = panel.series.index(value) if panel.series else number
        for column in columns:
            points = of_column[column][place]
            if not points or (column in shared and place):
                continue
            is_told = panel.by and column not in shared
            parts = [_plain(names.get(column, _name(column)))] * (not is_told or len(columns) > 1) + [_number(value)] * bool(is_told)
            label = ", ".join(parts)
            if panel.values:
                # The value of each mark is beside it, on the side where there is room.
                _scatter(axes, 1, points)
                middle = sum(y for _, y in points) / len(points)
                for x, y in points:
                    look = {"textcoords": "offset points", "xytext": (0, 7 if y <= middle else -15), "ha": "center", "fontsize": 9}
                    axes.annotate(f"{y:g}", (x, y), **look)
            elif panel.runs:
                _replicates(axes, number, label, [row[panel.runs] for row in own if row[column] is not None], points, of)
            elif column in shared:
                last.append((label, points))
            elif column in panel.marks:
                # Open marks that grow with the series' number, so that equal values of several series are all seen.
                look = {"s": 18 if of else 14 + 18 * number, "marker": _cycle("marker")[number % 5], "edgecolors": _colour(number, of)}
                axes.scatter(*zip(*points, strict=True), linewidths=1.4, label=label, facecolors="none", **look)
            else:
                _line(axes, number, label, points, every_mark=len(points) <= 30, of=of)
                if panel.band:
                    known = [(_place(panel, row), *(row[column] for column in panel.band)) for row in own]
                    across, lower, upper = zip(*(edges for edges in known if None not in edges), strict=True)
                    axes.fill_between(across, lower, upper, color=_colour(number, of), alpha=0.3 / (1 + len(groups)), linewidth=0)
            number += not paired and column not in shared
        number += paired
    for label, points in last:
        axes.plot(*zip(*points, strict=True), label=label, color=_soft(), linewidth=1.2, linestyle=":", marker="")
    set_scales(panel, axes)
    if isinstance(panel.level, int | float):
        axes.axhline(panel.level, color=_soft(), linewidth=1.2, linestyle=":")
    axes.set(**{name: limits for name, limits in (("xlim", panel.x_limits), ("ylim", panel.y_limits)) if limits})
    if number > 1 and not panel.series and axes.get_legend_handles_labels()[0]:
        look = {"handlelength": 3, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(title=_plain(names.get(panel.by, _name(panel.by))) or None, **look)


def selected(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """Returns the rows whose columns have the values of `where`."""
    return [row for row in rows if all(row[column] == value for column, value in where.items())]


def in_order(values: Sequence[Any]) -> list[Any]:
    """Returns the values once each, numbers and lists of numbers from the least to the largest, others in the order of the rows."""
    different = list(dict.fromkeys(values))
    if different and all(isinstance(value, str) and re.fullmatch(r"\[\d[\d., ]*\]", value) for value in different):
        return sorted(different, key=json.loads)
    return sorted(different) if _are_numbers(different) else different


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _name(column: str) -> str:
    """Returns a column as a label; a key of a config and a metric as they are written."""
    return column if "." in column or "/" in column else column.replace("_", " ")


def _number(value: Any) -> str:
    """Returns the value of a series as a label."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and 1000 <= abs(value) < 1e12 and value == round(value))
    return f"{value:,.0f}" if is_whole else f"{value:.4g}" if isinstance(value, float) else _plain(value)


def _line(axes: Any, number: int, label: str, points: Points, every_mark: bool, of: int = 0) -> None:
    every = 1 if every_mark else max(1, len(points) // 6)
    axes.plot(*zip(*points, strict=True), label=label, markevery=every, **_look(number, of))


def _look(number: int, of: int = 0) -> dict[str, Any]:
    """Returns a thick line; colour, dash and marker by the number. From the sixth on colours repeat, with another dash and marker, unless
    there is a scale of `of` colours."""
    turned = (number + number // 5) % 5
    return {"color": _colour(number, of), "linestyle": _cycle("linestyle")[turned], "marker": _cycle("marker")[turned]}


def _plain(value: Any) -> str:
    """Returns a text as a label in which matplotlib reads no formula, and which it shows although it begins with an underscore.

    A label has at most `_LONGEST` letters: the size of a picture grows with it.
    """
    line = one_line(value)
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
    return f"{' ' * line.startswith('_')}{line}".replace("$", r"\$")


def _scatter(axes: Any, number: int, points: Points, of: int = 0) -> None:
    """Draws every replicate as a mark."""
    axes.scatter(*zip(*points, strict=True), s=22, marker=_cycle("marker")[number % 5], color=_colour(number, of), alpha=0.75, linewidths=0)


def _replicates(axes: Any, number: int, label: str, runs: Sequence[Any], points: Points, of: int) -> None:
    """Draws curves of replicates as thin lines and their mean as a thick one; replicates of a single point as marks, with a line through
    the means."""
    curves: dict[Any, list[tuple[Any, Any]]] = {}
    ys: dict[Any, list[Any]] = {}
    for run, (x, y) in zip(runs, points, strict=True):
        curves.setdefault(run, []).append((x, y))
        ys.setdefault(x, []).append(y)
    if max(map(len, curves.values())) > 1:
        for curve in curves.values() if len(curves) > 1 else ():
            axes.plot(*zip(*curve, strict=True), color=_colour(number, of), linewidth=0.8, alpha=0.35, linestyle="-", marker="")
        _line(axes, number, label, mean_curve(list(curves.values())), every_mark=False, of=of)
        return
    _scatter(axes, number, points, of)
    _line(axes, number, label, [(x, statistics.fmean(values)) for x, values in sorted(ys.items())], every_mark=True, of=of)


def mean_curve(curves: Sequence[Sequence[tuple[int, int | float]]]) -> list[tuple[int, float]]:
    """Returns the mean over replicates at the steps that all of them have."""
    tables = [dict(curve) for curve in curves]
    return [(step, statistics.fmean(table[step] for table in tables)) for step in sorted(set.intersection(*map(set, tables)))]


def _place(panel: Lines, row: Row) -> Any:
    if not isinstance(panel.x, str):
        return _plain(" ".join(f"{row[column]:g}" if isinstance(row[column], float) else str(row[column]) for column in panel.x))
    value = row[panel.x]
    return (f"{value:g}" if isinstance(value, float) else _plain(value)) if panel.x_scale == "category" else value


def _arrows(panel: Arrows, rows: list[Row], axes: Any) -> None:
    """Draws an arrow at every place; one of length 1 would reach the next place, a step of a doubling axis away."""
    columns, lines = _ticks(panel, rows, axes)
    x, y, right, up = zip(*((columns[row[panel.x]], lines[row[panel.y]], row[panel.right], row[panel.up]) for row in rows), strict=True)
    look = {"scale": 1.15, "color": _colour(0), "width": 0.006, "headwidth": 4, "headlength": 4.5, "zorder": 3}
    axes.quiver(x, y, right, up, angles="xy", scale_units="xy", **look)
    axes.scatter(x, y, s=7, color=_soft(), linewidths=0, zorder=2)
    axes.set(xlim=(-0.4, len(columns) - 0.1), ylim=(-0.4, len(lines) - 0.1))


def _cells(panel: Cells, rows: list[Row], axes: Any) -> None:
    from matplotlib.patches import Rectangle

    own = [row for row in selected(rows, panel.where) if row[panel.value] is not None]
    columns, lines = _ticks(panel, own, axes)
    found: dict[tuple[int, int], list[Any]] = {}
    for row in own:
        found.setdefault((columns[row[panel.x]], lines[row[panel.y]]), []).append(row[panel.value])
    means = {place: statistics.fmean(values) for place, values in found.items()}
    low, high = min(means.values()), max(means.values())
    for (x, y), mean in means.items():
        share = (mean - low) / (high - low) if high > low else 1.0
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_colour(0), alpha=0.05 + 0.45 * share, linewidth=0))
        written = f"{mean:.3g}" if abs(mean) >= 1 else f"{mean:.3f}".lstrip("0") if mean else "0"
        axes.annotate(written, (x, y), ha="center", va="center", fontsize=8.5)
    axes.grid(False)
    axes.set(xlim=(-0.6, len(columns) - 0.4), ylim=(-0.6, len(lines) - 0.4))


def _ticks(panel: Arrows | Cells, rows: list[Row], axes: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    """Equally spaced places of both columns' values, and their ticks."""
    columns, lines = ({value: place for place, value in enumerate(sorted({row[name] for row in rows}))} for name in (panel.x, panel.y))
    axes.set_xticks(list(columns.values()), [_short(value) for value in columns])
    axes.set_yticks(list(lines.values()), [_short(value) for value in lines])
    return columns, lines


def _short(value: Any) -> str:
    """Writes 1,250,000 as 1.25M and 16,384 as 16K: powers of two in thousands of 1,024, others of 1,000."""
    if not isinstance(value, int | float) or value < 1000:
        return f"{value:g}" if isinstance(value, int | float) else _plain(value)
    base = 1024 if value == int(value) and int(value) & (int(value) - 1) == 0 else 1000
    return f"{value / base**2:g}M" if value >= base**2 else f"{value / base:g}K"


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
