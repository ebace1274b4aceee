"""`analyses/*.json`: the tables of the latest run of each analysis and each benchmark of a paper. No jax."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dpx.declaration import ConfigError
from dpx.durable import write_durably
from dpx.files.run_folder import read_json
from dpx.pages.analysis_tables import Table
from dpx.pages.read_runs import source
from dpx_papers.report.sizes import PREFIX

# What an analysis was asked for.
_CONFIG = "private/hydra/config.yaml"
Tables = Mapping[str, Table]


def fill(outputs: Path, home: Path, match: tuple[str, ...]) -> list[str]:
    """Copies the tables of every folder below `outputs` whose name begins with one of `match`, the latest last. Returns a line on each
    file that could not be read. A benchmark has one file for each set of models, since a sweep takes them one by one."""
    left_out, folders = [], [folder for folder in outputs.glob("*") if folder.name.startswith(match)]
    for path in sorted(filter(None, map(source, folders)), key=lambda path: path.stat().st_mtime):
        try:
            document = read_json(path)
            tables = document.get("tables") or [{"name": "benchmark", "title": "", "rows": document["rows"], "notes": []}]
            models = sorted({str(row["model"]) for row in document.get("rows", ()) if "model" in row})
            name = PREFIX * _reads_laptop_runs(path.parent.parent) + document["name"]
        except (ConfigError, KeyError) as error:
            left_out.append(str(error) if isinstance(error, ConfigError) else f"{path}: has no {error}")
            continue
        write(home, name, tables, models)
    return left_out


def _reads_laptop_runs(folder: Path) -> bool:
    """Returns whether an analysis under the name of a full-scale recipe read runs of a laptop's recipe, by the name of its runs."""
    path = folder / _CONFIG
    if not path.is_file():
        return False
    found: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    analysis = found.get("analysis") or {}
    return any(str((node or {}).get("match", "")).startswith(PREFIX) for node in (analysis, analysis.get("lab")))


def write(home: Path, name: str, tables: Sequence[Mapping[str, Any]], models: Sequence[str] = ()) -> None:
    """Returns the tables of an experiment, as `Table.as_json` gives them, into the file that `read` reads."""
    (home / "analyses").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": name, "tables": tables}, indent=1)
    write_durably(home / "analyses" / f"{'-'.join([name, *models])}.json", f"{text}\n")


def read(home: Path) -> dict[str, dict[str, Table]]:
    """Tables by experiment and name; tables without rows are left out, files of one experiment are joined."""
    found: dict[str, dict[str, Table]] = {}
    for path in sorted((home / "analyses").glob("*.json")):
        document = read_json(path)
        tables = found.setdefault(document["name"], {})
        for table in document["tables"]:
            earlier = tables[table["name"]].as_json()["rows"] if table["name"] in tables else []
            if rows := [*earlier, *table["rows"]]:
                tables[table["name"]] = Table.from_rows(table["name"], rows, table["title"], table["notes"])
    return found
