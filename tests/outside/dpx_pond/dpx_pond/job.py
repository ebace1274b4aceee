"""`job=census`: what a config rests on, written beside the run."""

from dpx.config.experiment import Experiment
from dpx.declaration import declaration
from dpx.files.run_folder import RunFolder, write_json
from dpx.statement import outside_code


@declaration
class Census:
    """Writes `release/census.json`; `title` is set as job.title=..."""

    title: str = "what this rests on"

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        folder.made_release()
        write_json(folder.release / "census.json", {"title": self.title, "parts": outside_code.facts(experiment)})


def census(*arguments: object) -> None:
    """A callable that is not a declaration: no `_target_` can name it."""
    raise AssertionError(arguments)
