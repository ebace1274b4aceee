"""`job=evaluate`: held-out loss and accuracy of a trained run's released parameters, beside their baselines."""

from rich.table import Table

from dpx.console import Console
from dpx.declaration import declaration, require
from dpx.experiment import Experiment
from dpx.run_folder import RunFolder, read_json, write_json


@declaration
class Evaluate:
    """Evaluates the run that `run=` names; writes `private/evaluation.json`, since held-out text is text too."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "no run is named that could be evaluated", "Add run=<folder>")
        params_path = folder.release / "params"
        require(params_path.exists(), f"run={folder.path}", "holds no released parameters", "Let it train to its end, or name another run")
        from dpx.claim import agreement
        from dpx.training.evaluation import of_released

        is_checked = agreement.check(folder.path) is not None
        metrics = of_released(experiment, params_path)
        write_json(folder.made_private() / "evaluation.json", metrics)
        table = Table(title=str(folder.path), title_justify="left", show_header=False)
        for name, value in metrics.items():
            table.add_row(name, f"{value:.4f}")
        Console().print(table)
        claim = read_json(folder.release / "privacy.json")
        unchecked = "" if is_checked else " (unchecked: the folder has no private/ to compare it with)"
        Console().print(f"guarantee: {claim['guarantee']}{unchecked}", highlight=False)
