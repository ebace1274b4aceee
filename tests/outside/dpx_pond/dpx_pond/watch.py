"""`callbacks=heron`: writes what it is told, one line a moment."""

import json
from pathlib import Path

from dpx.config.callback import Callback, Moment
from dpx.declaration import declaration


@declaration
class Heron(Callback):
    """Appends the number of steps done and the names of what it is given to a file.

    Attributes:
        file: The file.
    """

    file: str = "heron.jsonl"

    def on_start(self, moment: Moment) -> None:
        self._note("start", moment)

    def on_evaluation(self, moment: Moment) -> None:
        self._note("evaluation", moment)

    def on_save(self, moment: Moment) -> None:
        self._note("save", moment)

    def on_end(self, moment: Moment) -> None:
        self._note("end", moment)

    def _note(self, name: str, moment: Moment) -> None:
        given = sorted(moment.protected or {})
        line = [name, moment.step, moment.statement.guarantee, len(moment.released), "train/loss" in given]
        with Path(self.file).open("a") as file:
            file.write(json.dumps(line) + "\n")
