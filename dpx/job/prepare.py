"""`job=prepare`: the record store alone, so that training starts at once or on a machine without the source text."""

from dpx.console import Console
from dpx.data.prepare import prepare, say_stage
from dpx.declaration import declaration
from dpx.experiment import Experiment
from dpx.run_folder import RunFolder


@declaration
class Prepare:
    """Prepares the experiment's data, or opens the prepared data, and prints a summary."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        del folder
        store = prepare(experiment.data, experiment.privacy, say_stage)
        rows = ", ".join(f"{count:,} {split}" for split, count in store.manifest.rows.items())
        text = f"{store.folder}: {rows} rows of {store.manifest.sequence_length} tokens, vocabulary from {store.manifest.vocabulary_source}"
        Console().print(text, highlight=False, soft_wrap=True)
