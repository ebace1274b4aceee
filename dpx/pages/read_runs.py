"""A finished run in its folder, as a row (`dpx.pages.run_rows`). Curves are means over windows of steps: enough to draw and judge.

What is read beside the statement (accuracy, norms, SNR) depends on the protected text without noise.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.results import Results
from dpx.pages import chains
from dpx.pages.run_rows import Run
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import RunStatement

Curves = dict[str, tuple[tuple[int, float], ...]]
WINDOWS = {"train/loss": 40, "grad/snr": 40, "grad/norm": 20, "grad/example_norm": 20, "grad/clipped_fraction": 20, "weights/matrices": 20}
HELDOUT = ("heldout/mlm_accuracy", "heldout/next_token_accuracy", "heldout/accuracy", "heldout/loss")
# What a run is compared by; the rest of a config is the same for all runs of a paper or does not matter to it.
_KNOBS = ("model", "steps", "batch_schedule", "mechanism", "noise", "clip", "clipping_method", "optimizer", "lr_schedule", "privacy")
_KNOBS += (
    "sampler",
    "accountant",
    "task",
    "microbatch",
    "data.name",
    "data.sequence_length",
    "data.pairs",
    "data.vocabulary",
    "data.declared_size",
)


def source(folder: Path) -> Path | None:
    """Returns the file with the tables of an analysis or a benchmark; `None` for a run that trained."""
    return next((path for name in ("release/analysis.json", "private/benchmark.json") if (path := folder / name).exists()), None)


def collect(outputs: Path, match: tuple[str, ...]) -> tuple[list[Run], list[str]]:
    """Returns every finished training run and chain whose folder's name begins with one of `match`, and a line on each that is not
    finished."""
    runs, left_out = [], []
    for folder in sorted(path for path in outputs.glob("*") if path.is_dir() and path.name.startswith(match)):
        try:
            if chains.is_chain(folder):
                runs.append(chains.of_folder(folder))
            elif source(folder) is None:
                runs.append(read(folder))
        # Whatever is wrong with one folder, the others are read.
        except Exception as error:
            reason = error if isinstance(error, ConfigError) else f"not finished, or not readable ({type(error).__name__})"
            left_out.append(f"{folder.name}: {reason}")
    return runs, left_out


def read(folder: Path) -> Run:
    """Returns the run of a folder in which a job trained."""
    run = chains.Finished(folder)
    finals, first = _finals(run.results, run.lines)
    facts = _statement(folder) | {
        key: chains.text(run.status[key]) for key in ("commit", "seconds", "at") if run.status.get(key) is not None
    }
    name, facts["corpus"] = run.plain["name"], run.corpus()
    short, replicate = folder.name.removeprefix(f"{name}-"), int(run.plain["replicate"])
    return Run(name, short, "-", replicate, knobs_of(run.plain), facts, finals, first | _curves(run.lines))


def knobs_of(plain: dict[str, Any]) -> dict[str, str]:
    """Returns the settings by dotted key, as text; `_target_` becomes the group's own value, by its last word."""
    leaves = [(path.removesuffix("._target_"), node) for path, node in chains.flat(plain)]
    compared = [(path, chains.text(node)) for path, node in leaves if any(path == knob or path.startswith(f"{knob}.") for knob in _KNOBS)]
    return {path: text.rpartition(".")[2] if text.startswith("dpx.") else text for path, text in compared}


def _statement(folder: Path) -> dict[str, str]:
    """Returns the guarantee of the run as text."""
    said = read_run_statement(folder / "release" / STATEMENT)
    named: dict[str, Any] = {"guarantee": said.guarantee, "reasons": list(said.reasons) or None}
    named |= {f"epsilon/{accountant}": epsilon for accountant, epsilon in said.epsilon.items()}
    if isinstance(said, RunStatement):
        named |= {"unit": said.unit, "adjacency": said.adjacency, "accountant": said.accountant, "delta": said.delta}
        named |= {"declared_size": said.declared_size, "noise_multiplier": said.mechanism.noise_multiplier}
        named |= {"unsupported": to_json(said.unsupported) or None, "assumptions": list(said.assumptions) or None}
    return {key: chains.text(value) for key, value in named.items() if value is not None}


def _finals(results: Results, lines: list[dict[str, Any]]) -> tuple[dict[str, float], Curves]:
    """Returns the final measurements, which include the norms of all matrices, and the norms at the start."""
    finals = {f"heldout/{name}": value for name, value in results.heldout.items()}
    finals |= {f"baseline/{name}": value for name, value in results.baselines.items()}
    if results.rows:
        finals["heldout/rows"] = results.rows
    finals["train/examples"] = sum(line["train/examples"] for line in lines)
    finals["train/expected_examples"] = sum(line["train/expected_batch_size"] for line in lines)
    # The first steps compile.
    finals["train/examples_per_s"] = statistics.median([line["train/examples_per_s"] for line in lines[2:] or lines])
    matrices = [name for name in lines[-1] if _is_matrix(name)]
    return finals | {name: lines[-1][name] for name in matrices}, {name: ((1, lines[0][name]),) for name in matrices}


def _is_matrix(name: str) -> bool:
    """Norms of kernels and embedding tables: what weight decay acts on."""
    return name.startswith("weights/") and not {"bias", "scale", "output_bias"} & set(name.split("/"))


def _curves(lines: list[dict[str, Any]]) -> Curves:
    for line in lines:
        squares = [value**2 for name, value in line.items() if _is_matrix(name)]
        line |= {"weights/matrices": math.sqrt(sum(squares))} if squares else {}
    curves = {name: [(line["step"], line[name]) for line in lines if name in line] for name in (*HELDOUT, *WINDOWS)}
    return {name: tuple(windowed(curve, WINDOWS.get(name, len(curve)))) for name, curve in curves.items() if curve}


def windowed(curve: Sequence[tuple[int, int | float]], windows: int) -> list[tuple[int, float]]:
    """Returns (last step, mean) of at most `windows` groups of consecutive points, with equally many points in each group but the last."""
    size = math.ceil(len(curve) / windows)
    pieces = [curve[start : start + size] for start in range(0, len(curve), max(1, size))]
    return [(piece[-1][0], statistics.fmean(value for _, value in piece)) for piece in pieces]
