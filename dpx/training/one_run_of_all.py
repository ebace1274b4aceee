"""Says whether all processes of a job run the same run: each computes one checksum of what it found or was told, and all compare it.

They do so twice, before the state of the run is made and before its first step; the second checksum covers the first. Starts no jax.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from dpx.claim.calibration import Calibrated
from dpx.declaration import ConfigError
from dpx.files.weights import FROZEN
from dpx.processes.mesh import Mesh
from dpx.processes.team import Team

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
