"""`job=export`: a finished run's released weights in the layout of another library, with a model card."""

from pathlib import Path
from typing import Literal

from dpx.console import wide_console
from dpx.declaration import declaration, require
from dpx.experiment import Experiment
from dpx.run_folder import RunFolder


@declaration
class Export:
    """Exports the run that `run=` names to the folder `to` (`release/<format>` of the run, where none is named).

    `format="hf"` is whole weights for transformers, adapters merged; `"peft"` adapters alone, and the head that was trained beside them.
    """

    format: Literal["hf", "peft"] = "hf"
    to: str | None = None

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "no run is named that could be exported", "Add run=<folder>")
        from dpx.interop.export import export

        to = Path(self.to).expanduser() if self.to else folder.release / self.format
        exported = export(experiment, folder.path, to, self.format)
        kind = f"a {exported.architecture}" if exported.base is None else f"adapters of {exported.base} as a {exported.architecture}"
        wide_console().print(f"{to}: {kind}, {len(exported.tensors)} tensors, with its tokenizer and a model card", highlight=False)
