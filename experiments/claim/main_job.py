"""Draws the picture of the main README: loss and epsilon of the main job, step by step.

Run `python -m dpx` first. Then `python experiments/claim/main_job.py <its folder under outputs/>` writes main_job.svg beside this file
(extra `plots`). The loss of a step depends on the training text without noise; it is shown because that text is public.
"""

import sys
from pathlib import Path

from dpx.files import results
from dpx.pages import pictures
from dpx.pages.analysis_tables import Lines, Picture, Table

HERE = Path(__file__).parent
PANELS = (
    Lines(table="steps", x="step", y=("loss",), title="Training loss", y_label="nats a masked word"),
    Lines(table="steps", x="step", y=("epsilon",), title="Epsilon spent, at delta 1e-6"),
)


def steps(run: Path) -> Table:
    """The measured loss and the epsilon stated so far, for every step that wrote both."""
    lines = results.read(run / "private")
    columns = ("step", "train/loss", "privacy/epsilon")
    rows = tuple(tuple(line[column] for column in columns) for line in lines if all(column in line for column in columns))
    return Table("steps", ("step", "loss", "epsilon"), rows)


def main() -> None:
    picture = Picture(name="main_job", caption="The main job: loss and epsilon at each step.", panels=PANELS)
    (figure,) = pictures.draw([picture], [steps(Path(sys.argv[1]))])
    (HERE / "main_job.svg").write_bytes(figure.drawn("svg"))


if __name__ == "__main__":
    main()
