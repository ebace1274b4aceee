"""Runs a process of a job that is not process 0: it does what process 0 tells, on its own devices and its own share of the rows.

It reads the config that process 0 sends, and holds neither ledger nor statement. It draws rows and noise only for a step that process 0
has charged, and writes only its shards of checkpoints and weights.

All processes run the same run: each computes one checksum of what it found or was told, and all compare it. They do so twice, before the
state of the run is made and before its first step; the second checksum covers the first. Nothing here starts jax when it is imported.
"""

import contextlib
import dataclasses
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.calibration import Calibrated
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError, require
from dpx.files.run_folder import RunFolder
from dpx.files.weights import FROZEN
from dpx.processes import supervisor
from dpx.processes.mesh import Mesh, simulate_devices
from dpx.processes.team import Team
from dpx.randomness import RootSecret

# The reason for which a process is refused, and the fix.
OPENED = (
    "opened another run than process 0: its version of dpx or of a library, its data or its settings differ",
    "Give every process the same environment, folder and command",
)
STARTED = (
    "starts otherwise than process 0: its first step, noise epoch, frozen parameters or canaries differ",
    "Share one disk among all processes",
)


def opened(claim: str, facts: dict[str, Any], data_checksum: str) -> str:
    """Returns one checksum of what the processes of a run must agree on before they make its state.

    It covers `claim` (the checksum of the declaration), versions, code, data, and the `facts` that process 0 told (`facts_of_run`).
    """
    from dpx.training.fingerprint import code_checksum, versions

    return _digest([claim, versions(), code_checksum(set()), data_checksum, facts])


def started(opened: str, first_step: int, noise_epoch: int, tag: str, private: Path) -> str:
    """Returns one checksum of what the processes of a run must agree on before its first step.

    It covers the checksum of what was `opened`, the first step, the noise epoch with the tag of its secret, and the checksums of frozen
    parameters and of an audit's canaries, which `private` holds.
    """
    from dpx.audit.canaries import COINS
    from dpx.files.weights import facts_beside

    # Frozen parameters were compared with these checksums when they were read.
    frozen = facts_beside(private / FROZEN).get("weights")
    canaries = hashlib.sha256((private / COINS).read_bytes()).hexdigest() if (private / COINS).is_file() else None
    return _digest([opened, first_step, noise_epoch, tag, frozen, canaries])


def agree_on_opened(team: Team, claim: str, facts: dict[str, Any], data_checksum: str) -> str:
    """Returns what is `opened`, empty in a job of one process. Raises `ConfigError`, in process 0, unless all processes open the same."""
    own = "" if team.is_alone else opened(claim, facts, data_checksum)
    require_agreement(team, own, OPENED)
    return own


def agree_on_start(team: Team, opened: str, first_step: int, noise_epoch: int, tag: str, private: Path) -> None:
    """Raises `ConfigError`, in process 0, unless all processes of the job start the run that was `opened` in the same way (`started`)."""
    if not team.is_alone:
        team.tell("start", epoch=noise_epoch, tag=tag)
        require_agreement(team, started(opened, first_step, noise_epoch, tag, private), STARTED)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def facts_of_run(mesh: Mesh, calibrated: Calibrated, microbatch: int, strategy: Any) -> dict[str, Any]:
    """Returns what process 0 tells the others when it opens a run."""
    return {
        "calibrated": dataclasses.asdict(calibrated) | {"stages": [], "batch_stages": []},
        "microbatch": microbatch,
        "mesh": [mesh.data, mesh.fsdp, mesh.tensor],
        "strategy": None if strategy is None else np.asarray(strategy, np.float32).tolist(),
    }


def require_agreement(team: Team, own: str, otherwise: tuple[str, str]) -> None:
    """Raises `ConfigError`, with the reason and the fix of `otherwise`, unless every process has the same checksum as its `own`."""
    found = team.gather(own)
    others = [index for index, value in enumerate(found) if value != found[0]]
    if others:
        raise ConfigError(f"process {others[0]}", *otherwise)


# What a process obeys between "begin" and "close", and nothing else (`dpx/docs/processes.md` says what each does).
COMMANDS = (
    *("open", "plant", "init", "load", "start", "step", "new_noise_epoch", "evaluate", "save", "wait"),
    *("write_frozen", "place_frozen", "read", "gather", "gather_whole", "export"),
)


def follow(team: Team) -> int:
    """Does what process 0 tells until it ends; returns the exit code that it told."""
    run: _Followed | None = None
    while True:
        command = team.hear()
        if command.name == "end":
            if run is not None:
                run.close()
            return int(command.facts["code"])
        if command.name == "begin":
            run = _Followed(team, **command.facts)
        elif run is not None and command.name == "close":
            run.close()
            run = None
        elif run is not None and command.name in COMMANDS:
            getattr(run, f"_do_{command.name}")(**command.facts)
        else:
            raise ConfigError(
                f"command {command.name}", "is none that a process of a job obeys", "Start the same version of dpx everywhere"
            )


class _Followed:
    """A run that this process takes part in."""

    def __init__(self, team: Team, config_yaml: str, folder: str, fork: str | None):
        from dpx.training.together import connect

        self._team, self._fork, self._folder, self._private = team, fork, Path(folder), RunFolder(Path(folder)).private
        self._experiment = config.build(cast(DictConfig, OmegaConf.create(config_yaml)))[0]
        simulate_devices(self._experiment.mesh, self._experiment.mesh.simulated_here(team.count))
        # jax starts in all processes at once.
        team.require_jax()
        connect(team, self._experiment.mesh.make(), self._experiment.mesh.deadline_s)
        self._checkpoints: dict[str, Any] = {}
        self._state: Any = None
        self._first_step = 0
        self._untrained: Any = None
        self._params: Any = None
        self._secrets: dict[tuple[int, str], RootSecret] = {}
        self._told = contextlib.ExitStack()

    def _do_open(self, **facts: Any) -> None:
        from dpx.audit.canaries import audited
        from dpx.task.objective import objective as make_objective
        from dpx.training.evaluation import BATCH_ROWS, held_out
        from dpx.training.loop import Computation
        from dpx.training.step import make_step

        team, experiment = self._team, self._experiment
        store = prepare(experiment.data, experiment.privacy)
        calibrated = Calibrated(**facts["calibrated"])
        objective = make_objective(experiment.model, experiment.task, experiment.vocabulary_size, store.manifest)
        mesh = experiment.mesh.make()
        step = make_step(
            experiment.one_step, audited(objective, experiment.audit, experiment.clip.clipping_norm), mesh, facts["microbatch"]
        )
        strategy = None if facts["strategy"] is None else np.asarray(facts["strategy"], np.float32)
        self._opened = agree_on_opened(team, experiment.claim_checksum, facts, store.manifest.checksum)
        self._told.enter_context(supervisor.told(team, experiment.mesh.deadline_s, experiment.mesh.restarts))
        self._computation = Computation(experiment=experiment, calibrated=calibrated, store=store, step=step, strategy=strategy)
        of_split = partial(held_out, objective, store, batch_rows=BATCH_ROWS, widths=experiment.widths, mesh=mesh)
        self._heldout, self._make_test = of_split(experiment.schedule.evaluation_rows), partial(of_split, None, split="test")

    def close(self) -> None:
        for checkpoints in self._checkpoints.values():
            checkpoints.close()
        self._checkpoints = {}
        self._told.close()

    def _do_init(self, epoch: int, tag: str, purpose: str, start: Any) -> None:
        from dpx.training import together

        made = together.initial(self._computation.step, self._secret(epoch, tag), purpose, together.zeros(start))
        if purpose == together.UNTRAINED:
            self._untrained = made
        else:
            self._state, self._first_step = made, 0

    def _do_new_noise_epoch(self) -> None:
        self._state = self._state.in_a_new_noise_epoch()

    def _do_write_frozen(self, epoch: int, tag: str, start: Any) -> None:
        from dpx.training import together

        together.write_frozen(self._private, self._computation.step, self._secret(epoch, tag), together.zeros(start))

    def _do_place_frozen(self) -> None:
        from dpx.training import frozen

        placed = frozen.placed(self._private, self._computation.step)
        self._computation = dataclasses.replace(self._computation, frozen=placed)

    def _do_load(self, directory: str, steps_done: int) -> None:
        loaded = self._of(directory).loaded_together(steps_done, self._computation.step.form())
        if loaded is not None:
            self._state, self._first_step = loaded, steps_done

    def _do_plant(self) -> None:
        from dpx.audit.canaries import WithCanaries, plant
        from dpx.config.declared_audit import Canaries

        audit, store = self._experiment.audit, self._computation.store
        assert isinstance(audit, Canaries)
        rows = WithCanaries(store, plant(self._private, audit, store.manifest, None), audit, self._experiment.privacy)
        self._computation = dataclasses.replace(self._computation, store=rows)

    def _do_start(self, epoch: int, tag: str) -> None:
        own = started(self._opened, self._first_step, epoch, self._secret(epoch, tag).tag, self._private)
        require_agreement(self._team, own, STARTED)

    def _do_read(self, directory: str, part: str | None) -> None:
        from dpx.files.orbax_checkpoints import on_host

        on_host(Path(directory), part)

    def _do_save(self, directory: str, steps_done: int, facts: dict[str, Any]) -> None:
        self._of(directory).save(steps_done, self._state, facts)

    def _do_wait(self, directory: str) -> None:
        self._of(directory).wait()

    def _do_step(self, step: int, epoch: int, tag: str, before: str | None) -> None:
        from dpx.training.loop import AnotherSum, computed

        try:
            self._state, _ = computed(self._computation, self._secret(epoch, tag), step, self._state, before)
        except AnotherSum:
            # Process 0 finds the same, and opens a new noise epoch or ends.
            return

    def _do_evaluate(self, which: str, split: str) -> None:
        from dpx.training import together

        state = self._untrained if which == together.UNTRAINED else self._state
        params = together.on_devices(state.params, self._computation.frozen)
        (self._heldout if split == "heldout" else self._make_test())(params)

    def _do_gather_whole(self) -> None:
        from dpx.clipping.readers import merged
        from dpx.training import together

        together.on_hosts(merged(self._state.params, self._computation.frozen))

    def _do_gather(self) -> None:
        from dpx.training import together

        self._params, _ = together.gathered(self._state, self._computation.step, self._private)

    def _do_export(self, directory: str, facts: dict[str, Any]) -> None:
        from dpx.files.orbax_checkpoints import export

        export(self._own(directory), self._params, facts)

    def _own(self, directory: str) -> Path:
        """Returns `directory`, in which this process is to write. Raises `ConfigError` if it is not in the run's folder."""
        path = Path(directory)
        require(
            path.resolve().is_relative_to(self._folder.resolve()), path, f"is not in the run's folder {self._folder}", "Nothing is written"
        )
        return path

    def _of(self, directory: str) -> Any:
        from dpx.files.orbax_checkpoints import Checkpoints

        if directory not in self._checkpoints:
            self._checkpoints[directory] = Checkpoints(self._own(directory), self._experiment.schedule.checkpoints_kept)
        return self._checkpoints[directory]

    def _secret(self, epoch: int, tag: str) -> RootSecret:
        from dpx.training.run_start import path_of_secret, seeded

        if (epoch, tag) not in self._secrets:
            seed = self._experiment.seed
            secret = RootSecret.load(path_of_secret(self._private, epoch)) if seed is None else seeded(seed, self._fork, epoch)
            if secret.tag != tag:
                raise ConfigError(self._private, "holds another root secret than process 0 uses", "Share one disk among all processes")
            self._secrets = {(epoch, tag): secret}
        return self._secrets[(epoch, tag)]
