"""Where a run starts: fresh, replayed from its last checkpoint, in a new noise epoch, or forked from another run.

With an unchanged fingerprint the same key is used again and the same bits follow. With a changed one the key must not meet a
different sum, so a new epoch with a fresh key starts at the checkpoint and its steps are charged beside those already entered.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dpx.declaration import Refused, require
from dpx.experiment import Experiment
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret
from dpx.run_folder import RunFolder, write_json
from dpx.training.checkpoint import Checkpoints
from dpx.training.fingerprint import differences
from dpx.training.step import Step


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The state after `first_step` steps, the secret of the noise epoch it goes on in, and what to tell the user."""

    epoch: int
    first_step: int
    secret: RootSecret
    state: Any
    messages: tuple[str, ...]


def _secret(folder: RunFolder, experiment: Experiment, epoch: int) -> RootSecret:
    """The epoch's root secret: read, or drawn and made durable before anybody can use it."""
    if experiment.seed is not None:
        # Epochs and forks of a seeded run meet other sums, so they get other keys.
        fork = int.from_bytes(hashlib.blake2b((folder.fork or "").encode(), digest_size=8).digest()) if folder.fork else 0
        return RootSecret.from_seed(experiment.seed + (epoch << 64) + (fork << 128))
    path = folder.private / f"root_secret_{epoch}"
    return RootSecret.load(path) if path.exists() else RootSecret.create(path)


def begin(
    folder: RunFolder, experiment: Experiment, fingerprint: dict[str, Any], ledger: Ledger, checkpoints: Checkpoints, step: Step
) -> Beginning:
    """Decides between a new run, a replay, a new noise epoch and a fork; durable before it returns."""
    record_path = folder.private / "epochs.json"
    if not record_path.exists():
        return _first(folder, experiment, fingerprint, ledger, checkpoints, step, record_path)
    epochs = json.loads(record_path.read_text())
    changed = differences(epochs[-1]["fingerprint"], fingerprint)
    require(
        "claim" not in changed,
        folder.path,
        "the config differs from the one this run began with",
        f"Restore it, or give fork={folder.path.name}@<step> to branch into a new folder",
    )
    first_step = checkpoints.latest or 0
    messages = (f"going on from step {first_step}",)
    if changed:
        messages = (
            f"{', '.join(changed)} changed since this run began: fresh noise from step {first_step} on, charged beside what was spent",
        )
        epochs.append({"epoch": len(epochs), "from_step": first_step, "fingerprint": fingerprint})
        _secret(folder, experiment, epochs[-1]["epoch"])
        write_json(record_path, epochs)
    secret = _secret(folder, experiment, epochs[-1]["epoch"])
    state = _state(step, secret, checkpoints, first_step)
    if first_step == epochs[-1]["from_step"]:
        state = _without_past_noise(state)
    return Beginning(epochs[-1]["epoch"], first_step, secret, state, messages)


def _first(
    folder: RunFolder,
    experiment: Experiment,
    fingerprint: dict[str, Any],
    ledger: Ledger,
    checkpoints: Checkpoints,
    step: Step,
    record_path: Path,
) -> Beginning:
    secret = _secret(folder, experiment, 0)
    state = _state(step, secret, checkpoints, 0)
    first_step, messages = 0, ()
    if folder.fork:
        first_step, state = _forked(folder.fork, state, ledger)
        state = _without_past_noise(state)
        checkpoints.save(first_step, state)
        checkpoints.wait()
        messages = (f"forked at step {first_step} of {folder.fork}: everything its ledger holds is charged here too",)
    write_json(record_path, [{"epoch": 0, "from_step": first_step, "fingerprint": fingerprint}])
    return Beginning(0, first_step, secret, state, messages)


def _state(step: Step, secret: RootSecret, checkpoints: Checkpoints, first_step: int) -> Any:
    state = step.init(secret.key("init"))
    return checkpoints.load(first_step, state) if first_step else state


def _without_past_noise(state: Any) -> Any:
    """Correlated noise never reaches from one noise epoch into another: under a fresh key it is a mechanism of its own."""
    return state | {"past_noise": jax.tree.map(jnp.zeros_like, state["past_noise"])} if "past_noise" in state else state


def _forked(fork: str, like: Any, ledger: Ledger) -> tuple[int, Any]:
    """Loads `<run folder>@<step>` and takes over the parent's whole ledger, steps after the checkpoint included."""
    run, _, at = fork.rpartition("@")
    require(bool(run) and at.isdigit(), f"fork={fork}", "not of the form <run folder>@<step>", "Write fork=outputs/<run>@<step>")
    parent = RunFolder(Path(run))
    require((parent.private / "ledger").exists(), f"fork={fork}", "no run with a ledger is there", "Name a run folder under outputs/")
    checkpoints = Checkpoints(parent.private / "checkpoints", kept=1_000_000)
    try:
        if int(at) not in checkpoints.steps:
            raise Refused(f"fork={fork}", f"no checkpoint at step {at}", f"Use one of {checkpoints.steps}")
        require(
            checkpoints.parts(int(at)) == set(like),
            f"fork={fork}",
            "the parent's checkpoint holds another state than this config's: its clip or mechanism differs",
            "Fork with the parent's clip and mechanism",
        )
        state = checkpoints.load(int(at), like)
    finally:
        checkpoints.close()
    ledger.inherit(Ledger(parent.private / "ledger"))
    return int(at), state
