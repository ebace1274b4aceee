"""A search: the trials that its study counts, whatever their result, and what they are drawn from.

The distribution of the trials is read from a composed config: the sweeper's parameters and the command line.

In dpx's YAML, Hydra's own node asks resolvers of this module for the folder of its files, the storage of a search, and the trials left.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from dpx import config, packages
from dpx.claim.calibration import Entries, calibrate
from dpx.claim.caveats import of_table
from dpx.claim.claim_checks import check_charge, check_start
from dpx.claim.search_record import TrialDistribution, key_of
from dpx.claim.study import Study
from dpx.claim.trial_charges import Search
from dpx.config import build, recipes
from dpx.config.command_line import as_refused
from dpx.config.experiment import Experiment, require_name
from dpx.config.hydra_node import require_no_hydra, require_own_resolvers
from dpx.config.identity import identity
from dpx.console import stage, wide_console
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError, require
from dpx.durable import put_in_place
from dpx.files.run_folder import RunFolder
from dpx.job.train import TRAINING, Train, has_ended
from dpx.launch import sweep_tables
from dpx.launch.point import Point, score_of
from dpx.launch.refused import NothingLeft
from dpx.launch.sweep_tables import Outcome
from dpx.privacy.segments import Segments
from dpx.statement import outside_code

log = logging.getLogger("dpx")

# As in conf/hydra/sweeper/search.yaml: resolving this number first fixes the search.
TRIALS_LEFT = "${trials_left:}"


@contextlib.contextmanager
def trial(point: Point, experiment: Experiment, job: Any) -> Iterator[Experiment]:
    """Counts a trial of a search, whatever its result, and yields what the job is given. Training points of a sweep are trials.

    A run that began as a trial remains one, according to its folder, not the command line.
    """
    path, tune = point.path, experiment.tune
    is_point = tune is not None and point.is_sweep and point.job == "train"
    # An external job may also train; dpx's own plan does not, whatever other points of the command have imported.
    is_plan = type(job).__module__ == "dpx.job.plan" and outside_code.package_of(type(job)) == packages.OWN
    trains = point.job in TRAINING or (not is_plan and bool(outside_code.packages_of(job)))
    study = Study(path.parent, experiment.name) if is_point else Study.of_run(path) if trains else None
    if study is None:
        point.require_no_search(tune, trains)
        yield dataclasses.replace(experiment, tune=None)
        return
    if is_point:
        assert tune is not None
        sweeper = HydraConfig.get().sweeper
        check_charge(sweeper, tune)
        if tune.charge == "repeat_and_select":
            require_settled(sweeper)
        check_start(point.fork, experiment.init, tune)
        # Text that cannot be prepared raises here, before a trial begins.
        prepare(experiment.data, experiment.privacy)
        point.is_trial = True
    else:
        experiment = dataclasses.replace(experiment, tune=study.first_tune(tune))
    search = search_of(experiment)
    study.begin(search, path, point.overrides, composed)
    # The same command draws new trials and does not resume this one.
    point.is_draw = experiment.tune is not None and experiment.tune.charge == "repeat_and_select"
    try:
        yield experiment
    except Exception as error:
        study.end(search, path, "failed", error=str(as_refused(error) or f"{type(error).__name__}: {error}"))
        raise
    study.end(search, path, "finished", score_of(path))


def search_of(experiment: Experiment) -> Search:
    """Returns the search of an experiment that declares one."""
    tune, claim = experiment.tune, experiment.claim
    assert tune is not None

    def planned() -> Segments | None:
        if not claim.is_private:
            return None
        data, privacy = claim.data, claim.privacy
        size = privacy.population(prepare(data, privacy).manifest) if data.declared_size is None else data.declared_size
        calibrated = calibrate(claim, size)
        assert calibrated.noise_multiplier is not None
        return Entries.of(claim).planned(calibrated.batch_stages, calibrated.size, calibrated.noise_multiplier)

    classes = {part.key: part.kind for part in claim.outside}
    return Search(
        tune=tune,
        privacy=claim.privacy,
        accountant=claim.accountant,
        is_private=claim.is_private,
        by=outside_code.packages_of(claim.outside),
        score=claim.task.metric,
        uncovered=tuple(of_table(claim.data)),
        given_protected=claim.given_protected,
        declared=dataclasses.asdict(experiment) | ({"outside_code": classes} if classes else {}),
        planned=planned,
    )


def adopt(point: Point) -> None:
    """Adds a point that was trained separately before to a charged search: it becomes a trial with its result and is charged."""
    experiment, job = build(point.cfg)
    if experiment.tune is None or experiment.tune.charge == "uncharged" or Study(point.path.parent, experiment.name).has(point.path):
        return
    with trial(point, experiment, job):
        pass


def own_place(cfg: DictConfig, path: Path) -> tuple[DictConfig, Path]:
    """Returns the config and folder of one point of a sweep.

    Under `repeat_and_select` a point that is drawn a second time is a second draw of the mechanism, with fresh noise: it runs again, as the
    next replicate. The result of the first is not reused.
    """
    if OmegaConf.select(cfg, "tune.charge") != "repeat_and_select":
        return cfg, path
    while path.exists() and any((path / "private" / name).exists() for name in ("ledger", "trial.json")):
        cfg = cfg.copy()
        OmegaConf.set_readonly(cfg, False)
        cfg.replicate += 1
        path = path.with_name(config.run_name(cfg))
    return cfg, path


class CloseStudy(Callback):
    """Hydra's callback at the end of a search, also if no trial was left: writes its statement and prints a table of all trials.

    Hydra creates it and turns its exceptions into warnings, so errors are added to `failures`, which `dpx.launch.command` reads.
    """

    failures: ClassVar[list[Exception]] = []

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """`config` is the recipe's base point, Hydra's own node included."""
        try:
            experiment, job = build(config)
            if experiment.tune is None or not isinstance(job, Train):
                return
            study = Study(Path(config.hydra.sweep.dir), experiment.name)
            # Optuna writes the best settings and score beside the runs; both depend on held-out rows.
            found = study.outputs / "optimization_results.yaml"
            if found.is_file():
                put_in_place(found, study.private / found.name)
            trials = study.close(search_of(experiment))
            if study.is_empty(experiment.tune):
                stage("the secret number of trials is 0, which tune.shape=.inf allows: nothing is trained and nothing is spent")
            shown = [Outcome(study.outputs / one.folder, one.point, one.state, one.score, one.error) for one in trials]
            sweep_tables.show(shown, wide_console())
            sweep_tables.write_table(shown, wide_console(), study.private / "trials.csv")
        except Exception as error:
            log.exception("the search could not be closed")
            self.failures.append(error)


def declared(root: DictConfig) -> TrialDistribution:
    """Returns the distribution of the trials of the search in `root`, a base config with Hydra's own node.

    As in the sweeper, an override on the command line replaces the parameter with the same key, and a single value removes it from the
    space. Raises `ConfigError` for a setting with an unsupported distribution.
    """
    params = {str(key): str(value) for key, value in (root.hydra.sweeper.get("params") or {}).items()}
    parser = OverridesParser.create()
    space: dict[str, dict[str, Any]] = {}
    for text in [*(f"{key}={value}" for key, value in params.items()), *root.hydra.overrides.task]:
        override = parser.parse_override(str(text))
        space.pop(key_of(str(text)), None)
        if override.is_sweep_override():
            space[key_of(str(text))] = _distribution(override, str(text))
    # The classes that draw, with every setting of the sampler.
    sweeper = root.hydra.sweeper
    node = sweeper.get("sampler") or {}
    settings = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    sampler = {"_target_": str(sweeper.get("_target_")), "sampler": settings}
    return TrialDistribution(sampler=sampler, space=dict(sorted(space.items())), fixed=_fixed(root))


def require_settled(sweeper: Any) -> None:
    """Raises `ConfigError` for a launch that sets its own number of trials.

    Its search space was not compared with that of the first launch, so it could draw from a part of the declared space.
    """
    given = OmegaConf.to_container(sweeper, resolve=False)
    number = given.get("n_trials") if isinstance(given, dict) else None
    require(
        number == TRIALS_LEFT,
        f"hydra.sweeper.n_trials={number}",
        "the number of trials and their search space must be fixed together before the first trial",
        "Remove it; Ctrl-C ends a launch, and the same command resumes it",
    )


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the config of `overrides`, in the form of `TrialDistribution.fixed` (`dpx.claim.search_record.Compose`)."""
    require_no_hydra(overrides)
    require_own_resolvers(overrides)
    return _fixed(recipes.compose(list(overrides)))


def _fixed(cfg: DictConfig) -> dict[str, Any]:
    """Returns the settings that decide a trial's result and score, without the replicate number and the settings of how it is computed."""
    plain = config.resolved(cfg)
    told = {key: value for key, value in identity(plain).items() if key != "replicate"}
    told["schedule"] = {"evaluation_rows": (plain.get("schedule") or {}).get("evaluation_rows")}
    return json.loads(json.dumps(told, default=str))


def _distribution(override: Override, text: str) -> dict[str, Any]:
    value = override.value()
    if isinstance(value, IntervalSweep):
        bounds, numbers = (value.start, value.end), {"step": None, "is_log": "log" in value.tags}
    elif isinstance(value, RangeSweep) and not value.shuffle:
        bounds, numbers = (value.start, value.stop, value.step), {"step": value.step, "is_log": False}
    else:
        try:
            return {"type": "choice", "values": [str(one) for one in override.sweep_iterator(transformer=Transformer.encode)]}
        except Exception as error:
            raise ConfigError(text, "is not a distribution from which a search can draw", "Use interval, range or choice") from error
    kind = "int" if all(isinstance(bound, int) for bound in bounds) else "float"
    return {"type": kind, "low": bounds[0], "high": bounds[1]} | numbers


def hydra_files(root: DictConfig) -> str | None:
    """Returns the folder, below the run's, where Hydra stores the composed config.

    It is `None` for a finished run, which must not change. Hydra resolves it before it writes there, so the private folder is made here.
    Raises `ConfigError` if the run's folder contains a symbolic link.
    """
    place = OmegaConf.select(root, "hydra.runtime.output_dir", throw_on_missing=False)
    if place is None:
        return "private/hydra"
    folder = RunFolder(Path(place))
    folder.require_no_links()
    if _job(root) in TRAINING and has_ended(folder.path):
        return None
    folder.made_private()
    return "private/hydra"


def _job(root: DictConfig) -> str:
    """Returns the job that a config chooses, as the name of its option."""
    return str(OmegaConf.select(root, "hydra.runtime.choices.job", default="train"))


def search_name(root: DictConfig) -> str:
    """Returns the name of the search, which is a part of paths. A recipe may have set it to something else than a name."""
    name = str(root.name)
    require_name(name)
    return name


def search_storage(root: DictConfig) -> str | None:
    """Returns the storage of Optuna's trials; `None` if the trials are not stored.

    They are not stored for independent trials, since settings can be added to a stored study by hand, and for a job that does not train,
    such as a plan, whose result is not useful to Optuna.
    """
    if OmegaConf.select(root, "tune.charge") == "repeat_and_select" or _job(root) != "train":
        return None
    return f"sqlite:///{root.hydra.sweep.dir}/studies/{search_name(root)}/private/optuna.db"


def trials_left(root: DictConfig) -> int:
    """Returns the number of trials that the recipe's study still has to begin: a search launched again continues up to its number, not
    beyond.

    The distribution and the secret number of a `repeat_and_select` are fixed here.
    """
    node = config.resolved(OmegaConf.create({"tune": root.get("tune")}))["tune"]
    require(node is not None, "hydra/sweeper=search", "the config declares no search", "Add tune=search")
    tune = config.make(node, "tune")
    # Checked before the first trial, not at each one.
    check_charge(root.hydra.sweeper, tune)
    if _job(root) != "train":
        return tune.trials
    study = Study(Path(root.hydra.sweep.dir), search_name(root))
    if tune.charge == "repeat_and_select":
        study.settle(tune, declared(root))
    left = study.left(tune)
    if not left:
        raise NothingLeft(root)
    return left
