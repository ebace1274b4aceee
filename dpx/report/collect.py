"""Finished runs under `outputs/` to rows. Curves are means over windows of steps: enough to draw and judge, small enough to keep.

What is collected beside the statement (accuracy, norms, SNR) depends on the protected text without noise: for public corpora only.
"""

import functools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dpx import config
from dpx.claim import agreement
from dpx.config import recipes
from dpx.declaration import ConfigError, require
from dpx.privacy.ledger import Ledger
from dpx.report.analyses import source
from dpx.report.rows import FINAL, Row

WINDOWS = {"grad/snr": 40, "grad/norm": 20, "grad/example_norm": 20, "grad/clipped_fraction": 20, "weights/matrices": 20}
# What a run is compared by; the rest of a config is the same for all runs of a paper or does not matter to it.
_KNOBS = (
    "model",
    "steps",
    "batch_schedule",
    "mechanism",
    "noise",
    "clip",
    "clipping_method",
    "optimizer",
    "lr_schedule",
    "privacy",
    "sampler",
)
_KNOBS += ("accountant", "task", "microbatch", "data.sequence_length", "data.pairs", "data.vocabulary", "data.declared_size")
# How a run is computed may differ from its recipe; what is computed may not.
_FREE = ("microbatch", "clipping_method")
_SEARCHED = ("optimizer", "lr_schedule", "clip")


def collect(outputs: Path, match: tuple[str, ...]) -> tuple[list[Row], list[str]]:
    """Rows of every finished training run whose folder's name begins with one of `match`, and a line on each that is not finished."""
    rows: list[Row] = []
    left_out = []
    for folder in sorted(path for path in outputs.glob("*") if path.is_dir() and path.name.startswith(match)):
        try:
            rows += _folder(folder) if source(folder) is None else ()
        except ConfigError as error:
            left_out.append(f"{folder.name}: {error}")
        # Whatever is wrong with one folder, the others are read.
        except Exception as error:
            left_out.append(f"{folder.name}: not finished, or not readable ({type(error).__name__})")
    return rows, left_out


def merged(kept: Iterable[Row], fresh: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of both; of a run that both have, the rows of `fresh`. Runs outside their recipe's points are left out, with a line each."""
    runs = {(row.experiment, row.run) for row in fresh}
    rows = [*fresh, *(row for row in kept if (row.experiment, row.run) not in runs)]
    reasons = strays(rows)
    lines = [f"{experiment}-{run}: {reason}" for (experiment, run), reason in sorted(reasons.items())]
    return [row for row in rows if (row.experiment, row.run) not in reasons], lines


def strays(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Why a run is not on the page, by (experiment, run): it is not a point of its current recipe, or its corpus differs from that of
    the recipe's latest run. A recipe does not fix the corpus; runs that are compared share one."""
    knobs: dict[tuple[str, str], dict[str, str]] = {}
    facts: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        kind, _, name = row.metric.partition("/")
        if kind in ("config", "fact"):
            (knobs if kind == "config" else facts).setdefault((row.experiment, row.run), {})[name] = row.value
    wanted = {experiment: _points_of(experiment) for experiment in {experiment for experiment, _ in knobs}}
    reasons = {key: _stray(config, wanted[key[0]]) for key, config in knobs.items()}
    points = [key for key, reason in reasons.items() if not reason]
    corpora = {key: facts.get(key, {}).get("corpus", "unknown") for key in points}
    # Later runs come later here, so that each recipe ends with its latest.
    latest = {key[0]: key for key in sorted(points, key=lambda key: facts.get(key, {}).get("at", ""))}
    wanted_text = {experiment: corpora[key] for experiment, key in latest.items()}
    others = {key: f"trained on {text}, not on {wanted_text[key[0]]}" for key, text in corpora.items() if text != wanted_text[key[0]]}
    return {key: reason for key, reason in (reasons | others).items() if reason}


def _folder(folder: Path) -> list[Row]:
    """Rows of a run that trained."""
    results = json.loads((folder / "private" / "results.json").read_text())
    known = agreement.check(folder)
    require(known is not None, folder.name, "has no ledger to hold its results against", "Collect from where it ran")
    plain = OmegaConf.to_container(config.read(config.place_of(folder)))
    assert isinstance(plain, dict)
    named = {str(key): value for key, value in plain.items()}
    lines = [json.loads(line) for line in (folder / "private" / "metrics.jsonl").read_text().splitlines()]
    name, replicate = named["name"], int(named["replicate"])
    facts = [*_config(named), *_statement(folder), _corpus(known, named), *_finals(results, lines), *_curves(lines)]
    return [Row(name, folder.name.removeprefix(f"{name}-"), replicate, metric, step, value) for metric, step, value in facts]


def _config(plain: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, value in knobs_of(plain).items():
        yield f"config/{key}", "", value


def knobs_of(plain: dict[str, Any]) -> dict[str, str]:
    """Dotted knobs as text; `_target_` becomes the group's own value, by its last word."""
    flat: dict[str, str] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, path if key == "_target_" else f"{path}.{key}".lstrip("."))
        elif any(path == knob or path.startswith(f"{knob}.") for knob in _KNOBS):
            flat[path] = node.rpartition(".")[2] if isinstance(node, str) and node.startswith("dpx.") else _text(node)

    walk(plain, "")
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _statement(folder: Path) -> Iterator[tuple[str, str, str]]:
    """What the run guarantees, as its statement words it."""
    claim = json.loads((folder / "release" / "privacy.json").read_text())
    for key in ("guarantee", "unit", "adjacency", "accountant", "delta", "declared_size"):
        if claim.get(key) is not None:
            yield f"fact/{key}", "", _text(claim[key])
    for accountant, epsilon in claim.get("epsilon", {}).items():
        yield f"fact/epsilon/{accountant}", "", _text(epsilon)
    for key in ("reasons", "unsupported", "assumptions"):
        if claim.get(key):
            yield f"fact/{key}", "", json.dumps(claim[key])
    if "mechanism" in claim:
        yield "fact/noise_multiplier", "", _text(claim["mechanism"]["noise_multiplier"])
    for key, value in _status(folder).items():
        yield f"fact/{key}", "", _text(value)


def _corpus(known: Ledger | None, plain: dict[str, Any]) -> tuple[str, str, str]:
    """The corpus of a run: the names of its files and the checksum of the prepared data."""
    source = plain["data"]["source"]
    paths = source.get("paths") or ()
    names = [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)] or [
        corpus["name"] for corpus in source.get("corpora", ())
    ]
    checksum = known.noise_epochs[-1].fingerprint["data"][:12] if known and known.noise_epochs else "no checksum"
    return "fact/corpus", "", f"{', '.join(names) or plain['data']['name']} ({checksum})"


def _status(folder: Path) -> dict[str, Any]:
    try:
        entry = json.loads((folder / "private" / "status.json").read_text())["train"]
    except (OSError, ValueError, KeyError):
        return {}
    return {key: entry[key] for key in ("commit", "seconds", "at") if entry.get(key) is not None}


def _finals(results: dict[str, Any], lines: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    measured = {f"heldout/{name}": value for name, value in results["heldout"].items()}
    measured |= {f"baseline/{name}": value for name, value in results["baselines"].items()}
    measured["train/examples"] = sum(line["train/examples"] for line in lines)
    measured["train/expected_examples"] = sum(line["train/expected_batch_size"] for line in lines)
    # The first steps compile.
    measured["train/examples_per_s"] = statistics.median([line["train/examples_per_s"] for line in lines[2:] or lines])
    for name, value in measured.items():
        yield name, FINAL, _number(value)
    for name in lines[-1]:
        if name.startswith("weights/") and _is_matrix(name):
            yield name, "1", _number(lines[0][name])
            yield name, FINAL, _number(lines[-1][name])


def _is_matrix(name: str) -> bool:
    """Kernels and embedding tables: what weight decay acts on."""
    return not any(part in ("bias", "scale", "output_bias") for part in name.split("/"))


def _curves(lines: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        squares = [value**2 for name, value in line.items() if name.startswith("weights/") and _is_matrix(name)]
        if squares:
            line["weights/matrices"] = math.sqrt(sum(squares))
        for name in ("heldout/mlm_accuracy", "heldout/loss"):
            if name in line:
                yield name, str(line["step"] + 1), _number(line[name])
    for name, windows in WINDOWS.items():
        known = [line for line in lines if name in line]
        for last, mean in windowed([(line["step"] + 1, line[name]) for line in known], windows):
            yield name, str(last), _number(mean)


def windowed(curve: Sequence[tuple[int, int | float]], windows: int) -> list[tuple[int, float]]:
    """(last step, mean) of each of at most `windows` runs of consecutive points, equally many in each but the last."""
    if not curve:
        return []
    size = math.ceil(len(curve) / windows)
    pieces = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(piece[-1][0], statistics.fmean(value for _, value in piece)) for piece in pieces]


def _number(value: int | float) -> str:
    return f"{value:.7g}"


@functools.cache
def _points_of(name: str) -> list[dict[str, str]]:
    """Knobs of every point of the current recipe; empty if the recipe does not exist."""
    recipe = name.replace("laptop_", "laptop/", 1)
    if recipe not in recipes.names():
        return []
    plain = ["hydra/sweeper=basic", "job=plan"]
    configs = [config.resolved(recipes.compose([f"+experiment={recipe}", *plain, *point])) for point in recipes.points(recipe)]
    searched = any("interval" in str(value) for value in _sweep(recipe).values())
    kept = [knobs_of(config.identity(one)) for one in configs]
    return [{key: value for key, value in one.items() if not (searched and key.startswith(_SEARCHED))} for one in kept]


def _sweep(recipe: str) -> dict[str, Any]:
    cfg = recipes.compose([f"+experiment={recipe}", "hydra/sweeper=basic"], with_hydra=True)
    return dict(cfg.hydra.sweeper.params or {})


def _stray(knobs: dict[str, str], wanted: list[dict[str, str]]) -> str | None:
    """Why the run is not a point of its current recipe, or `None`. A key that only one of the two has does not count."""
    if not wanted:
        return "no recipe of that name"
    differences = []
    for point in wanted:
        shared = [key for key in point if key in knobs and not key.startswith(_FREE)]
        differences.append([f"{key}={knobs[key]}, not {point[key]}" for key in shared if knobs[key] != point[key]])
    fewest = min(differences, key=len)
    return f"not a point of its recipe: {'; '.join(fewest)}" if fewest else None
