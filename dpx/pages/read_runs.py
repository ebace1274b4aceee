"""Reads a finished run or a whole chain from its folder as facts, measurements and curves: what a page shows and a table of runs holds.

What is read beside the statement (accuracy, norms, SNR) depends on the protected text without noise. Curves are means over windows of
steps, enough to draw and judge.

Metrics of a chain are named `<stage>/heldout/<metric>`, `<stage>/test/<metric>` and `<stage>/baseline/<name>`. Of a stage with a sweep
these are those of the chosen point, and each point has its own under `<stage> (<point>)`. `<stage>/before` is the task's metric of the
weights that the stage began with, if the stage before it has the same task.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.data import left_out
from dpx.declaration import ConfigError, require
from dpx.files import results
from dpx.files.records import to_json
from dpx.files.results import interval_of, read_results
from dpx.files.run_folder import Status
from dpx.privacy.declared_privacy import rows_in_words
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement, chain_seal
from dpx.statement.chain_seal import StageFacts
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import RunStatement

FINAL = "final"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run; `run` is its folder's name without the experiment's. `curves[metric]` are (steps done, value) in the order of steps."""

    experiment: str
    run: str
    point: str
    replicate: int
    config: dict[str, str]
    facts: dict[str, str]
    finals: dict[str, float]
    curves: dict[str, tuple[tuple[int, float], ...]]

    @property
    def key(self) -> tuple[str, str]:
        return self.experiment, self.run

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yields (metric, step, value) of every fact, with numbers to seven digits."""
        texts = {"config": self.config, "fact": self.facts}
        yield from ((f"{kind}/{name}", "", value) for kind, named in texts.items() for name, value in named.items())
        yield from ((metric, FINAL, f"{value:.7g}") for metric, value in self.finals.items())
        yield from ((metric, str(step), f"{value:.7g}") for metric, curve in self.curves.items() for step, value in curve)


KIND = "chain"
HELD_OUT = "held-out rows"
_CONFIG = "hydra/config.yaml"
# A metric, and the rows that it was measured on.
Start = tuple[float, str]


def is_chain(folder: Path) -> bool:
    """Returns whether this is the folder of a chain; its stages are runs in other folders."""
    return (folder / "release" / chain_seal.STATEMENT).is_file()


def of_folder(folder: Path) -> Run:
    """Returns a finished chain. Raises `ConfigError` for one that has not finished, and where a statement differs from its seal."""
    found = chain_seal.check(folder)
    assert found is not None
    stated, checked_by = found
    waiting = [_label(one) for one in stated.stages if one.state != "finished"]
    require(not waiting, folder.name, f"its stages {', '.join(waiting)} have not finished", "Run the chain again: it continues")
    # As it was composed, interpolations included; empty if it was not kept.
    place = folder / "private" / _CONFIG
    plain: Any = OmegaConf.to_container(OmegaConf.load(place), resolve=False) if place.is_file() else {}
    trained = [(one, Finished(folder.parent / one.folder)) for one in stated.stages if one.job == "train"]

    claim, finals = stated.claim, dict[str, float]()
    facts = {"kind": KIND, "sealed": "yes" if checked_by == "ledger" else "no", "guarantee": claim.guarantee}
    if claim.reasons and claim.guarantee != "not_private":
        facts["reasons"] = json.dumps(list(claim.reasons))
    # The largest of its private stages.
    bounds = [(name, value) for one in claim.protects for name, value in one.epsilon.items() if value is not None]
    facts |= {f"epsilon/{name}": json.dumps(max(own for key, own in bounds if key == name)) for name, _ in bounds}
    if protects := [f"the text of {one.stage} ({one.protects}), delta {one.delta:g}" for one in claim.protects]:
        facts["protects"] = json.dumps(protects)

    for one, stage in trained:
        # The metric of the weights that a stage began with, if the stage before it has the same metric.
        parent = next((other for fact, other in trained if fact.stage == one.init), None)
        start = stage.start() if parent is not None and parent.results.metric == stage.results.metric else None
        finals |= {f"{_label(one)}/{key}": value for key, value in stage.finals(start).items()}
        told = {"metric": stage.results.metric, "guarantee": one.guarantee or "-"}
        told |= {f"epsilon/{name}": json.dumps(value) for name, value in one.epsilon.items() if value is not None}
        told |= {} if one.compared_by is None else {"compared_by": one.compared_by}
        told |= {} if start is None else {"before": start[1]}
        facts |= {f"{_label(one)}/{key}": value for key, value in told.items()}
    for name, chosen in _chosen(plain, trained).items():
        own = _label(chosen)
        finals |= {f"{name}/{key.removeprefix(f'{own}/')}": value for key, value in finals.items() if key.startswith(f"{own}/")}
        facts |= {f"{name}/{key.removeprefix(f'{own}/')}": value for key, value in facts.items() if key.startswith(f"{own}/")}
        facts[f"{name}/chosen"] = chosen.point

    statuses = [stage.status for _, stage in trained]
    commits = ", ".join(dict.fromkeys(str(one["commit"]) for one in statuses if one.get("commit")))
    seconds, at = sum(float(one.get("seconds", 0)) for one in statuses), max((str(one.get("at", "")) for one in statuses), default="")
    facts |= {key: value for key, value in (("commit", commits), ("seconds", f"{seconds:.1f}"), ("at", at)) if value}
    facts["corpus"] = "; ".join(dict.fromkeys(stage.corpus() for _, stage in trained))
    curves = {
        f"{_label(one)}/heldout/{stage.results.metric}": curve for one, stage in trained if not one.point and (curve := stage.curve())
    }
    return Run(stated.name, folder.name.removeprefix(f"{stated.name}-"), "-", stated.replicate, knobs(plain), facts, finals, curves)


def knobs(plain: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a chain by dotted key, as text, interpolations as they are written; without paths."""
    leaves = [leaf for name in ("point", "chain") for leaf in flat(plain.get(name) or {}, name)]
    return {path: text(node) for path, node in leaves if not path.endswith(("path", "paths"))}


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a config with its dotted key."""
    if not isinstance(node, Mapping):
        yield path, node
        return
    for key, value in node.items():
        yield from flat(value, f"{path}.{key}".lstrip("."))


def text(value: Any) -> str:
    """Returns a value as results.csv holds it."""
    return value if isinstance(value, str) else json.dumps(value)


def is_of_chain(run: Run) -> bool:
    """Returns whether a run of results.csv is a whole chain."""
    return run.facts.get("kind") == KIND


class Finished:
    """What a finished run, alone or as a stage of a chain, left in its folder, checked against its ledger."""

    def __init__(self, folder: Path):
        require(folder.is_dir(), folder, "the folder of a finished stage is missing", "Collect from where the chain ran")
        self.folder, self.results = folder, read_results(folder / "private")
        known = agreement.check(folder)
        require(known is not None, folder.name, "has no ledger to hold its results against", "Collect from where it ran")
        self.ledger = cast(Ledger, known)
        self.plain = cast(dict[str, Any], OmegaConf.to_container(config.read(config.place_of(folder))))
        self.lines = results.read(folder / "private")
        self.status = Status(folder, "train").read()

    def corpus(self) -> str:
        """Returns the names of the files of its text and the checksum of the prepared data."""
        source = self.plain["data"]["source"]
        paths = source.get("paths") or ()
        names = [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]
        names = names or [corpus["name"] for corpus in source.get("corpora", ())] or [self.plain["data"]["name"]]
        checksum = self.ledger.noise_epochs[-1].fingerprint["data"][:12] if self.ledger.noise_epochs else "no checksum"
        return f"{', '.join(names)} ({checksum})"

    def finals(self, start: Start | None) -> dict[str, float]:
        """Returns its measurements, with the number of rows of each split and the interval of each score, which verdicts read."""
        found = {f"baseline/{name}": value for name, value in self.results.baselines.items()}
        found |= {} if start is None else {"before": start[0]}
        for place, measured in (("heldout", self.results.heldout), ("test", self.results.test or {})):
            found |= {f"{place}/{name}": value for name, value in measured.items()}
            rows = self._rows(place)
            if place == "heldout" and {"pearson", "subset_accuracy"} & set(measured):
                # Rows without a target are not judged.
                rows = self.results.rows or 0
            if not measured or not rows:
                continue
            found[f"{place}/rows"] = float(rows)
            for name in (name for name in ("macro_f1", "accuracy", "subset_accuracy", "pearson") if name in measured):
                # Of a macro-F1 it is an approximation: F1 is not a share of rows.
                ends = interval_of(name, measured[name], rows) or (math.nan, math.nan)
                found |= dict(zip((f"{place}/{name}_low", f"{place}/{name}_high"), ends, strict=True))
        return found

    def _rows(self, split: str) -> int:
        """Returns the number of rows that were read, 0 if it is not known."""
        checksum = self.ledger.data[-1]
        kept = None if checksum is None else left_out.manifest(self.folder / "private", checksum)
        there = 0 if kept is None else kept.rows.get(split, 0)
        return min(there, self.plain["schedule"]["evaluation_rows"]) if split == "heldout" else there

    def curve(self) -> tuple[tuple[int, float], ...]:
        metric = f"heldout/{self.results.metric}"
        return tuple((line["step"], line[metric]) for line in self.lines if metric in line)

    def start(self) -> Start | None:
        """Returns the metric of the weights that it began with, and the rows that it was measured on."""
        if (known := self.results.baselines.get("start")) is not None:
            return known, HELD_OUT
        first = self.lines[0].get(f"train/{self.results.metric}") if self.lines and self.lines[0].get("step") == 1 else None
        return None if first is None else (first, "the rows of the first step, before its update")


def _label(one: StageFacts) -> str:
    return f"{one.stage} ({one.point})" if one.point else one.stage


def _chosen(plain: Mapping[str, Any], trained: Sequence[tuple[StageFacts, Finished]]) -> dict[str, StageFacts]:
    """Returns the best point of each stage with a sweep on the rows that its points are compared by, the first of equal ones."""
    stages: Any = (plain.get("chain") or {}).get("stages") or {}
    best: dict[str, tuple[float, StageFacts]] = {}
    for one, stage in trained:
        metric = (stages.get(one.stage) or {}).get("choose_by") or stage.results.metric
        score = stage.results.heldout.get(metric, 0.0)
        if one.point and (one.stage not in best or score > best[one.stage][0]):
            best[one.stage] = (score, one)
    return {name: one for name, (_, one) in best.items()}


WINDOWS = {"train/loss": 40, "grad/snr": 40, "grad/norm": 20, "grad/example_norm": 20, "grad/clipped_fraction": 20, "weights/matrices": 20}
HELDOUT = ("heldout/mlm_accuracy", "heldout/next_token_accuracy", "heldout/accuracy")
HELDOUT += ("heldout/subset_accuracy", "heldout/pearson", "heldout/loss")
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
            if is_chain(folder):
                runs.append(of_folder(folder))
            elif source(folder) is None:
                runs.append(read(folder))
        # Whatever is wrong with one folder, the others are read.
        except Exception as error:
            reason = error if isinstance(error, ConfigError) else f"not finished, or not readable ({type(error).__name__})"
            left_out.append(f"{folder.name}: {reason}")
    return runs, left_out


def read(folder: Path) -> Run:
    """Returns the run of a folder in which a job trained."""
    run = Finished(folder)
    lines, results = run.lines, run.results
    finals = {f"heldout/{name}": value for name, value in results.heldout.items()}
    finals |= {f"baseline/{name}": value for name, value in results.baselines.items()}
    if results.rows:
        finals["heldout/rows"] = results.rows
    finals["train/examples"] = sum(line["train/examples"] for line in lines)
    finals["train/expected_examples"] = sum(line["train/expected_batch_size"] for line in lines)
    # The first steps compile.
    finals["train/examples_per_s"] = statistics.median([line["train/examples_per_s"] for line in lines[2:] or lines])
    matrices = [name for name in lines[-1] if _is_matrix(name)]
    finals |= {name: lines[-1][name] for name in matrices}

    said = read_run_statement(folder / "release" / STATEMENT)
    named: dict[str, Any] = {"guarantee": said.guarantee, "reasons": list(said.reasons) or None}
    named |= {f"epsilon/{accountant}": epsilon for accountant, epsilon in said.epsilon.items()}
    if isinstance(said, RunStatement):
        named |= {"unit": rows_in_words(said.unit, said.rows_per_unit_max), "adjacency": said.adjacency}
        named |= {"accountant": said.accountant, "delta": said.delta}
        named |= {"declared_size": said.declared_size, "noise_multiplier": said.mechanism.noise_multiplier}
        named |= {"unsupported": to_json(said.unsupported) or None, "assumptions": list(said.assumptions) or None}
    named |= {key: run.status.get(key) for key in ("commit", "seconds", "at")}
    # Those of the last steps, where it went on after a change.
    named["device"] = run.ledger.noise_epochs[-1].fingerprint.get("device") if run.ledger.noise_epochs else None
    facts = {key: text(value) for key, value in named.items() if value is not None}
    name, facts["corpus"] = run.plain["name"], run.corpus()

    # The norms of all matrices at the start, and of all of them together in every line.
    curves: dict[str, tuple[tuple[int, float], ...]] = {name: ((1, lines[0][name]),) for name in matrices}
    for line in lines:
        squares = [value**2 for name, value in line.items() if _is_matrix(name)]
        line |= {"weights/matrices": math.sqrt(sum(squares))} if squares else {}
    for metric in (*HELDOUT, *WINDOWS):
        if curve := [(line["step"], line[metric]) for line in lines if metric in line]:
            curves[metric] = tuple(windowed(curve, WINDOWS.get(metric, len(curve))))
    short, replicate = folder.name.removeprefix(f"{name}-"), int(run.plain["replicate"])
    return Run(name, short, "-", replicate, knobs_of(run.plain), facts, finals, curves)


def knobs_of(plain: dict[str, Any]) -> dict[str, str]:
    """Returns the settings by dotted key, as text; `_target_` becomes the group's own value, by its last word."""
    leaves = [(path.removesuffix("._target_"), node) for path, node in flat(plain)]
    compared = [(path, text(node)) for path, node in leaves if any(path == knob or path.startswith(f"{knob}.") for knob in _KNOBS)]
    return {path: text.rpartition(".")[2] if text.startswith("dpx.") else text for path, text in compared}


def _is_matrix(name: str) -> bool:
    """Norms of kernels and embedding tables: what weight decay acts on."""
    return name.startswith("weights/") and not {"bias", "scale", "output_bias"} & set(name.split("/"))


def windowed(curve: Sequence[tuple[int, int | float]], windows: int) -> list[tuple[int, float]]:
    """Returns (last step, mean) of at most `windows` groups of consecutive points, with equally many points in each group but the last."""
    size = math.ceil(len(curve) / windows)
    pieces = [curve[start : start + size] for start in range(0, len(curve), max(1, size))]
    return [(piece[-1][0], statistics.fmean(value for _, value in piece)) for piece in pieces]
