"""Defines the measurements that the analyses of the scaling laws read, and their budgets: `analysis/lab=full` as in the paper, or
`laptop`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpx.cost.designs import NEAR, Ratio
from dpx.cost.measured_runs import Measurements, load
from dpx.cost.surface import Choice, Grid, Surface, grid_of, surface_of
from dpx.declaration import declaration, require
from dpx_papers.analysis import analysis
from dpx_papers.mckenna2025 import authors
from dpx_papers.report.shape import BY_CODE


def require_positive(given: Mapping[str, Any], place: str, may_be_zero: Sequence[str] = ()) -> None:
    """Raises `ConfigError` if a given number, alone or in a list, is not above 0, or a list is empty."""
    for name, value in given.items():
        said = f"{place}.{name}={value}"
        require(name == "published" or value not in ([], ()), said, "nothing would be computed", "Give one at least")
        numbers = [one for one in _leaves(value) if isinstance(one, (int, float))]
        if name in may_be_zero:
            require(all(one >= 0 for one in numbers), said, "must not be negative", "Give 0 or more")
        else:
            require(all(one > 0 for one in numbers), said, "must be positive", "Give numbers above 0")


def _leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (list, tuple)) else [value]


# Makes analyses whose numbers are all above 0, except points of a profile, which may begin at 0.
of_positive = analysis(lambda declared: require_positive(declared.given, "analysis", may_be_zero=("points",)))


@declaration
class Baseline:
    """Declares a fixed setting that the optimum is compared with (section 4.4).

    Attributes:
        model: Name of the model.
        parameters: Its parameters.
        steps: Steps of a run.
        batch_size: Batch size.
    """

    model: str
    parameters: float | int
    steps: int
    batch_size: int

    def __post_init__(self) -> None:
        require_positive(vars(self), "analysis.lab.baselines")


@declaration
class Lab:
    """Declares the measurements and the budgets.

    `size`, `epsilon` and `compute` are the fixed values where one of the others varies.

    Attributes:
        measurements: A CSV table (dpx.cost.measured_runs, or the authors' results.csv), or a folder of runs.
        match: Beginning of the names of the runs that are read.
        made_by: Recipe that makes the runs.
        by: Whose choices make losses a surface and optima: those of the text, or of the authors' code (dpx_papers.mckenna2025.authors).
        choice: How one loss is chosen among runs that differ in the learning rate only, by the text.
        reach: Up to how many times the measured steps to extrapolate.
        delta: Delta of epsilon.
        size: Protected records.
        epsilon: Epsilon; inf means no noise.
        compute: FLOPs.
        sizes: Protected records on the axes of figures.
        epsilons: Epsilons on the axes of figures.
        lowest_compute: Least FLOPs on the axes of figures.
        highest_compute: Most FLOPs on the axes of figures.
        computes: Number of points between them.
        axes: Values of single figures, by name.
        baselines: Fixed settings with which the optimum is compared.
        steps_above: Parametric fits leave out records up to this step.
        ratio_above: Parametric fits leave out records up to this noise-batch ratio.
        loss_at_most: Parametric fits leave out records above this loss.
    """

    measurements: str | None
    match: str
    made_by: str
    by: Literal["text", "authors"]
    choice: Choice
    reach: float | int
    delta: float
    size: float | int
    epsilon: float | int
    compute: float | int
    sizes: Sequence[float | int]
    epsilons: Sequence[float | int]
    lowest_compute: float | int
    highest_compute: float | int
    computes: int
    axes: Mapping[str, Sequence[float | int]]
    baselines: Sequence[Baseline]
    steps_above: float | int
    ratio_above: float | int
    loss_at_most: float | int

    def __post_init__(self) -> None:
        require_positive(vars(self), "analysis.lab", may_be_zero=("steps_above", "ratio_above"))
        require(
            1 <= self.reach < float("inf"),
            f"analysis.lab.reach={self.reach}",
            "measured steps are kept whole",
            "Give 1, or how many times as many",
        )
        ends = f"analysis.lab.lowest_compute={self.lowest_compute:g}, highest_compute={self.highest_compute:g}"
        require(self.lowest_compute <= self.highest_compute < np.inf, ends, "no range", "Give the lower one first")

    @property
    def inputs(self) -> list[str]:
        """The files that must exist before an analysis of the lab can start."""
        return [self.measurements] if self.measurements else []

    @property
    def is_measured(self) -> bool:
        """Whether there are measurements to fit."""
        return self.measurements is not None

    def measured(self) -> tuple[Measurements, list[str]]:
        """Returns the table, and what was left out of it. Raises `ConfigError`, with the command to run, if the table is missing."""
        make = f"Run +experiment={self.made_by}, then give analysis.lab.measurements=outputs, or analysis/lab=laptop for the laptop's grid"
        require(self.is_measured, "analysis.lab.measurements", "no losses to fit", make)
        assert self.measurements is not None
        require(Path(self.measurements).exists(), f"analysis.lab.measurements={self.measurements}", "is not there", make)
        path = Path(self.measurements)
        return (authors.read(path), []) if authors.is_table(path) else load(path, self.match)

    def fitted(self) -> "Fitted":
        """Returns the measurements, the grid chosen from them, and the surface through it."""
        measured, left_out = self.measured()
        grid = grid_of(measured, self.choice)
        batch_size, tokens = float(measured.batch_size[0]), float(measured.sequence_length[0])
        if self.by == "authors":
            surface = authors.surface(measured, self.reach)
        else:
            surface = surface_of(grid, batch_size, tokens, reach=self.reach)
        return Fitted(measured, grid, surface, (*left_out, *grid.left_out), self.by)

    def ratio(self, epsilon: float | int) -> Ratio:
        """Returns noise-batch ratios of (epsilon, delta): the smaller of Poisson sampling and fixed batches, by the authors the former."""
        from dpx.cost.designs import Calibration

        return Calibration(epsilon, self.delta, poisson_alone=self.by == "authors").ratio

    @property
    def near(self) -> float:
        """How far above the least loss, as a share, a configuration is near it."""
        return 0.02 if self.by == "authors" else NEAR

    def computes_of(self) -> np.ndarray:
        """Returns computes from the lowest to the highest, evenly spaced on a log scale."""
        return np.geomspace(self.lowest_compute, self.highest_compute, self.computes)


def chosen_by(by: str) -> str:
    """Returns the note on whose choices a table is by."""
    return f"{BY_CODE}, analysis.lab.by=authors" if by == "authors" else "by the choices of the text"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Holds measurements, the grid chosen from them, and the surface through it."""

    measured: Measurements
    grid: Grid
    surface: Surface
    left_out: tuple[str, ...]
    by: str = "text"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of any figure must know."""
        grid = self.grid
        size = f"{len(grid.names)} models, {len(grid.ratios_R)} ratios, {len(grid.steps_T)} records up to {grid.steps_T[-1]:,.0f} steps"
        without = [f"{len(grid.noiseless.names)} models without noise too"] if grid.noiseless else []
        missing = [f"{len(self.left_out)} runs or cells left out of the grid"] if self.left_out else []
        first = f"losses of {size}, at a batch of {self.surface.batch_size:,.0f}; no model was trained to an epsilon named here"
        return (first, *without, *missing, chosen_by(self.by))
