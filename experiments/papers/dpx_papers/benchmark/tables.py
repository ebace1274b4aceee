"""Writes the tables of experiments/benchmarks/README.md (`report.paper=benchmarks`) from the benchmark.json files.

It imports no jax.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.files.run_folder import read_json
from dpx.pages.page_document import grid

BEGIN, END = "<!-- tables: job=report report.paper=benchmarks -->", "<!-- end of tables -->"
PRIVATE = "book_keeping"
# Peers by their names in the summary; Opacus's ghost clipping does not support the tied model and is in the full table only.
RIVALS = {"jax-privacy": ("jax_privacy",), "Opacus": ("opacus_hooks", "opacus_ew")}

Row = dict[str, Any]


def write(home: Path) -> int:
    """Replaces the text between the two marks of README.md, and returns the number of files read.

    Raises `ConfigError` if the marks or the files are missing.
    """
    readme, documents = home / "README.md", measurements(home)
    text = readme.read_text() if readme.is_file() else ""
    require(BEGIN in text and END in text, readme, "has no place for tables", f"Write the lines {BEGIN} and {END} into it")
    require(bool(documents), home, "holds no benchmark.json", "Run job=benchmark with benchmark.output there")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{tables(documents)}\n{END}{after}")
    return len(documents)


def measurements(home: Path) -> list[tuple[str, Row]]:
    """Returns the name and content of every benchmark.json in `home`; those that hold no steps have a `kind`.

    Raises `ConfigError` if one is not JSON.
    """
    # Measurements of other programs, such as compiled_programs.json, are lists.
    paths = [path for path in sorted(home.glob("*.json")) if path.read_text().lstrip()[:1] != "["]
    return [(path.stem, read_json(path)) for path in paths]


def tables(documents: Sequence[tuple[str, Row]]) -> str:
    """Returns the summary, one line for each file and compute type, then the other measurements, then every row of every file, folded."""
    steps = [(stem, document) for stem, document in documents if "kind" not in document]
    columns = ("file", "device", "type", "best batch", "to autodiff", "to plain", "of products", "equal batch, to autodiff")
    columns += (*(f"to {name}" for name in RIVALS), "microbatch=auto", "exact")
    lines = []
    for stem, document in steps:
        types = dict.fromkeys(row["dtype"] for row in document["rows"])
        parts = [(dtype, [row for row in document["rows"] if row["dtype"] == dtype]) for dtype in types]
        lines += [_summary(stem, document, dtype, rows) for dtype, rows in parts if _best(rows, (PRIVATE,))]
    other = [OTHERS[document["kind"]](document) for _, document in documents if "kind" in document]
    return "\n".join([str(grid(columns, lines)), "", *other, *(_folded(stem, document) for stem, document in steps)])


def _summary(stem: str, document: Row, dtype: str, rows: Sequence[Row]) -> list[str]:
    """Returns the lines of one file and type: the private step at its best batch beside every other program at its best."""
    private = _best(rows, (PRIVATE,))
    assert private is not None
    cells = [stem, document.get("device") or "cpu", dtype, str(private["physical_batch"])]
    cells += [_spread(private, "ratio_to_autodiff"), _spread(private, "ratio_to_plain"), _share(private), _equal(rows)]
    return [*cells, *(_against(private, _best(rows, names)) for names in RIVALS.values()), _automatic(rows, private), _exact(private)]


def _share(row: Row) -> str:
    share = row.get("share_of_matrix_rate")
    return "" if share is None else f"{100 * share:.0f} %"


def _automatic(rows: Sequence[Row], best: Row) -> str:
    """Returns the batch that `microbatch=auto` chose, and its speed over that of the best batch measured."""
    picked = [row for row in rows if row.get("is_automatic_batch") and row["clipping"] == PRIVATE]
    return ", ".join(f"{row['physical_batch']}: {row['examples_per_s'] / best['examples_per_s']:.2f}" for row in picked)


def _best(rows: Sequence[Row], names: Sequence[str]) -> Row | None:
    """Returns the fastest exact row of these variants, on the first mesh measured; a wrong sum does not compete."""
    same = [row for row in rows if row["mesh"] == rows[0]["mesh"]]
    ways = [row for row in same if row["clipping"] in names and row.get("is_exact", True) is not False]
    return max(ways, key=lambda row: row["examples_per_s"], default=None)


def _equal(rows: Sequence[Row]) -> str:
    """Returns the speed of private training over autodiff at every physical batch at which both were measured."""
    autodiff = {row["physical_batch"]: row for row in rows if row["clipping"] == "autodiff"}
    private = [row for row in rows if row["clipping"] == PRIVATE and row["physical_batch"] in autodiff]
    pairs = [(row["physical_batch"], row["examples_per_s"] / autodiff[row["physical_batch"]]["examples_per_s"]) for row in private]
    return ", ".join(f"{size}: {ratio:.2f}" for size, ratio in pairs)


def _against(private: Row, rival: Row | None) -> str:
    """Returns the speed over a rival's, both through the baseline that was timed in turn with them."""
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
    columns = ("way", "type", "mesh", "batch", "examples/s", "to autodiff", "to plain", "of products", "FLOPs to plain", "MiB")
    columns += ("collectives", "update ms", "exact")
    rates = [f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in document.get("matrix_rate", {}).items()]
    notes = [f"Plain products: {', '.join(rates)}."] if rates else []
    notes += [
        f"Left out: {row['clipping']}, {row['dtype']}, {row['physical_batch']}: {row['why']}." for row in document.get("left_out", [])
    ]
    body = "\n".join([str(grid(columns, [_cells(row) for row in document["rows"]])), "", *notes])
    return f"<details><summary>{stem}: {conditions}</summary>\n\n{body}\n\n</details>\n"


def _noise(document: Row) -> str:
    rows = [f"{row['generator']} {row['ns']:.3g} ns a draw" for row in document["rows"]]
    return f"Noise on {document['device']}, {document['draws']:,} draws: {', '.join(rows)}.\n"


def _restart(document: Row) -> str:
    said = f"{document['bytes_that_differ']} of {document['bytes']:,} bytes of its weights"
    return f"A run of {document['model']} on {document['device']}, stopped and started again, differs from one that was not in {said}.\n"


OTHERS = {"noise": _noise, "restart": _restart}


def _cells(row: Row) -> list[str]:
    name = row["clipping"] + ("" if row.get("is_tied", True) else " (untied)")
    flops, size, crossing = row["flops_ratio_to_plain"], row["temporary_bytes"], row.get("collectives")
    return [
        *(name, row["dtype"], row["mesh"], str(row["physical_batch"])),
        f"{row['examples_per_s']:.4g}",
        *(_spread(row, "ratio_to_autodiff"), _spread(row, "ratio_to_plain"), _share(row)),
        *("" if flops is None else f"{flops:.3f}", "" if size is None else f"{size / 2**20:.0f}"),
        "" if crossing is None else str(crossing["per_logical_batch"]),
        "" if row.get("update_seconds") is None else f"{1e3 * row['update_seconds']:.3g}",
        _exact(row),
    ]
