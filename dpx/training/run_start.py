"""Starts a run: fresh, replayed from its last checkpoint, in a new noise epoch, or forked from another run.

A noise epoch is one root secret. A run resumes its newest epoch only from a state that this epoch covers, with the secret that was drawn
for it and an unchanged fingerprint; then the same bits follow. In every other case a new epoch is opened, and its steps are charged in
addition to those already entered. The ledger lists all epochs, so a lost epoch is detected.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpx.audit import canaries
from dpx.claim.calibration import Calibrated, differing
from dpx.claim.caveats import chosen_late
from dpx.claim.spent import require_planned
from dpx.data import left_out
from dpx.declaration import ConfigError, require, several
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.records import from_json, to_json
from dpx.files.run_folder import RunFolder
from dpx.init.start import RANDOM, Start
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch, Plan, StartFacts
from dpx.processes import supervisor
from dpx.randomness import RootSecret
from dpx.statement import agreement
from dpx.training import frozen, together
from dpx.training.fingerprint import differences
from dpx.training.step import Step


@dataclasses.dataclass(frozen=True)
class RunStart:
    """The answer of `start_run`, read once where training begins: the state after `first_step` steps, the noise epoch in which the run
    resumes, the secret of that epoch, and messages for the user."""

    noise_epoch: NoiseEpoch
    first_step: int
    secret: RootSecret
    state: State
    messages: tuple[str, ...]
    # The frozen parameters, placed where microbatches are summed.
    frozen: Any


def allowed(from_step: int) -> None:
    """Allows a user's own command to open a noise epoch from any step on."""


def allowed_again(
    accountant: Accountant, privacy: Privacy, plan: Callable[..., Any], calibrated: Calibrated, entered: Ledger
) -> Callable[[int], None]:
    """Returns the check of a new noise epoch: `allowed`, and for a process that was restarted by another that of the planned epsilon."""
    noise_multiplier = calibrated.noise_multiplier
    if not supervisor.restart() or noise_multiplier is None:
        return allowed
    planned = partial(plan, calibrated.batch_stages, calibrated.size, noise_multiplier, entered.identity)
    return partial(require_planned, accountant, privacy, planned, entered)


@dataclasses.dataclass(frozen=True)
class NoiseEpochs:
    """The noise epochs of one run: what is needed to open a new epoch, and the `plan` that is recorded before the first epoch.

    `allow` raises `ConfigError` where no epoch may be opened from a step on.
    """

    folder: RunFolder
    seed: int | None
    fingerprint: dict[str, Any]
    ledger: Ledger
    plan: Plan = Plan()
    allow: Callable[[int], None] = allowed

    def open(self, from_step: int, start: StartFacts | None, why: str) -> tuple[NoiseEpoch, RootSecret]:
        """Opens a new epoch with a fresh secret; both are durable when this returns. The epoch's number was not used before in this run."""
        self.allow(from_step)
        used = [noise_epoch.number for noise_epoch in self.ledger.noise_epochs]
        used += [int(path.name.rpartition("_")[2]) for path in self.folder.private.glob("root_secret_*")]
        number = max(used, default=-1) + 1
        secret = RootSecret.create(self._path(number)) if self.seed is None else seeded(self.seed, self.folder.fork, number)
        noise_epoch = NoiseEpoch(
            number=number,
            name=secrets.token_hex(8),
            from_step=from_step,
            start=start,
            secret_tag=secret.tag,
            secret_place=self._place(number),
            fingerprint=self.fingerprint,
            why=why,
        )
        self.ledger.open_noise_epoch(noise_epoch)
        return noise_epoch, secret

    def secret_of(self, noise_epoch: NoiseEpoch) -> RootSecret | None:
        """Returns the secret of `noise_epoch`, or `None` if its file holds another one, or is not the file to which it was written."""
        if self.seed is not None:
            secret = seeded(self.seed, self.folder.fork, noise_epoch.number)
        elif self._path(noise_epoch.number).is_file() and self._place(noise_epoch.number) == noise_epoch.secret_place:
            secret = RootSecret.load(self._path(noise_epoch.number))
        else:
            return None
        return secret if secret.tag == noise_epoch.secret_tag else None

    def _path(self, number: int) -> Path:
        return path_of_secret(self.folder.private, number)

    def _place(self, number: int) -> int | None:
        """Returns the file's inode: a moved folder keeps it, a copied one does not."""
        return None if self.seed is not None else self._path(number).stat().st_ino


def path_of_secret(private: Path, number: int) -> Path:
    """Returns the file of the secret of a noise epoch."""
    return private / f"root_secret_{number}"


def seeded(seed: int, fork: str | None, number: int) -> RootSecret:
    """Returns the secret of a noise epoch of a run with a fixed seed."""
    # Epochs and forks of a seeded run add noise to different sums, so they get different keys.
    branch = int.from_bytes(hashlib.blake2b(fork.encode(), digest_size=8).digest()) if fork else 0
    return RootSecret.from_seed(seed + (number << 64) + (branch << 128))


def facts_of(ledger: Ledger) -> dict[str, Any]:
    """Returns what is saved with a state, as JSON.

    It is the ledger line that the state follows from, and the newest noise epoch, that of its last step.
    """
    return {"ledger": to_json(ledger.mark), "epoch": ledger.noise_epochs[-1].name}


def start_run(noise_epochs: NoiseEpochs, checkpoints: Checkpoints, step: Step, start: Start = RANDOM) -> RunStart:
    """Decides between a new run, a replay, a new noise epoch and a fork; the decision is on disk when it returns.

    A new run begins from `start`.
    """
    folder, ledger = noise_epochs.folder, noise_epochs.ledger
    if not ledger.noise_epochs:
        return _fork(noise_epochs, checkpoints, step, start) if folder.fork else _fresh(noise_epochs, step, start)
    changed = differences(ledger.noise_epochs[-1].fingerprint, noise_epochs.fingerprint)
    require(
        "claim" not in changed,
        folder.path,
        "the config differs from the config that this run began with",
        f"Restore it, or give fork={folder.path.name}@<step> to branch into a new folder",
    )
    saved, damaged = checkpoints.newest_whole(step.form()) if checkpoints.steps else (None, [])
    first_step, facts = (saved.steps_done, from_json(StartFacts, saved.facts, folder.path)) if saved else (0, None)
    why = _why_anew(noise_epochs, changed, first_step, facts)
    # A run that can be repeated from its beginning at no further privacy cost needs no checkpoint.
    require(
        saved is not None or not damaged or (why is None and not folder.fork),
        checkpoints.directory,
        f"every checkpoint is damaged ({several([str(steps_done) for steps_done in damaged])}), and a run from the start is charged again",
        "Restore one of them, or move the folder away to begin again; its steps are then charged in addition",
    )
    if saved is None and folder.fork:
        return _fork(noise_epochs, checkpoints, step, start)
    require(
        saved is not None or start.parameters is not None or not any(origin.is_of_weights for origin in ledger.origins),
        folder.path,
        "its checkpoints are missing, and the weights that it started from were not loaded",
        "Restore them, or move private/checkpoints away to begin again from there",
    )
    note_plan(ledger, noise_epochs.plan)
    moved = {steps_done: checkpoints.set_aside(steps_done) for steps_done in damaged}
    aside = tuple(f"checkpoint {steps_done} is damaged: it was moved to {place.name}" for steps_done, place in moved.items())
    if why is None:
        noise_epoch = ledger.noise_epochs[-1]
        secret = noise_epochs.secret_of(noise_epoch)
        assert secret is not None
        messages = (f"resuming from step {first_step}",)
    else:
        noise_epoch, secret = noise_epochs.open(first_step, facts, why)
        messages = (f"{why}: fresh noise from step {first_step + 1} on, charged in addition to what was spent",)
    state = saved.state if saved else together.init(step, secret, noise_epoch, "init", start.parameters)
    state = together.in_a_new_noise_epoch(state) if first_step == noise_epoch.from_step else state
    # A run that has no checkpoint yet may have ended before anything was written.
    frozen_params = (
        together.place_frozen(folder.private, step)
        if saved
        else together.keep_frozen(folder.private, step, secret, noise_epoch, start.parameters)
    )
    return RunStart(noise_epoch, first_step, secret, state, (*aside, *messages, *start.messages), frozen_params)


def note_plan(ledger: Ledger, plan: Plan, parents: Plan | None = None) -> None:
    """Writes the plan (sampling, noise, number of steps) to the ledger before the first step.

    When a run resumes, it writes the names of the settings that differ from that plan instead. The plan of a fork is compared with its
    `parents` plan in the same way.

    Settings that differ may have been chosen after seeing results, and no composition theorem used here is proved for adaptive choices.
    """
    before = ledger.plan if ledger.plan is not None else parents
    choices = [name for name in differing(before, plan) if name not in ledger.chosen_after_results]
    if choices:
        # Written first, so that a kill between the two writes leaves no plan that was not compared with the parent's plan.
        ledger.note_choices(choices)
    if ledger.plan is None:
        ledger.declare_plan(plan)


def _why_anew(noise_epochs: NoiseEpochs, changed: list[str], first_step: int, start: StartFacts | None) -> str | None:
    """Returns the reason, as text, why the newest epoch cannot resume from this state; `None` if it can."""
    noise_epoch = noise_epochs.ledger.noise_epochs[-1]
    if changed:
        return f"{', '.join(changed)} changed since this run began"
    is_own = start is not None and start.epoch == noise_epoch.name
    if not is_own and (first_step, start) != (noise_epoch.from_step, noise_epoch.start):
        return "the last checkpoint is not one of the newest noise epoch"
    if noise_epochs.secret_of(noise_epoch) is None:
        return "this folder is a copy, or its root secret was lost or changed"
    return None


def _fresh(noise_epochs: NoiseEpochs, step: Step, start: Start) -> RunStart:
    private = noise_epochs.folder.private
    if start.private is not None:
        left_out.inherit(private, start.private)
    note_plan(noise_epochs.ledger, noise_epochs.plan)
    # The privacy cost of the weights is charged before the weights are loaded.
    noise_epochs.ledger.note_origins(start.origins)
    noise_epoch, secret = noise_epochs.open(0, None, "the run begins")
    params = start.parameters
    messages = (*(f"beginning from {origin.label}" for origin in start.origins[:1] if origin.is_of_weights), *start.messages)
    state = together.init(step, secret, noise_epoch, "init", params)
    return RunStart(noise_epoch, 0, secret, state, messages, together.keep_frozen(private, step, secret, noise_epoch, params))


def _fork(noise_epochs: NoiseEpochs, checkpoints: Checkpoints, step: Step, start: Start) -> RunStart:
    """Returns the start of a fork that is new or has lost its own first checkpoint: the parent's state, in both cases with a fresh key."""
    folder, ledger = noise_epochs.folder, noise_epochs.ledger
    assert folder.fork is not None
    if start.private is None or start.step is None:
        raise ConfigError(folder.path, "its checkpoints are missing, and its parent was not read", "Run the same command again")
    # The parent's folder is only read: the parent's process may be writing there.
    parents, form = Checkpoints(start.private / agreement.CHECKPOINTS, kept=1_000_000), step.form()
    require(
        parents.parts(start.step) == set(form.saved()),
        f"fork={folder.fork}",
        "the state in the parent's checkpoint does not fit this config, because its clip or mechanism differs",
        "Fork with the parent's clip and mechanism",
    )
    state = parents.load(start.step, form).state
    left_out.inherit(folder.private, start.private)
    canaries.inherit(folder.private, start.private)
    frozen.inherit(folder.private, start.private, step)
    frozen_params = together.place_frozen(folder.private, step)
    note_plan(ledger, noise_epochs.plan, start.plan)
    # Everything that the parent entered in its ledger is charged before its state is used.
    ledger.note_origins(start.origins)
    noise_epoch, secret = noise_epochs.open(start.step, None, f"forked from {folder.fork}")
    state = together.in_a_new_noise_epoch(state)
    checkpoints.save(start.step, state, facts_of(ledger))
    checkpoints.wait()
    messages = (f"forked at step {start.step} of {folder.fork}: everything its ledger holds is charged here too", *start.messages)
    messages += tuple(f"this fork has no guarantee: {reason}" for reason in chosen_late(ledger))
    return RunStart(noise_epoch, start.step, secret, state, messages, frozen_params)
