"""`job=resume run=<folder>`: resumes a run with the config it began with, even if the recipes have changed."""

from dpx.declaration import declaration, require
from dpx.experiment import Experiment
from dpx.job.train import Train
from dpx.run_folder import RunFolder


@declaration
class Resume:
    """Continues training in a folder that holds a run; raises `ConfigError` for one that does not."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "no run is named that could go on", "Add run=<folder>, or start one with job=train")
        Train()(experiment, folder)
