"""Shows the predicted loss by steps, by model and by batch, with the best values of the other two (McKenna et al. 2025, Figure 6)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.cost.designs import Candidates, candidates
from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part

AXES = ("steps", "model", "batch_size")


@of_positive
def mckenna_fig6_full_grid(
    lab: Lab, epsilons: Sequence[float | int], times: Sequence[float | int], times_of_compute: Sequence[float | int] = (0.1, 1, 10)
) -> Made:
    """Computes rows of panels that vary epsilon, data or compute; the other two keep the lab's values.

    Attributes:
        lab: The measurements and the budgets.
        epsilons: Epsilons of the first row.
        times: Factors of the lab's data in the second row.
        times_of_compute: Factors of its compute in the third.
    """
    import pandas as pd

    fitted, parts = lab.fitted(), []
    own = {"epsilon": lab.epsilon, "size": lab.size, "compute": lab.compute}
    varied = {"epsilon": epsilons} | {"size": [one * own["size"] for one in times]}
    varied |= {"compute": [one * own["compute"] for one in times_of_compute]}
    for name, value in ((name, value) for name, values in varied.items() for value in values):
        at = own | {name: value}
        asked = candidates(fitted.surface, lab.ratio(at["epsilon"]), compute=at["compute"], size=at["size"])
        parts += [along(asked, axis).assign(varies=name, value=float(value), axis=axis) for axis in AXES]
    rows: Any = pd.concat(parts, ignore_index=True)
    tables = {f"by_{axis}": of_axis.rename(columns={"place": axis}) for axis, of_axis in rows.groupby("axis", sort=False)}
    columns = {f"by_{axis}": ["varies", "value", axis, "loss"] for axis in AXES}
    return {name: Noted(tables[name][columns[name]], fitted.notes) for name in columns} | {"verdicts": judged(rows)}


def along(asked: Candidates, axis: str) -> Any:
    """Returns the least loss at every place of an axis that has a loss; steps are grouped by powers of 2^(1/4)."""

    places = {"steps": 2.0 ** (np.round(4 * np.log2(asked.steps)) / 4), "model": asked.parameters, "batch_size": asked.batch_size}[axis]
    known = np.isfinite(asked.loss)
    return frame({"place": places[known].astype(float), "loss": asked.loss[known]}).groupby("place", as_index=False)["loss"].min()


def judged(rows: Any) -> list[Part]:
    """Returns the verdicts: curves fall and then rise, and a wrong batch raises the loss most."""
    curves = rows.sort_values("place").groupby(["axis", "varies", "value"], sort=False)["loss"]
    found = curves.agg(["size", "first", "last", "min", np.ptp]).query("size >= 5")
    parts, means = [], {}
    for axis in AXES:
        own = found[found.index.get_level_values("axis") == axis]
        inside = int(((own["first"] > own["min"]) & (own["last"] > own["min"])).sum())
        shown = f"{inside} of {len(own)} curves have their least loss inside" if len(own) else "no curve of five points"
        holds = inside >= verdicts.IN_ORDER * len(own) if len(own) else None
        parts.append(Part.of(f"the loss by {axis.replace('_', ' ')} falls and then rises", holds, shown))
        means |= {axis: own["ptp"].mean()} if len(own) else {}
    steepest = "a wrong batch costs more than a wrong model or number of steps"
    if len(means) < len(AXES):
        return [*parts, Part.of(steepest, None, "an axis has no curve of five points")]
    words = ", ".join(f"{axis} {value:.2f}" for axis, value in means.items())
    return [*parts, Part.of(steepest, means["batch_size"] == max(means.values()), f"mean span of the loss, nats: {words}")]
