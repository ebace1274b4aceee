"""`release/telemetry.jsonl`: the values of each step that the claim pays for, and no others."""

import json
from pathlib import Path
from typing import Any

PREFIX = "released/"


class Released:
    """One JSON line a step with its noise epoch. A replayed step is the same bits and written anew; another epoch's stays, it was seen."""

    def __init__(self, path: Path, epoch: int, first_step: int):
        self._path, self._epoch = path, epoch
        if path.exists():
            records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [record for record in records if (record["epoch"], record["step"]) < (epoch, first_step)]
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Appends what of `metrics` is released; the file appears with the first such value."""
        values = {name.removeprefix(PREFIX): float(value) for name, value in metrics.items() if name.startswith(PREFIX)}
        if values:
            with open(self._path, "a") as file:
                file.write(json.dumps({"epoch": self._epoch, "step": step, **values}) + "\n")
