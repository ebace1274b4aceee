"""What is there of a chain: which stages have finished, which are stale, and which had finished and are missing."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dpx import config
from dpx.config.declared_chain import Chain
from dpx.config.declared_init import FromRun
from dpx.config.identity import identity
from dpx.data import learnt_from
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError, require
from dpx.durable import make_private, write_durably
from dpx.init.chain_claim import StageRelease
from dpx.init.parent import open_parent
from dpx.init.start import Held
from dpx.job.chain_stages import VOCABULARY, Runs, StageRun
from dpx.job.finished import has_finished
from dpx.job.train import Train
from dpx.statement import agreement, chain_seal, seals
from dpx.statement.chain_seal import STATEMENT, StageFacts
from dpx.statement.statement_records import AnyRun, RunStatement

_FED = ("init.run", "init.disjoint_from", "data.vocabulary.path")


def is_finished(run: StageRun) -> bool:
    """Returns whether the run has come to its end. Preparing text again opens what is there, so it always counts as still to do."""
    # To resolve its config is most of what a plan of a chain costs.
    return _trains(run) and run.folder.is_dir() and has_finished(run.folder, config.resolved(run.cfg))


def _trains(run: StageRun) -> bool:
    return isinstance(run.job, Train)


def statement_of(run: StageRun) -> AnyRun | None:
    """Returns the statement of a run that has written one."""
    file = run.folder / "release" / seals.STATEMENT
    return seals.read_run_statement(file) if file.is_file() else None


def require_nothing_lost(runs: Runs, outputs: Path, name: str) -> None:
    """Raises `ConfigError` for a run whose folder is missing although a statement of this chain says that it had finished."""
    had = {one["folder"]: one for path in sorted(outputs.glob(f"{name}-*/release/{STATEMENT}")) for one in _finished_in(path)}
    for run in _each(runs):
        if run.folder.name in had and not (run.folder / "private").is_dir():
            reason = f"the stage {run.label} had finished, and its folder is missing; to train it again would spend its epsilon twice"
            raise ConfigError(run.folder, reason, "Restore the folder, or add replicate=1 for a second chain with its own cost")


def _finished_in(path: Path) -> list[dict[str, Any]]:
    try:
        return [one for one in json.loads(path.read_text())["stages"] if one["state"] == "finished" and one["job"] == "train"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def require_fed_alike(chain: Chain, run: StageRun, runs: Runs) -> None:
    """Raises `ConfigError` where a finished run started from another run than the one that now lies in the folder of the stage before."""
    parent, stated = chain.stages[run.stage].init, statement_of(run)
    if parent is None or stated is None or not stated.init.origins:
        return
    entered = agreement.check(runs[parent][0].folder)
    began, there = stated.init.origins[0].identity, None if entered is None else entered.identity
    reason = f"is stale: it started from the run {began[:8]} of {parent}, and the folder of {parent} now holds {(there or 'no run')[:8]}"
    require(began == there, run.folder, reason, "Move it away to train it again, or restore the earlier folder")


def stale(run: StageRun, outputs: Path) -> list[str]:
    """Returns the folders of earlier runs of the same stage with the same values, but with other weights or another vocabulary."""
    found = []
    for folder in sorted(outputs.glob(f"{run.experiment.name}-*")):
        place = config.place_of(folder)
        if folder.name == run.folder.name or not place.is_file():
            continue
        if _own_values(OmegaConf.to_container(config.read(place))) == _own_values(config.resolved(run.cfg)):
            found.append(folder.name)
    return found


def _own_values(plain: Any) -> dict[str, Any]:
    kept = OmegaConf.create(identity(plain))
    for key in _FED:
        if OmegaConf.select(kept, key) is not None:
            OmegaConf.update(kept, key, None)
    return OmegaConf.to_container(kept)  # pyright: ignore[reportReturnType]


def facts(chain: Chain, run: StageRun) -> StageFacts:
    """Returns the fields of the statement about one run."""
    stage, is_over = chain.stages[run.stage], is_finished(run) or (chain.stages[run.stage].job == "prepare" and run.folder.is_dir())
    stated = statement_of(run) if is_over else None
    entered = agreement.check(run.folder) if is_over and stage.job == "train" else None
    by_test = run.experiment.data.test_split == "heldout"
    return StageFacts(
        stage=run.stage,
        point=run.point,
        folder=run.folder.name,
        job=stage.job,
        init=stage.init,
        vocabulary=stage.vocabulary or stage.init,
        provenance=stage.provenance,
        disjoint_from=tuple(stage.disjoint_from),
        state="finished" if is_over else "not_run",
        identity=None if entered is None else entered.identity,
        guarantee=None if stated is None else stated.guarantee,
        epsilon={} if stated is None else stated.epsilon,
        compared_by=("the test set itself" if by_test else "held-out rows") if stage.sweep else None,
        statement=chain_seal.checksum_of(run.folder) if stage.job == "train" and is_over else None,
    )


def release_of(run: StageRun) -> StageRelease:
    """Returns what is seen of a finished run, from its ledger."""
    experiment = run.experiment
    if not _trains(run):
        own = Held(experiment.data, experiment.privacy)
        return StageRelease(run.stage, run.label, own, experiment.accountant, False, (), texts_of(run))
    seen, stated = open_parent(FromRun(run=str(run.folder)), run.label), statement_of(run)
    entered, is_private = agreement.check(run.folder), isinstance(stated, RunStatement)
    known = [] if entered is None else [one for one in entered.units if one is not None]
    return StageRelease(
        stage=run.stage,
        label=run.label,
        held=Held(experiment.data, experiment.privacy, seen.origins[0].data),
        accountant=experiment.accountant,
        is_private=is_private,
        origins=seen.origins,
        texts=texts_of(run),
        segments=[] if entered is None or not is_private else entered.segments(),
        units=known[-1] if known and is_private else None,
        reasons=stated.reasons if isinstance(stated, RunStatement) else (),
    )


def texts_of(run: StageRun) -> tuple[str, ...]:
    """Returns the identities of the text of a stage, from which other stages may have their vocabulary: before and after it is kept."""
    kept = run.folder / "private" / VOCABULARY
    return (planned_text(run), *(one.identity for one in (learnt_from.learnt_from(kept) if kept.is_file() else ())))


def planned_text(run: StageRun) -> str:
    """Returns the identity of a stage's text before it is prepared."""
    return f"text of {run.folder.name}"


def keep_vocabulary(run: StageRun, to: Path) -> None:
    """Writes the vocabulary that a stage fitted to `to`, for the stages that it feeds, and what it was learnt from; a file that is there
    stays."""
    if to.is_file() or run.experiment.data.vocabulary.path is not None:
        return
    make_private(to.parent)
    store = prepare(run.experiment.data, run.experiment.privacy)
    learnt_from.write(to, learnt_from.of_store(store.manifest, run.experiment.name))
    write_durably(to, (store.folder / VOCABULARY).read_text(encoding="utf-8"))


def _each(runs: Runs) -> Iterator[StageRun]:
    for each in runs.values():
        yield from each


def not_run(runs: Sequence[StageFacts]) -> list[str]:
    """Returns the labels of the stages that have not run."""
    return [f"{one.stage} ({one.point})" if one.point else one.stage for one in runs if one.state == "not_run"]
