"""Ledgers as they were before there were chains."""

import json
from pathlib import Path


def unchain(path: Path) -> None:
    """Writes the chained ledger at `path` as format 1: bare lines, events without noise epochs' names, and nothing but releases."""
    first, *lines = [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()]
    kept = [line for line in lines if isinstance(line, int) or "origin" in line]
    kept = [line if isinstance(line, int) else {name: value for name, value in line.items() if name != "epoch_name"} for line in kept]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"ledger": first["chain"], "format": 1}, *kept]))
