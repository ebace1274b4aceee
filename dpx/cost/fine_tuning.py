"""Designs private fine-tuning from a table of measured runs: batch, steps and rate by two rules, and the quality to expect.

A setting carries over from one task to another in this form: the batch as a share of the rows, the rate as a `path`, which is how far Adam
moves a parameter at most while a linear schedule falls to zero (half of rate times steps). The signal of a budget is N mu / sqrt(d), for N
rows, the mu of Gaussian DP at (epsilon, delta) and d trained parameters: about the length of all clipped gradients over that of the noise
of a whole run. Accuracy is taken to rise with it. Everything here is public.
"""

import csv
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpx.declaration import require
from dpx.files.results import interval
from dpx.models.shape import Bert
from dpx.privacy import closed_form

# Measured conditions whose signal or number of passes differs by this factor count 60 % as much as one that is equal.
NEAR = 2.0
# Accuracies that differ by less are taken as equal.
AS_GOOD = 0.0025
COLUMNS = ("task", "checkpoint", "trained", "parameters", "size", "epsilon", "delta", "batch", "steps", "rate", "runs")
COLUMNS += ("noise_multiplier", "snr", "accuracy", "rows", "baseline", "head")


class Point(NamedTuple):
    """A setting that carries over: passes over the data, the share of the rows that a batch has, and the path of the rate."""

    passes: float
    share: float
    path: float

    def steps(self, passes: float) -> int:
        return max(1, round(passes / self.share))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Runs of one setting: the mean accuracy of `runs` on `rows` judged rows, and the median gradient-SNR, NaN if it was not measured.

    `head` is what the classifier reads and its form (`head_of`).
    """

    task: str
    checkpoint: str
    trained: str
    parameters: int
    size: int
    epsilon: float
    delta: float
    batch: int
    steps: int
    rate: float
    runs: int
    noise_multiplier: float
    snr: float
    accuracy: float
    rows: int
    baseline: float
    head: str = ""

    @property
    def signal(self) -> float:
        return signal(self.size, self.epsilon, self.delta, self.parameters)

    @property
    def condition(self) -> tuple[str, int, float]:
        return self.task, self.size, self.epsilon

    @property
    def point(self) -> Point:
        """Returns the setting, rounded so that settings of tasks of different sizes can be equal: the share to quarter powers of two."""
        share = self.batch / self.size
        passes, path = (float(f"{value:.1g}") for value in (self.steps * share, self.rate * self.steps / 2))
        return Point(passes, 2 ** (round(4 * math.log2(share)) / 4), path)

    @property
    def is_above(self) -> bool:
        """Returns whether the 95 % interval of the accuracy lies above always answering the most frequent class."""
        return interval(self.accuracy, self.rows)[0] > self.baseline


def signal(size: int, epsilon: float, delta: float, parameters: int) -> float:
    """Returns N mu / sqrt(d)."""
    return size * closed_form.mu(epsilon, delta) / math.sqrt(parameters)


def head_of(model: Any) -> str:
    """Returns what a model's classifier reads and its form, such as "mean linear"; "last linear" of a decoder."""
    return f"{model.pool} {model.classifier}" if isinstance(model, Bert) else "last linear"


def shipped() -> Path:
    """Returns the table of measured runs that comes with dpx."""
    package = Path(__file__).parent
    in_wheel = package / "fine_tuning.csv"
    return in_wheel if in_wheel.exists() else package.parents[1] / "experiments" / "fine_tuning" / "measured.csv"


def read(path: Path) -> list[Measured]:
    """Returns the rows of a table with the columns `COLUMNS`; raises `ConfigError` for another file."""
    require(path.is_file(), path, "no such file", f"Name a CSV table with the columns {', '.join(COLUMNS)}")
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        require(not missing, path, f"has no column {', '.join(missing)}", f"Give the columns {', '.join(COLUMNS)}")
        rows = list(table)
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Measured)}
    return [Measured(**{name: kinds[name](row[name] or "nan") for name in COLUMNS}) for row in rows]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a design is asked for: what trains, its number of parameters d, the passes that the compute allows, the signal, and the head."""

    trained: str
    parameters: int
    passes: float
    signal: float
    head: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen setting, of which `passes` are run. `lost` is how much accuracy each setting is expected to lose to the best one."""

    point: Point
    passes: float
    lost: dict[Point, float]
    measured: tuple[Measured, ...]

    @property
    def clipped_means(self) -> list[float]:
        """Returns the measured norms of the mean clipped gradient, over the clipping norm, at the chosen setting."""
        at_point = [row for row in self.measured if row.point == self.point and math.isfinite(row.snr)]
        # From the SNR of a step.
        return [row.snr * row.noise_multiplier * math.sqrt(row.parameters) / row.batch for row in at_point]


def choose(table: Sequence[Measured], asked: Asked) -> Choice:
    """Returns the setting that loses least accuracy to the best of each measured condition, near ones counting most.

    Of settings that lose nearly as little, the one with the fewest passes is taken. Raises `ConfigError` if nothing of the table trained
    the same part.
    """
    own = [row for row in table if row.trained == asked.trained]
    kinds = ", ".join(sorted({row.trained for row in table}))
    require(bool(own), f"train={asked.trained}", "no measured run trains this part", f"Use one of {kinds}")
    # Where the head was not measured, the one that was measured most decides.
    heads = Counter(row.head for row in own)
    head = asked.head if asked.head in heads else heads.most_common(1)[0][0]
    own = [row for row in own if row.head == head]
    fewest = min(row.point.passes for row in own)
    own = [row for row in own if row.point.passes <= max(asked.passes, fewest) * 1.05]
    # The runs of each condition that tells settings apart (three settings or more, and one that is above the baseline); without such
    # conditions the runs above the baseline, or else all runs.
    conditions = [[row for row in own if row.condition == condition] for condition in dict.fromkeys(row.condition for row in own)]
    above = [rows for rows in conditions if any(row.is_above for row in rows)]
    lost: dict[Point, list[tuple[float, float]]] = {}
    for rows in [rows for rows in above if len(rows) >= 3] or above or conditions:
        best = max(row.accuracy for row in rows)
        for row in rows:
            apart = math.log(row.signal / asked.signal) / math.log(NEAR)
            # Never zero: if only the farthest rows are left, they decide.
            lost.setdefault(row.point, []).append((max(math.exp(-(apart**2) / 2), 1e-9), best - row.accuracy))
    mean = {point: sum(w * loss for w, loss in pairs) / sum(w for w, _ in pairs) for point, pairs in lost.items()}
    as_good = [point for point in mean if mean[point] <= min(mean.values()) + AS_GOOD]
    point = min(as_good, key=lambda point: (point.passes, mean[point], -sum(w for w, _ in lost[point])))
    return Choice(point, min(point.passes, asked.passes), mean, tuple(own))


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a measured task reached at the setting, brought to the asked signal; `near` is the run whose signal is nearest."""

    task: str
    accuracy: float
    is_extrapolated: bool
    near: Measured

    @property
    def is_above(self) -> bool:
        return interval(self.accuracy, self.near.rows)[0] > self.near.baseline


def expected(choice: Choice, asked: Asked) -> list[Expected]:
    """Returns the accuracy of each measured task as a monotone function of the signal, at the asked one; held beyond the measured ones."""
    from dpx.cost.surface import isotonic

    away = lambda row: sum(abs(math.log(one / other)) for one, other in zip(row.point, choice.point, strict=True))  # noqa: E731
    found = []
    for task in sorted({row.task for row in choice.measured}):
        own = [row for row in choice.measured if row.task == task]
        # Of each condition the run at the setting, or at the nearest measured one.
        nearest = [min((row for row in own if row.condition == condition), key=away) for condition in {row.condition for row in own}]
        rows = sorted(nearest, key=lambda row: row.signal)
        signals, accuracies = np.log([row.signal for row in rows]), np.array([row.accuracy for row in rows])
        at = math.log(asked.signal)
        accuracy = float(np.interp(at, signals, isotonic(accuracies, 0, increasing=True)))
        is_outside = not signals[0] - 1e-9 <= at <= signals[-1] + 1e-9
        found.append(Expected(task, accuracy, is_outside, rows[int(np.argmin(np.abs(signals - at)))]))
    return found
