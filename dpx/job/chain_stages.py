"""The runs of a chain: the config of each stage, with what feeds it, and the folder it has whether or not it has run.

A folder's name follows from the stage's config, in which the folder of the stage before is one value. So a changed stage has another
folder, and so has every stage that it feeds: nothing that was made from the older one is used again.
"""

import copy
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx import config
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.config.declared_chain import Chain, Shared, Stage
from dpx.config.experiment import Experiment
from dpx.data.declared_data import RandomRows, Source
from dpx.data.sources import open_source, parts_of
from dpx.declaration import ConfigError, require
from dpx.files.weights import of_another_task, require_shapes
from dpx.init.relation import require_other_text

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
    _require_words_hold(chain, runs)
    meshes = {run.experiment.mesh for each in runs.values() for run in each}
    require(len(meshes) == 1, "chain.stages", "one process can use one mesh only", "Set the mesh in chain.common.options")
    return runs


def _of_stage(chain: Chain, name: str, chain_name: str, replicate: int, outputs: Path, before: Runs) -> Iterator[StageRun]:
    stage = chain.stages[name]
    cfg = _merged(_options(chain.common, stage), chain.common.values, stage.values)
    cfg.name, cfg.replicate = stage.name or f"{chain_name}_{name}", 0 if stage.shared_by_replicates else replicate
    _feed(cfg, chain, name, before)
    for point in itertools.product(*([(key, value) for value in values] for key, values in stage.sweep.items())):
        own = copy.deepcopy(cfg)
        for key, value in point:
            OmegaConf.update(own, key, value, merge=True, force_add=True)
        experiment, job = config.build(own)
        _require_fits(chain, name, experiment, before)
        reason = "a choice among runs on protected text has its own cost, which a chain does not charge"
        value = f"chain.stages.{name}.sweep"
        require(not (stage.sweep and experiment.is_private), value, reason, "Sweep the whole chain with -m, or remove it")
        shown = " ".join(f"{key}={value}" for key, value in point)
        yield StageRun(name, own, experiment, job, outputs / config.run_name(own), shown)


def _options(common: Shared, stage: Stage) -> tuple[str, ...]:
    """Returns the stage's options as a command line has them: `+` before a group that the default config does not choose.

    Null removes one.
    """
    chosen = {**common.options, **stage.options, **({"init": "run"} if stage.init else {}), "job": stage.job}
    known = _default_groups()
    return tuple(f"{'' if group in known else '+'}{group}={option}" for group, option in chosen.items() if option is not None)


@functools.cache
def _default_groups() -> frozenset[str]:
    return frozenset(recipes.compose([], with_hydra=True).hydra.runtime.choices)


@functools.cache
def _composed_once(overrides: tuple[str, ...]) -> DictConfig:
    # A recipe may name a sweeper that is not installed; it plans and runs as one point here.
    return recipes.compose([*overrides, "hydra/sweeper=basic"])


def _merged(options: tuple[str, ...], *values: dict[str, Any]) -> DictConfig:
    cfg = copy.deepcopy(_composed_once(options))
    OmegaConf.set_struct(cfg, False)
    OmegaConf.set_readonly(cfg, False)
    for one in values:
        cfg = OmegaConf.merge(cfg, one)
    assert not isinstance(cfg, ListConfig)
    return cfg


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


def _require_words_hold(chain: Chain, runs: Runs) -> None:
    """Raises `ConfigError` where stages that are declared to share no unit read a whole file in common, and one of them protects it."""
    parts = functools.cache(lambda stage: _parts(runs[stage][0].experiment.data.source))
    for name, other in itertools.combinations(chain.stages, 2):
        protects = any(runs[stage][0].experiment.is_private for stage in (name, other))
        if not protects or not chain.are_disjoint(name, other):
            continue
        public = next((stage for stage in (name, other) if chain.stages[stage].provenance == "public"), None)
        said = public or (name if other in chain.stages[name].disjoint_from else other)
        whose, key = other if said == name else name, "provenance=public" if public else "disjoint_from"
        require_other_text(f"chain.stages.{said}.{key}", parts(name), parts(other), f"the stage {whose}", "Remove it, or name other text")


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


def _require_fits(chain: Chain, name: str, experiment: Experiment, before: Runs) -> None:
    """Raises `ConfigError` where the weights or the vocabulary that feed a stage are of another shape than it reads."""
    stage = chain.stages[name]
    for key, fed in stage.feeds.items():
        theirs, own = before[fed][0].experiment.data.vocabulary, experiment.data.vocabulary
        value = f"chain.stages.{name}.{key}={fed}"
        reason = f"its vocabulary has {theirs.size} word pieces, and this stage declares {own.size}"
        require(theirs.size == own.size or key == "init" and stage.vocabulary is not None, value, reason, "Declare one size for both")
    if stage.init is None:
        return
    parent = before[stage.init][0].experiment
    place = f"chain.stages.{name}.init={stage.init}"
    held = parent.task.parameter_shapes(parent.model, parent.vocabulary_size)
    expected = experiment.task.parameter_shapes(experiment.model, experiment.vocabulary_size)
    if type(parent.task) is type(experiment.task):
        require_shapes(place, expected, {path: (shape, "float32") for path, shape in held.items()})
    else:
        of_another_task(place, expected, held)
