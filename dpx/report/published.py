"""`published.csv`: every number in a paper, its place in the paper, how it was obtained, and the cost of running it."""

import dataclasses
from pathlib import Path

from dpx.declaration import require
from dpx.report.rows import lines

# How a number is known, in the words of a page.
MARKS = {"text": "printed in the text", "picture": "in a figure only", "computed": "computed from its settings"}
MARKS["claim"] = "stated without a number"


@dataclasses.dataclass(frozen=True)
class Published:
    """One published number. `value` is empty if it is only in a figure that was not digitised, or is a claim in prose.

    `metric` and `point` say which row of results.csv is ours at full scale; `h200_hours` and `flops` what making it costs.
    """

    item: str
    experiment: str
    quantity: str
    value: str
    unit: str
    mark: str
    where: str
    metric: str
    point: str
    h200_hours: str
    flops: str
    note: str

    def __post_init__(self) -> None:
        what = f"{self.item} {self.quantity}"
        require(self.mark in MARKS, what, f"its mark is {self.mark!r}", f"Use {', '.join(MARKS)}")
        has_value = bool(self.value) or self.mark not in ("text", "computed")
        require(has_value, what, f"a number from {self.mark} without a value", "Give it, or mark it as a picture's or a claim")


COLUMNS = tuple(field.name for field in dataclasses.fields(Published))


def read(path: Path) -> list[Published]:
    """Returns every line of the file; raises `ConfigError` for other columns, an unknown mark, and a line that is cut short."""
    require(path.is_file(), path, "the file of published values is missing", "Run it from the checkout, or set report.evidence")
    return [Published(**line) for _, line in lines(path, COLUMNS)]
