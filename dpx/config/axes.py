"""Bounds how many points the axes of a sweep give, before Hydra lists them all."""

import math
from collections.abc import Iterable
from decimal import Decimal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from dpx.declaration import ConfigError, require

MOST_POINTS = 100_000


def require_few_points(overrides: Iterable[Override], *, is_grid: bool) -> None:
    """Raises `ConfigError` if the axes among `overrides`, or one of them, give more than `MOST_POINTS` points.

    The last override of a key counts. Without `is_grid` a search draws the points, and only values that are listed count.
    """
    axes = {one.get_key_element(): one for one in overrides}
    counts = {key: _count(one, is_grid=is_grid) for key, one in axes.items() if one.is_sweep_override()}
    for key, count in counts.items():
        shown = str(axes[key].input_line)[:80]
        require(count <= MOST_POINTS, shown, f"{key} has {_in_digits(count)} values, and a sweep at most {MOST_POINTS:,} points", _FIX)
    points = math.prod(counts.values()) if is_grid else 1
    several = ", ".join(key for key, count in counts.items() if count > 1)
    require(points <= MOST_POINTS, several, f"give {_in_digits(points)} points, and a sweep has at most {MOST_POINTS:,}", _FIX)


_FIX = "List fewer values, or launch parts of the sweep one after another"


def _in_digits(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"about 10^{len(str(count)) - 1}"


def _count(axis: Override, *, is_grid: bool) -> int:
    value = axis.value()
    if isinstance(value, IntervalSweep):
        return 1
    if isinstance(value, RangeSweep):
        return _steps(axis, value) if is_grid or value.shuffle else 1
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    # The options that a pattern matches.
    return sum(1 for _ in axis.sweep_string_iterator())


def _steps(axis: Override, range_: RangeSweep) -> int:
    """Returns how many values a range has, without listing them."""
    start, stop, step = (Decimal(0 if one is None else one) for one in (range_.start, range_.stop, range_.step))
    if not all(one.is_finite() for one in (start, stop, step)) or step == 0:
        raise ConfigError(str(axis.input_line)[:80], "this range has no end", "Give it finite numbers, and a step that is not 0")
    return max(0, math.ceil((stop - start) / step))
