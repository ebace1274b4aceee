"""Jobs on a run's released weights: `job=evaluate` measures them on held-out rows, `job=export` writes them for another library, and
`job=predict` labels and scores the rows of a file, or gives numbers, by a run's classifier or an exported one.
"""

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
from rich import table as rich_table

from dpx.config.experiment import Experiment
from dpx.console import Console, answer, wide_console
from dpx.data.labelled import Table
from dpx.data.record_reader import SUFFIXES, TextColumns, records
from dpx.declaration import declaration, require
from dpx.durable import draft_of, make_folder
from dpx.files.results import metric_in_words, not_better
from dpx.files.run_folder import RunFolder, write_json
from dpx.files.weights import is_hub_id


@declaration
class Evaluate:
    """Evaluates the run that `run=` names; writes `private/evaluation.json`, since held-out text is text too."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "this job evaluates a run, and no run is named", "Add run=<folder>")
        params_path = folder.release / "params"
        require(
            params_path.exists(), f"run={folder.path}", "contains no released parameters", "Let it train to its end, or name another run"
        )
        from dpx.statement import received
        from dpx.training.evaluation import of_released

        found = received.read(folder.path)
        results = of_released(experiment.receiver, experiment.steps, params_path, experiment.schedule.evaluation_rows, experiment.widths)
        suffix = "accuracy" if results.metric.endswith("accuracy") else results.metric
        baselines = {f"{name}_{suffix}": value for name, value in results.baselines.items()}
        write_json(folder.made_private() / "evaluation.json", results.heldout | baselines | {"rows": results.rows})
        table = rich_table.Table(title=str(folder.path), title_justify="left", show_header=False)
        for name, value in (results.heldout | baselines).items():
            table.add_row(name, metric_in_words(name, value, results.rows) if name == results.metric else f"{value:.4f}")
        for baseline in (base for bases in not_better(results).values() for base in bases):
            table.add_row("not better than", baseline)
        Console().print(table)
        answer(results.heldout | baselines | {"rows": results.rows} | found.facts)
        Console().print(f"guarantee: {found.in_words()}", highlight=False)


@declaration
class Export:
    """Exports the run that `run=` names.

    Attributes:
        format: hf: whole weights for transformers, adapters merged; peft: adapters alone, and the head that was trained beside them.
        to: Folder that is written; null means release/<format> of the run.
        base: Hub id of the checkpoint that the run started from, for the model card; null means that of init.path, if it is one.
        license: Licence of the exported weights, for the model card; null means the one that the checkpoint's card names.
    """

    format: Literal["hf", "peft"] = "hf"
    to: str | None = None
    base: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        require(
            self.base is None or is_hub_id(self.base),
            f"job.base={self.base}",
            "is a path, which others cannot load",
            "Name an id on the hub, such as google-bert/bert-base-uncased",
        )

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "this job exports a run, and no run is named", "Add run=<folder>")
        from dpx.interop.card import Published
        from dpx.interop.export import export
        from dpx.job.change import sentences_of

        to = Path(self.to).expanduser() if self.to else folder.release / self.format
        changed = lambda stated: sentences_of(experiment, folder.release, stated)[0]  # noqa: E731
        exported = export(experiment.fitted, folder.path, to, self.format, Published(self.base, self.license), changed)
        kind = f"a {exported.architecture}" if exported.base is None else f"adapters of {exported.base} as a {exported.architecture}"
        wide_console().print(f"{to}: {kind}, {len(exported.tensors)} tensors, with its tokenizer and a model card", highlight=False)
        answer({"folder": str(to), "architecture": exported.architecture, "base": exported.base, "tensors": len(exported.tensors)})


@declaration
class Predict:
    """Writes `output`.jsonl and `output`.csv, a line a row, in the order of `input`; no label is read.

    The classifier is that of the run that `run=` names, or of the folder `checkpoint`.

    Attributes:
        input: File of rows, as data=table reads it.
        output: Path of the two files without their endings.
        checkpoint: A classifier in the layout of Hugging Face, instead of a run.
        text_field: Column of the text; null takes the column of the run's training rows, or text.
        pair_field: Column of a second text; null takes that of the training rows.
        choices_field: Column that lists several texts; the label is then the place of the right one, from 0.
    """

    input: str
    output: str
    checkpoint: str | None = None
    text_field: str | None = None
    pair_field: str | None = None
    choices_field: str | None = None

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        source, read = experiment.data.source, Path(self.input).expanduser()
        value, fix = f"job.input={self.input}", f"Name a file that ends in one of {', '.join(SUFFIXES)}"
        require(read.is_file(), value, "no such file", fix)
        require(read.name.endswith(SUFFIXES), value, "dpx cannot read this kind of file", fix)
        output = Path(self.output).expanduser()
        for written in _written(output):
            value = f"job.output={self.output}"
            require(written.resolve() != read.resolve(), value, f"the output {written} would overwrite the input", "Name another output")
            require(not written.is_dir(), value, f"the output {written} is a folder", "Name another output")
        trained_on, separator = TextColumns(), None
        if self.checkpoint is None and isinstance(source, Table):
            trained_on, separator = source.texts, source.csv_separator
        from dpx.training.evaluation import of_checkpoint, of_run

        if self.checkpoint is not None:
            classifier = of_checkpoint(self.checkpoint)
        else:
            from dpx.statement import received

            began = (folder.release / "params").is_dir()
            require(began, "run", "no finished run is named", "Add run=<folder>, or job.checkpoint=<exported folder>")
            received.read(folder.path)
            declared = (experiment.model, experiment.task, experiment.vocabulary_size, experiment.data, experiment.privacy)
            classifier = of_run(*declared, folder.release / "params")
        columns = self._columns(trained_on, classifier.choices)
        texts = (columns.read_texts(where, row) for where, row in records(read, separator))
        make_folder(output.parent)
        count = _write(output, list(classifier.labels), classifier.scores(texts), classifier.answers)
        answer({"rows": count, "files": [f"{output}.jsonl", f"{output}.csv"]})
        wide_console().print(f"{count} rows: {output}.jsonl, {output}.csv", highlight=False)

    def _columns(self, trained_on: TextColumns, choices: int | None) -> TextColumns:
        """Returns the columns of a row's texts, for a classifier that reads `choices` texts per row, or one."""
        named = self.choices_field or trained_on.choices
        value = f"job.choices_field={self.choices_field}"
        require(named is None or choices is not None, value, "the classifier reads one text in each row", "Remove it")
        require(
            named is not None or choices is None, value, f"the classifier chooses among {choices} texts", "Name the column that lists them"
        )
        require(
            named is None or self.pair_field is None,
            f"job.pair_field={self.pair_field}",
            "with choices, each choice already is the second text of a row",
            "Remove it",
        )
        return TextColumns(self.text_field or trained_on.text, self.pair_field or trained_on.pair, named, choices)


def _written(output: Path) -> tuple[Path, Path]:
    return Path(f"{output}.jsonl"), Path(f"{output}.csv")


def _write(output: Path, labels: list[str], scores: Iterator[np.ndarray], answers: str = "class") -> int:
    """Writes both files and returns the number of rows; the files replace earlier ones only when both are complete."""
    count, is_number = 0, answers == "number"
    with ExitStack() as opened:
        lines_path, csv_path = (opened.enter_context(draft_of(path)) for path in _written(output))
        lines = opened.enter_context(lines_path.open("w", encoding="utf-8"))
        csv_file = opened.enter_context(csv_path.open("w", newline="", encoding="utf-8"))
        writer = csv.writer(csv_file)
        writer.writerow(["row", *(labels if is_number else ["label", *(f"score_{label}" for label in labels)])])
        for count, scores_K in enumerate(scores, start=1):
            require(
                bool(np.isfinite(scores_K).all()), f"row {count}", "its scores are not numbers", "Train again, at a lower learning rate"
            )
            rounded = [round(float(score), 6) for score in scores_K]
            scored = dict(zip(labels, rounded, strict=True))
            if is_number:
                lines.write(json.dumps({"row": count} | scored) + "\n")
                writer.writerow([count, *rounded])
                continue
            several = [label for label, score in zip(labels, scores_K, strict=True) if score > 0.5]
            label = several if answers == "labels" else labels[int(scores_K.argmax())]
            lines.write(json.dumps({"row": count, "label": label, "scores": scored}) + "\n")
            writer.writerow([count, ";".join(label) if isinstance(label, list) else label, *rounded])
    return count
