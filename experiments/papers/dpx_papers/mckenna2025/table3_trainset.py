"""Evaluates runs that differ only in their physical batch on the text that they were trained on (McKenna et al. 2025, Table 3)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import RunStatement
from dpx_papers.analysis import Input, Made, frame
from dpx_papers.mckenna2025.lab import of_positive
from dpx_papers.report.shape import Part


@of_positive
def mckenna_table3_trainset(
    runs: Input, match: str, made_by: str, noise_batch_ratio: float, rows: int, published: Sequence[Sequence[float | int]]
) -> Made:
    """Evaluates finished runs on training rows. Losses of training rows are private: no release of a run holds them.

    Attributes:
        runs: Folder of the runs.
        match: Beginning of their names.
        made_by: Recipe that makes them.
        noise_batch_ratio: Their noise-batch ratio.
        rows: Training rows of the evaluation.
        published: (batch size, loss, accuracy) as printed.
    """
    fix = f"Run +experiment={made_by}, then give analysis.runs=outputs"
    folders = [path.parent for path in sorted(Path(runs).glob(f"{match}*/release")) if (path / "params").exists()]
    require(bool(folders), f"{runs}/{match}*", "no finished run there", fix)
    found = [row for folder in folders if (row := _row(folder, noise_batch_ratio, rows))]
    require(bool(found), f"{runs}/{match}*", f"no run there has a ratio of {noise_batch_ratio:g}", fix)
    measured = frame(found).sort_values(list(found[0]))
    printed = [dict(zip(("batch_size", "loss", "accuracy"), line, strict=True)) for line in published]
    return {"train_rows": measured, "published": printed, "verdicts": [judged(measured)]}


def _row(folder: Path, noise_batch_ratio: float, rows: int) -> dict[str, Any] | None:
    """Returns the evaluation of a run at the ratio, else `None`."""
    from dpx import config
    from dpx.training.evaluation import of_released

    cfg, path = config.load(str(folder))
    experiment, _ = config.build(cfg)
    if abs(getattr(experiment.noise, "noise_batch_ratio", 0.0) / noise_batch_ratio - 1) > 1e-6:
        return None
    params = path / "release" / "params"
    metrics = of_released(experiment.receiver, experiment.steps, params, rows, experiment.widths, "protected").heldout
    accuracy = next(value for name, value in metrics.items() if name in ("mlm_accuracy", "next_token_accuracy"))
    stated = read_run_statement(path / "release" / STATEMENT)
    require(isinstance(stated, RunStatement), path, "is a run without privacy", "Name runs at the ratio")
    assert isinstance(stated, RunStatement)
    batch = experiment.batch_schedule.at(0)
    row = {"batch_size": batch, "replicate": experiment.replicate, "loss": metrics["loss"], "accuracy": accuracy}
    return row | {"epochs": batch * experiment.steps / stated.declared_size}


def judged(rows: Any) -> Part:
    """Returns the verdict: the loss rises with the batch, and every replicate of the largest is above every one of the smallest."""
    claim = "the loss of training rows rises with the physical batch"
    losses = rows.groupby("batch_size")["loss"]
    if losses.ngroups < 2:
        return Part.of(claim, None, f"{losses.ngroups} batch sizes (2 needed)")
    words = ", ".join(f"{batch:,}: {mean:.3f}" for batch, mean in losses.mean().items())
    return Part.of(claim, losses.min().iloc[-1] > losses.max().iloc[0], words)
