"""A finished chain as one run of a page: the results of its stages, what each was given, and what the statement of the chain claims.

Metrics are named `<stage>/heldout/<metric>`, `<stage>/test/<metric>` and `<stage>/baseline/<name>`. Of a stage with a sweep these are those
of the chosen point, and each point has its own under `<stage> (<point>)`. `<stage>/before` is the task's metric of the weights that the
stage began with, if the stage before it has the same task.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.data import manifests
from dpx.declaration import require
from dpx.files import results
from dpx.files.results import interval, read_results
from dpx.files.run_folder import Status
from dpx.pages.run_rows import Run
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement, chain_seal
from dpx.statement.chain_seal import ChainClaim, StageFacts

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
    plain = _plain(folder)
    trained = [(one, Finished(folder.parent / one.folder)) for one in stated.stages if one.job == "train"]
    finals: dict[str, float] = {}
    facts = {"kind": KIND, "sealed": "yes" if checked_by == "ledger" else "no"} | _of_claim(stated.claim)
    for one, stage in trained:
        start = _start(one, stage, trained)
        finals |= {f"{_label(one)}/{key}": value for key, value in stage.finals(start).items()}
        facts |= {f"{_label(one)}/{key}": value for key, value in _of_stage(one, stage, start).items()}
    for name, chosen in _chosen(plain, trained).items():
        own = _label(chosen)
        finals |= {f"{name}/{key.removeprefix(f'{own}/')}": value for key, value in finals.items() if key.startswith(f"{own}/")}
        facts |= {f"{name}/{key.removeprefix(f'{own}/')}": value for key, value in facts.items() if key.startswith(f"{own}/")}
        facts[f"{name}/chosen"] = chosen.point
    facts |= _of_all([stage for _, stage in trained])
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
            if not measured or not (rows := self._rows(place)):
                continue
            found[f"{place}/rows"] = float(rows)
            for name in (name for name in ("macro_f1", "accuracy") if name in measured):
                # Of a macro-F1 it is an approximation: F1 is not a share of rows.
                found |= dict(zip((f"{place}/{name}_low", f"{place}/{name}_high"), interval(measured[name], rows), strict=True))
        return found

    def _rows(self, split: str) -> int:
        """Returns the number of rows that were read, 0 if it is not known."""
        checksum = self.ledger.data[-1]
        kept = None if checksum is None else manifests.manifest(self.folder / "private", checksum)
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


def _plain(folder: Path) -> dict[str, Any]:
    """Returns the config of a chain as it was composed, interpolations included; empty if it was not kept."""
    place = folder / "private" / _CONFIG
    read: Any = OmegaConf.to_container(OmegaConf.load(place), resolve=False) if place.is_file() else {}
    return read


def _start(one: StageFacts, stage: Finished, trained: Sequence[tuple[StageFacts, Finished]]) -> Start | None:
    """Returns the metric of the weights that a stage began with, if the stage before it has the same metric."""
    parent = next((other for fact, other in trained if fact.stage == one.init), None)
    return stage.start() if parent is not None and parent.results.metric == stage.results.metric else None


def _of_stage(one: StageFacts, stage: Finished, start: Start | None) -> dict[str, str]:
    """Returns what a page says of one run of a stage, as text."""
    found = {"metric": stage.results.metric, "guarantee": one.guarantee or "-"}
    found |= {f"epsilon/{name}": json.dumps(value) for name, value in one.epsilon.items() if value is not None}
    found |= {} if one.compared_by is None else {"compared_by": one.compared_by}
    return found if start is None else found | {"before": start[1]}


def _of_claim(claim: ChainClaim) -> dict[str, str]:
    """Returns the claim of the chain as text; epsilon is the largest of its private stages."""
    found = {"guarantee": claim.guarantee}
    if claim.reasons and claim.guarantee != "not_private":
        found["reasons"] = json.dumps(list(claim.reasons))
    bounds = [(name, value) for one in claim.protects for name, value in one.epsilon.items() if value is not None]
    found |= {f"epsilon/{name}": json.dumps(max(own for key, own in bounds if key == name)) for name, _ in bounds}
    protects = [f"the text of {one.stage} ({one.protects}), delta {one.delta:g}" for one in claim.protects]
    return found | ({"protects": json.dumps(protects)} if protects else {})


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


def _of_all(stages: Sequence[Finished]) -> dict[str, str]:
    """Returns facts of all stages together: their commits, the time that they took, and their texts."""
    told = [stage.status for stage in stages]
    commits = list(dict.fromkeys(str(one["commit"]) for one in told if one.get("commit")))
    seconds = sum(float(one.get("seconds", 0)) for one in told)
    corpora = list(dict.fromkeys(stage.corpus() for stage in stages))
    found = {"commit": ", ".join(commits), "seconds": f"{seconds:.1f}", "at": max((str(one.get("at", "")) for one in told), default="")}
    return {key: value for key, value in found.items() if value} | {"corpus": "; ".join(corpora)}
