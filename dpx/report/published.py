"""`published.csv`: every number a paper gives, where it stands, how it was obtained, and what running it would cost."""

import csv
import dataclasses
from pathlib import Path

COLUMNS = ("item", "experiment", "quantity", "value", "unit", "mark", "where", "metric", "point", "h200_hours", "flops", "note")
MARKS = ("text", "picture", "computed", "claim")


@dataclasses.dataclass(frozen=True)
class Published:
    """One published number. `value` is empty where it stands only in a picture that nobody digitised, or is a claim in words.

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
        if self.mark not in MARKS:
            raise ValueError(f"{self.item} {self.quantity}: mark {self.mark!r}, expected one of {', '.join(MARKS)}")
        if not self.value and self.mark in ("text", "computed"):
            raise ValueError(f"{self.item} {self.quantity}: a number from {self.mark} without a value")


def read(path: Path) -> list[Published]:
    """Every line of the file; raises `ValueError` for an unknown column or mark."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(COLUMNS)}")
        return [Published(**line) for line in reader]
