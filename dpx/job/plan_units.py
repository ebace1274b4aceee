"""For `job=plan`: the noise by `rows_per_unit_max` and `unit_mode`, where a unit has several rows."""

import dataclasses

from dpx.claim.calibration import calibrate
from dpx.config.experiment import Experiment
from dpx.console import Console
from dpx.declaration import ConfigError
from dpx.job.plan_records import UnitNoise
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.pages.analysis_tables import Table
from dpx.privacy.declared_privacy import Privacy

# Of the loss grid: minutes become seconds, and the noise is up to about one percent more.
COARSE = {"value_discretization_interval": 2e-2}
NOTE = (
    "group clips each row, so a unit with all its rows adds that many parts to a sum; the other modes add one part: sample_units from all "
    "rows of a unit, one_row from a single row. noise_per_part is the noise multiplier divided by the parts: where units have that many "
    "rows, less is better. Settings other than the declared one are solved on a coarse grid and may be a percent too high"
)


def by_unit(experiment: Experiment, planned: float | None, size: int) -> tuple[UnitNoise, ...]:
    """Returns the noise for one row a unit, the declared and twice as many, in each mode, at the declared epsilon, steps, batch and N.

    A step then draws the same share of rows or units everywhere, and nothing is counted that the declared run would not count (`size` is
    its N, `planned` its noise multiplier). Empty for units of one row, and for noise that epsilon does not set. A setting without
    accounting has the noise `None`.
    """
    privacy = experiment.privacy
    if privacy.unit == "row" or not experiment.is_private or not isinstance(experiment.noise, TargetEpsilon):
        return ()
    coarse = dataclasses.replace(experiment, accountant=dataclasses.replace(experiment.accountant, **COARSE))
    solved: dict[tuple[int, bool], float | None] = {_cost(privacy): planned}
    found = []
    for rows in sorted({1, privacy.rows_per_unit_max, 2 * privacy.rows_per_unit_max}):
        for mode in ("group", "sample_units", "one_row"):
            setting = dataclasses.replace(privacy, rows_per_unit_max=rows, unit_mode=mode)
            if _cost(setting) not in solved:
                solved[_cost(setting)] = _noise(dataclasses.replace(coarse, privacy=setting), size)
            sigma, parts = solved[_cost(setting)], rows if mode == "group" else 1
            each = None if sigma is None else sigma / parts
            found.append(UnitNoise(rows_per_unit_max=rows, unit_mode=mode, noise_multiplier=sigma, noise_per_part=each))
    return tuple(found)


def _cost(privacy: Privacy) -> tuple[int, bool]:
    """Returns what the noise depends on: how many parts a unit adds to sums at most, and whether rows are drawn one by one."""
    return (privacy.rows_per_unit_max, True) if privacy.unit_mode == "group" else (1, False)


def _noise(experiment: Experiment, size: int) -> float | None:
    try:
        return calibrate(experiment, size).noise_multiplier
    except ConfigError:
        return None


def show(noise: tuple[UnitNoise, ...], console: Console) -> None:
    """Prints the table; nothing without rows."""
    if not noise:
        return
    rows = [{field.name: getattr(one, field.name) for field in dataclasses.fields(one)} for one in noise]
    console.print(Table.from_rows("noise_by_unit", rows, "noise by rows of a unit, at this epsilon, batch, steps and N").shown())
    console.print(f"  {NOTE}", highlight=False)
