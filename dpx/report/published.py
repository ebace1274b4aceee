"""`published.csv`: every number in a paper, its place in the paper, how it was obtained, and the cost of running it."""

import csv
import dataclasses
from pathlib import Path

from dpx.declaration import require

MARKS = ("text", "picture", "computed", "claim")


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
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        require(tuple(reader.fieldnames or ()) == COLUMNS, path, "its columns are others", f"Give {', '.join(COLUMNS)}")
        lines = []
        for line in reader:
            is_whole = None not in line and None not in line.values()
            require(is_whole, f"{path}, line {reader.line_num}", f"does not have {len(COLUMNS)} cells", "Restore the line")
            lines.append(Published(**line))
        return lines
