"""What the figures of McKenna et al. 2025 draw of the rows of runs."""

from dpx_papers.mckenna2025.rules import BATCH, LOSS, MODEL, RATE, RATIO
from dpx_papers.report.evidence import Rows
from dpx_papers.report.of_rows import of_rows

TRAINED = "train/loss"
PANEL = "model and ratio"


@of_rows
def at_best_rate(rows: Rows) -> Rows:
    """Returns the loss of each batch at its best learning rate, at every step where the rows have steps; replicates count as their mean
    (Figure 8)."""
    metric = TRAINED if TRAINED in rows else LOSS
    keys = [BATCH, *({"step"} & set(rows.columns))]
    means = rows.dropna(subset=metric).groupby([*keys, RATE], as_index=False)[metric].mean()
    return means.loc[means.groupby(keys)[metric].idxmin()]


@of_rows
def by_model_and_ratio(rows: Rows) -> Rows:
    """Returns the rows with the name of their panel, by model and then by ratio (Figure 12)."""
    ordered = rows.sort_values([MODEL, RATIO], kind="stable")
    return ordered.assign(**{PANEL: [f"{model}, ratio {ratio:.3g}" for model, ratio in zip(ordered[MODEL], ordered[RATIO], strict=True)]})
