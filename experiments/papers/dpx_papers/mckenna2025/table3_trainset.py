"""Evaluates runs that differ only in their physical batch on the text that they were trained on (McKenna et al. 2025, Table 3)."""

from collections.abc import Sequence
from pathlib import Path

from dpx.claim.document import RunStatement
from dpx.claim.seals import STATEMENT, read_run_statement
from dpx.declaration import declaration, require
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table

Row = tuple[int, int, float, float, float]


@declaration
class MckennaTable3Trainset(Positive):
    """Evaluates finished runs on training rows. Losses of training rows are private: no release of a run holds them.

    Attributes:
        runs: Folder of the runs.
        match: Beginning of their names.
        made_by: Recipe that makes them.
        noise_batch_ratio: Their noise-batch ratio.
        rows: Training rows of the evaluation.
        published: (batch size, loss, accuracy) as printed.
    """

    runs: str
    match: str
    made_by: str
    noise_batch_ratio: float
    rows: int
    published: Sequence[Sequence[float | int]]

    def inputs(self) -> list[Path]:
        return [Path(self.runs)]

    def __call__(self) -> list[Table]:
        fix = f"Run +experiment={self.made_by}, then give analysis.runs=outputs"
        folders = [path.parent for path in sorted(Path(self.runs).glob(f"{self.match}*/release")) if (path / "params").exists()]
        require(bool(folders), f"{self.runs}/{self.match}*", "no finished run there", fix)
        rows = [row for folder in folders if (row := self._row(folder))]
        require(bool(rows), f"{self.runs}/{self.match}*", f"no run there has a ratio of {self.noise_batch_ratio:g}", fix)
        columns = ("batch_size", "replicate", "loss", "accuracy", "epochs")
        title = f"{self.rows:,} training rows at ratio {self.noise_batch_ratio:g}"
        note = "more than one epoch: the rows were seen before, so their loss is no longer that of unseen text"
        printed = Table("published", ("batch_size", "loss", "accuracy"), tuple(map(tuple, self.published)), "Table 3 as printed (percent)")
        return [Table("train_rows", columns, tuple(sorted(rows)), title, (note,)), printed, verdict_table(judged(rows))]

    def _row(self, folder: Path) -> Row | None:
        """Returns (batch size, replicate, loss, accuracy, epochs) of a run at the ratio, else `None`."""
        from dpx import config
        from dpx.training.evaluation import of_released

        cfg, path = config.load(str(folder))
        experiment, _ = config.build(cfg)
        if abs(getattr(experiment.noise, "noise_batch_ratio", 0.0) / self.noise_batch_ratio - 1) > 1e-6:
            return None
        metrics = of_released(experiment, path / "release" / "params", "protected", self.rows).heldout
        accuracy = next(value for name, value in metrics.items() if name in ("mlm_accuracy", "next_token_accuracy"))
        stated = read_run_statement(path / "release" / STATEMENT)
        require(isinstance(stated, RunStatement), path, "is a run without privacy", "Name runs at the ratio")
        assert isinstance(stated, RunStatement)
        batch = experiment.batch_schedule.at(0)
        return batch, experiment.replicate, metrics["loss"], accuracy, batch * experiment.steps / stated.declared_size


def judged(rows: Sequence[Row]) -> list[Part]:
    """Returns the verdicts: the loss rises with the batch, every replicate of the largest is above every one of the smallest, and
    neighbours are in order."""
    claim = "the loss of training rows rises with the physical batch"
    groups: dict[int, list[float]] = {}
    for batch, _, loss, *_ in rows:
        groups.setdefault(batch, []).append(loss)
    if len(groups) < 2:
        return [Part.of(claim, None, f"{len(groups)} batch sizes (2 needed)")]
    smallest, largest = groups[min(groups)], groups[max(groups)]
    words = ", ".join(f"{batch:,}: {sum(losses) / len(losses):.3f}" for batch, losses in sorted(groups.items()))
    return [Part.of(claim, min(largest) > max(smallest), words)]
