"""`report.paper=benchmarks`: the tables of experiments/benchmarks/README.md, from the benchmark.json files beside it. No jax."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import require

BEGIN, END = "<!-- tables: job=report report.paper=benchmarks -->", "<!-- end of tables -->"
PRIVATE = "book_keeping"
# Peers by how the summary names them; Opacus's ghost clipping cannot hold the tied model and stands in the full table alone.
RIVALS = {"jax-privacy": ("jax_privacy",), "Opacus": ("opacus_hooks", "opacus_ew")}

Row = dict[str, Any]


def write(home: Path) -> int:
    """Replaces what stands between the two marks of README.md; the number of files read. Raises `Refused` without marks or files."""
    readme, files = home / "README.md", sorted(home.glob("*.json"))
    text = readme.read_text() if readme.is_file() else ""
    require(BEGIN in text and END in text, readme, "has no place for tables", f"Write the lines {BEGIN} and {END} into it")
    require(bool(files), home, "holds no benchmark.json", "Run job=benchmark with benchmark.output there")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    found = [(path.stem, json.loads(path.read_text())) for path in files]
    readme.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n{END}{after}")
    return len(files)


def tables(found: Sequence[tuple[str, Row]]) -> str:
    """The summary, then every row of every file, folded."""
    columns = ("file", "best batch", "to autodiff", "to plain", "equal batch, to autodiff", *(f"to {name}" for name in RIVALS), "exact")
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [_line(_summary(stem, document)) for stem, document in found if _best(document["rows"], (PRIVATE,))]
    return "\n".join([*lines, "", *(_folded(stem, document) for stem, document in found)])


def _summary(stem: str, document: Row) -> list[str]:
    """One file: the private step at its best beside everyone at theirs."""
    rows = document["rows"]
    private = _best(rows, (PRIVATE,))
    assert private is not None
    cells = [stem, str(private["physical_batch"]), _spread(private, "ratio_to_autodiff"), _spread(private, "ratio_to_plain")]
    return [*cells, _equal(rows), *(_against(private, _best(rows, names)) for names in RIVALS.values()), _exact(private)]


def _best(rows: Sequence[Row], names: Sequence[str]) -> Row | None:
    """The fastest row of these ways that is exact (a wrong sum is no rival), on the first mesh and in the first type measured."""
    same = [row for row in rows if (row["mesh"], row["dtype"]) == (rows[0]["mesh"], rows[0]["dtype"])]
    ways = [row for row in same if row["clipping"] in names and row.get("is_exact", True) is not False]
    return max(ways, key=lambda row: row["examples_per_s"], default=None)


def _equal(rows: Sequence[Row]) -> str:
    """Private over autodiff at every physical batch both were measured at."""
    autodiff = {row["physical_batch"]: row for row in rows if row["clipping"] == "autodiff"}
    private = [row for row in rows if row["clipping"] == PRIVATE and row["physical_batch"] in autodiff]
    pairs = [(row["physical_batch"], row["examples_per_s"] / autodiff[row["physical_batch"]]["examples_per_s"]) for row in private]
    return ", ".join(f"{size}: {ratio:.2f}" for size, ratio in pairs)


def _against(private: Row, rival: Row | None) -> str:
    """Speed over a rival's, both through the baseline timed in turn with them."""
    if rival is None or not rival["ratio_to_autodiff"]:
        return ""
    return f"{private['ratio_to_autodiff'] / rival['ratio_to_autodiff']:.2f} ({rival['clipping']} at {rival['physical_batch']})"


def _exact(row: Row) -> str:
    error = row.get("clipped_sum_error")
    return "" if error is None else f"{'yes' if row['is_exact'] else 'NO'} ({error:.0e})"


def _spread(row: Row, name: str) -> str:
    if row[name] is None:
        return ""
    low, high = row[f"{name}_spread"]
    return f"{row[name]:.2f} [{low:.2f}, {high:.2f}]"


def _folded(stem: str, document: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document.get("versions", {}).items())
    conditions = f"{document['cores']} cores, logical batch {document['logical_batch']}, {document['rounds']} rounds, {versions}"
    columns = ("way", "type", "mesh", "batch", "examples/s", "to autodiff", "to plain", "FLOPs to plain", "MiB", "collectives", "exact")
    lines = [_line(columns), _line(["---"] * len(columns))] + [_line(_cells(row)) for row in document["rows"]]
    return f"<details><summary>{stem}: {conditions}</summary>\n\n" + "\n".join(lines) + "\n\n</details>\n"


def _cells(row: Row) -> list[str]:
    name = row["clipping"] + ("" if row.get("is_tied", True) else " (untied)")
    flops, size, crossing = row["flops_ratio_to_plain"], row["temporary_bytes"], row.get("collectives")
    return [
        *(name, row["dtype"], row["mesh"], str(row["physical_batch"])),
        f"{row['examples_per_s']:.4g}",
        *(_spread(row, "ratio_to_autodiff"), _spread(row, "ratio_to_plain")),
        *("" if flops is None else f"{flops:.3f}", "" if size is None else f"{size / 2**20:.0f}"),
        "" if crossing is None else str(crossing["per_logical_batch"]),
        _exact(row),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
