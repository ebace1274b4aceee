"""Jobs on a run's released weights: `job=evaluate` measures them on held-out rows, `job=export` writes them for another library."""

from pathlib import Path
from typing import Literal

from rich.table import Table

from dpx.config.experiment import Experiment
from dpx.console import Console, answer, wide_console
from dpx.declaration import declaration, require
from dpx.files.checkpoint_folder import is_hub_id
from dpx.files.results import accuracy_in_words, not_above
from dpx.files.run_folder import RunFolder, write_json


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
        results = of_released(experiment, params_path)
        baselines = {f"{name}_accuracy": value for name, value in results.baselines.items()}
        write_json(folder.made_private() / "evaluation.json", results.heldout | baselines | {"rows": results.rows})
        table = Table(title=str(folder.path), title_justify="left", show_header=False)
        for name, value in (results.heldout | baselines).items():
            table.add_row(name, accuracy_in_words(value, results.rows) if name == results.metric else f"{value:.4f}")
        for baseline in not_above(results):
            table.add_row("not above", baseline)
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
        exported = export(experiment, folder.path, to, self.format, Published(self.base, self.license), changed)
        kind = f"a {exported.architecture}" if exported.base is None else f"adapters of {exported.base} as a {exported.architecture}"
        wide_console().print(f"{to}: {kind}, {len(exported.tensors)} tensors, with its tokenizer and a model card", highlight=False)
        answer({"folder": str(to), "architecture": exported.architecture, "base": exported.base, "tensors": len(exported.tensors)})
