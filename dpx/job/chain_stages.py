"""The runs of a chain: the config of each stage, with what feeds it, and the folder it has whether or not it has run.

A folder's name follows from the stage's config, in which the folder of the stage before is one value. So a changed stage has another
folder, and so has every stage that it feeds: nothing that was made from the older one is used again.

So it is known of each stage whether it has finished, is stale, or had finished and is missing.
"""

import contextlib
import copy
import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx import config
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.config.declared_chain import Chain
from dpx.config.declared_init import FromRun
from dpx.config.experiment import Experiment
from dpx.config.identity import identity
from dpx.data import learnt_from
from dpx.data.declared_data import RandomRows, Source
from dpx.data.prepare import prepare
from dpx.data.sources import open_source, parts_of
from dpx.declaration import ConfigError, require
from dpx.durable import make_private, write_durably
from dpx.files.weights import of_another_task, require_shapes
from dpx.init.chain_claim import StageRelease
from dpx.init.parent import open_parent
from dpx.init.relation import require_other_text
from dpx.init.start import Held
from dpx.job.train import Train, has_finished
from dpx.statement import agreement, chain_seal, seals
from dpx.statement.chain_seal import STATEMENT, StageFacts
from dpx.statement.statement_records import AnyRun, RunStatement

# Under a stage's private/: the vocabulary that it fitted, for the stages that it feeds.
VOCABULARY = "vocabulary.txt"
_PATH = "data.vocabulary.path"


class StageRun(NamedTuple):
    """One run of a stage: its own config, without the stages around it, and its folder. `point` is its place in the stage's sweep, as
    text."""

    stage: str
    cfg: DictConfig
    experiment: Experiment
    job: Any
    folder: Path
    point: str

    @property
    def label(self) -> str:
        return f"{self.stage} ({self.point})" if self.point else self.stage


Runs = dict[str, list[StageRun]]


def composed(chain: Chain, name: str, replicate: int, outputs: Path) -> Runs:
    """Returns every run of the chain by stage, in the order in which they run; `outputs` is the folder that holds their folders.

    Raises `ConfigError`, naming the stage, for a config that is not valid, and for weights or a vocabulary that do not fit the stage that
    they feed.
    """
    runs: Runs = {}
    for stage in chain.in_order():
        try:
            runs[stage] = list(_of_stage(chain, stage, name, replicate, outputs, runs))
        except Exception as error:
            refused = as_refused(error)
            if refused is None:
                raise
            place = f"chain.stages.{stage}"
            value = refused.value if str(refused.value).startswith(place) else f"{place}: {refused.value}"
            raise ConfigError(value, refused.reason, refused.fix) from error
    # Stages that are declared to share no unit read no whole file in common, if one of them protects it.
    parts = functools.cache(lambda stage: _parts(runs[stage][0].experiment.data.source))
    for one, other in itertools.combinations(chain.stages, 2):
        protects = any(runs[stage][0].experiment.is_private for stage in (one, other))
        if not protects or not chain.are_disjoint(one, other):
            continue
        public = next((stage for stage in (one, other) if chain.stages[stage].provenance == "public"), None)
        said = public or (one if other in chain.stages[one].disjoint_from else other)
        whose, key = other if said == one else one, "provenance=public" if public else "disjoint_from"
        require_other_text(f"chain.stages.{said}.{key}", parts(one), parts(other), f"the stage {whose}", "Remove it, or name other text")
    meshes = {run.experiment.mesh for each in runs.values() for run in each}
    require(len(meshes) == 1, "chain.stages", "one process can use one mesh only", "Set the mesh in chain.common.options")
    return runs


def _of_stage(chain: Chain, name: str, chain_name: str, replicate: int, outputs: Path, before: Runs) -> Iterator[StageRun]:
    stage = chain.stages[name]
    chosen = {**chain.common.options, **stage.options, **({"init": "run"} if stage.init else {}), "job": stage.job}
    # As on a command line: `+` before a group that the default config does not choose; null removes one.
    known = _default_groups()
    cfg = copy.deepcopy(_composed(tuple(f"{'' if key in known else '+'}{key}={one}" for key, one in chosen.items() if one is not None)))
    OmegaConf.set_struct(cfg, False)
    OmegaConf.set_readonly(cfg, False)
    cfg = OmegaConf.merge(cfg, chain.common.values, stage.values)
    assert not isinstance(cfg, ListConfig)
    cfg.name, cfg.replicate = stage.name or f"{chain_name}_{name}", 0 if stage.shared_by_replicates else replicate
    _feed(cfg, chain, name, before)
    for point in itertools.product(*([(key, value) for value in values] for key, values in stage.sweep.items())):
        own = copy.deepcopy(cfg)
        for key, value in point:
            OmegaConf.update(own, key, value, merge=True, force_add=True)
        experiment, job = config.build(own)
        for key, fed in stage.feeds.items():
            theirs, size = before[fed][0].experiment.data.vocabulary.size, experiment.data.vocabulary.size
            reason = f"its vocabulary has {theirs} word pieces, and this stage declares {size}"
            is_met = theirs == size or key == "init" and stage.vocabulary is not None
            require(is_met, f"chain.stages.{name}.{key}={fed}", reason, "Declare one size for both")
        if stage.init is not None:
            parent, place = before[stage.init][0].experiment, f"chain.stages.{name}.init={stage.init}"
            held = parent.task.parameter_shapes(parent.model, parent.vocabulary_size)
            expected = experiment.task.parameter_shapes(experiment.model, experiment.vocabulary_size)
            if type(parent.task) is type(experiment.task):
                require_shapes(place, expected, {path: (shape, "float32") for path, shape in held.items()})
            else:
                of_another_task(place, expected, held)
        reason = "a choice among runs on protected text has its own cost, which a chain does not charge"
        value = f"chain.stages.{name}.sweep"
        require(not (stage.sweep and experiment.is_private), value, reason, "Sweep the whole chain with -m, or remove it")
        shown = " ".join(f"{key}={value}" for key, value in point)
        yield StageRun(name, own, experiment, job, outputs / config.run_name(own), shown)


@functools.cache
def _default_groups() -> frozenset[str]:
    return frozenset(recipes.compose([], with_hydra=True).hydra.runtime.choices)


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    # A recipe may name a sweeper that is not installed; it plans and runs as one point here.
    return recipes.compose([*overrides, "hydra/sweeper=basic"])


def _feed(cfg: DictConfig, chain: Chain, name: str, before: Runs) -> None:
    """Sets what the stages before give: weights, and the vocabulary where the stage does not name a file."""
    stage = chain.stages[name]
    if stage.init is not None:
        cfg.init.run = os.path.relpath(before[stage.init][0].folder)
        apart = [one for one in chain.before(name) if chain.are_disjoint(name, one)]
        named = [before[one][0].experiment.name for one in apart]
        cfg.init.disjoint_from = list(dict.fromkeys([*cfg.init.disjoint_from, *named]))
    source = stage.vocabulary or stage.init
    if source is None or _select(cfg, _PATH) is not None:
        return
    brought = before[source][0].experiment.data.vocabulary
    fitted = fitted_by(chain, source, before)
    if fitted is None:
        cfg.data.vocabulary.path, cfg.data.vocabulary.fit_on = brought.path, brought.fit_on
    else:
        text = before[fitted][0]
        cfg.data.vocabulary.path = os.path.relpath(text.folder / "private" / VOCABULARY)
        if chain.are_disjoint(name, fitted):
            cfg.data.vocabulary.disjoint_from = [text.experiment.name]
        elif text.experiment.data.vocabulary.fit_on == "protected":
            cfg.data.vocabulary.fit_on = "protected"
    if "size" not in (_select(OmegaConf.create(stage.values), "data.vocabulary") or {}):
        cfg.data.vocabulary.size = brought.size


def fitted_by(chain: Chain, name: str, runs: Runs) -> str | None:
    """Returns the stage that fitted the vocabulary of the stage `name`, over any number of stages; `None` if that is from a file."""
    place = runs[name][0].experiment.data.vocabulary.path
    if place is None:
        return name
    fed = chain.stages[name].vocabulary or chain.stages[name].init
    fitted = None if fed is None else fitted_by(chain, fed, runs)
    if fitted is None or Path(place) != Path(os.path.relpath(runs[fitted][0].folder / "private" / VOCABULARY)):
        return None
    return fitted


def _parts(source: Source) -> list[str]:
    """Returns the checksums of the files of a source; none before the files exist."""
    try:
        return [] if isinstance(source, RandomRows) else parts_of(open_source(source))
    except ConfigError:
        return []


def _select(cfg: Any, key: str) -> Any:
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        # A value that refers to one that is missing; building the stage names it.
        return None


_FED = ("init.run", "init.disjoint_from", "data.vocabulary.path")


def is_finished(run: StageRun) -> bool:
    """Returns whether the run has come to its end. Preparing text again opens what is there, so it always counts as still to do."""
    # To resolve its config is most of what a plan of a chain costs.
    return isinstance(run.job, Train) and run.folder.is_dir() and has_finished(run.folder, config.resolved(run.cfg))


def statement_of(run: StageRun) -> AnyRun | None:
    """Returns the statement of a run that has written one."""
    file = run.folder / "release" / seals.STATEMENT
    return seals.read_run_statement(file) if file.is_file() else None


def require_nothing_lost(runs: Runs, outputs: Path, name: str) -> None:
    """Raises `ConfigError` for a run whose folder is missing although a statement of this chain says that it had finished."""
    had = set()
    for path in sorted(outputs.glob(f"{name}-*/release/{STATEMENT}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stages = json.loads(path.read_text())["stages"]
            had |= {one["folder"] for one in stages if one["state"] == "finished" and one["job"] == "train"}
    for run in (run for each in runs.values() for run in each):
        if run.folder.name in had and not (run.folder / "private").is_dir():
            reason = f"the stage {run.label} had finished, and its folder is missing; to train it again would spend its epsilon twice"
            raise ConfigError(run.folder, reason, "Restore the folder, or add replicate=1 for a second chain with its own cost")


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
    if not isinstance(run.job, Train):
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
