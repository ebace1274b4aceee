"""Defines the root declaration: one frozen record of all settings of a run. It imports no jax."""

import dataclasses
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from dpx.clipping import ClippingMethod
from dpx.config.callback import Callback
from dpx.config.declared_audit import Audit, Canaries, NoCanaries
from dpx.config.declared_init import Init, MeasuredTable, RandomStart
from dpx.config.declared_loggers import DEFAULT, Loggers
from dpx.config.declared_tuning import Tune
from dpx.config.experiment_parts import Claim, Fitted, OneStep, Receiver
from dpx.data.declared_data import Data
from dpx.data.length_buckets import LengthBuckets, widths_of
from dpx.declaration import declaration, identifying_values, require
from dpx.mechanism.clip import Clip
from dpx.mechanism.declared_mechanism import Noise, NoiseBatchRatio
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism
from dpx.mechanism.telemetry import SecretTelemetry, Telemetry
from dpx.models.model_protocol import COMPUTATION
from dpx.models.shape import AnyModel
from dpx.models.trained import Everything, Trained
from dpx.optimizer import Optimizer
from dpx.optimizer.lr_schedule import LrSchedule
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.processes.mesh import Mesh
from dpx.sampler import Sampler
from dpx.sampler.batch_schedule import BatchSchedule, Constant
from dpx.statement import outside_code
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import Task

# Reporting and evaluation do not reach the parameters; the rest of the declaration does.
_WITHOUT_EFFECT = ("schedule", "name", "tune", "profile", "logger", "callbacks", "tags", "notes")
# These settings change how bits are computed, never the privacy statement.
_COMPUTATION = ("mesh", "clipping_method", "microbatch", "length_buckets")


@declaration
class StepProfile:
    """Sets which measurements of time a run makes; the parameters and the claim are the same with and without them.

    Both are private, because time depends on the data.

    Attributes:
        shares: Whether every line of metrics says which share of the time went where.
        trace_steps: Steps, numbered as in metrics.jsonl, of which jax.profiler writes a trace; neighbours share one.
    """

    shares: bool = False
    trace_steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        for step in self.trace_steps:
            require(step >= 1, f"profile.trace_steps=[{step}]", "steps are numbered from 1", "Use 1 or more")

    @property
    def is_on(self) -> bool:
        return self.shares or bool(self.trace_steps)

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` for a step that the run, which has `steps` steps, never reaches."""
        for step in self.trace_steps:
            require(step <= steps, f"profile.trace_steps=[{step}]", f"the run has {steps} steps", f"Use {steps} or less")


@declaration
class Schedule:
    """Sets how often a run evaluates and saves. None of these settings affects the claim.

    Attributes:
        evaluate_every: Steps between two evaluations.
        evaluation_rows: Held-out rows of an evaluation.
        checkpoint_every: Steps between two checkpoints.
        checkpoints_kept: How many of the newest checkpoints are kept.
        stop_after_evaluations_without_gain: Number of evaluations in a row without a new best held-out metric, after which a run without
            noise ends; it keeps the weights of the best evaluation. None runs all steps.
        gain_in: The held-out metric that is compared; None is the task's own.
        stop_at_non_finite: Whether a run without noise stops at the first step with an example whose gradient is not finite.
    """

    evaluate_every: int = 100
    evaluation_rows: int = 10_000
    checkpoint_every: int = 100
    checkpoints_kept: int = 3
    stop_after_evaluations_without_gain: int | None = None
    gain_in: str | None = None
    stop_at_non_finite: bool = False

    def __post_init__(self) -> None:
        counts = ("evaluate_every", "evaluation_rows", "checkpoint_every", "checkpoints_kept", "stop_after_evaluations_without_gain")
        for name in counts:
            value = getattr(self, name)
            require(value is None or value > 0, f"schedule.{name}={value}", "must be at least 1", "Give a positive number")


@declaration
class Experiment:
    """Declares the model, the data, the training and the privacy of one run. Imports no jax.

    Attributes:
        name: First part of the name of the run's folder.
        steps: Updates of the parameters.
        model: The network and its size.
        task: What the network learns to predict.
        data: The text or the rows, their splits and their vocabulary.
        privacy: What one unit is, how neighbours differ, and delta.
        sampler: How the units of a step are drawn.
        batch_schedule: Expected batch size of each step.
        mechanism: Where the noise is added, and what that protects.
        clip: How one example's contribution is limited.
        noise: How much noise is added: given, or solved for a target.
        clipping_method: How clipped sums are computed; all methods give the same sums.
        accountant: How epsilon is computed from what ran.
        optimizer: How a noisy gradient updates the parameters.
        lr_schedule: Learning rate of each step.
        mesh: The devices of the run.
        schedule: How often a run evaluates and saves.
        microbatch: Examples that a device holds at once; the result does not depend on it. auto measures what fits.
        telemetry: Whether measurements of training are released with noise, or stay private.
        train: Which parameters are trained.
        init: Where the initial weights come from.
        replicate: Numbers a repetition of the same config, which has its own randomness and its own folder.
        seed: Fixes all randomness, for tests; a run with a seed has no guarantee.
        audit: An attack with canaries inside the run.
        tune: A search over settings and how the choice among its trials is charged.
        length_buckets: Shorter lengths to which texts are padded if they fit: a list, auto (powers of two from 16), or null.
        profile: Which times of a step are measured.
        logger: Where measurements are written: files of this machine, or services, which get what the statement covers.
        callbacks: What packages do when the run starts, evaluates, saves and ends, by names of your choice.
        tags: Words by which services of measurements group runs; they are released with the config.
        notes: A remark on the run; it is released with the config.
    """

    name: str
    steps: int
    model: AnyModel
    task: Task
    data: Data
    privacy: Privacy
    sampler: Sampler
    batch_schedule: BatchSchedule
    mechanism: Mechanism
    clip: Clip
    noise: Noise
    clipping_method: ClippingMethod
    accountant: Accountant
    optimizer: Optimizer
    lr_schedule: LrSchedule
    mesh: Mesh
    schedule: Schedule
    microbatch: int | Literal["auto"]
    telemetry: Telemetry = SecretTelemetry()
    train: Trained = Everything()
    init: Init = RandomStart()
    chosen_by: MeasuredTable | None = None
    replicate: int = 0
    seed: int | None = None
    audit: Audit = NoCanaries()
    tune: Tune | None = None
    length_buckets: LengthBuckets = None
    profile: StepProfile = StepProfile()
    logger: Loggers = DEFAULT
    callbacks: dict[str, Callback] = dataclasses.field(default_factory=dict)
    tags: Sequence[str] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        """Tries all checks of the root record, in this order; those of its claim are in `dpx.claim.claim_checks.check_claim`."""
        self._require_numbers()
        self.data.require_fits(self.privacy)
        self._require_copies_charged()
        self._require_audit_fits()
        self._require_model_fits()
        self.task.require_fits(self.model, self.data)
        self.train.require_fits(self.model)
        self.mechanism.require_fits(self.model, self.task, self.train)
        widths_of(self.length_buckets, self.data.sequence_length)
        self.profile.require_fits(self.steps)
        self._require_batches_fit()
        self._require_telemetry_fits()
        self._require_end_fits()
        self._require_secret_trials_fit()
        for key in self.privacy.assumed:
            require(_has(self, key), f"privacy.assumed={key}", "no such key", "Name keys of the config, such as data.declared_size")

    def require_new(self) -> None:
        """Raises `ConfigError` for what only a new run must not be: jobs on an existing run accept any config that it had.

        It may import jax.
        """
        self.lr_schedule.require_fits(self.steps)
        self.optimizer.require_usable()
        self.logger.require_usable()

    def _require_copies_charged(self) -> None:
        """A protected unit is something that the source holds: copies of its text that dpx makes are rows of one unit."""
        data, privacy, copies = self.data, self.privacy, self.data.copies
        name, usual, text = ("repeats", 1, "row") if data.cuts is None else ("cuts", "null", "document")
        is_of_several = data.pairs == "cross_document"
        most = copies if data.cuts or is_of_several else "<the most rows of a document>"
        require(
            not self.is_private or copies == 1 or privacy.unit != "row" or (is_of_several and privacy.rows_per_unit_max == copies),
            f"data.{name}={copies} with privacy.unit=row",
            f"the text of each {text} is in {copies} rows, and epsilon of one row would not protect it",
            f"Use {'' if is_of_several else 'privacy.unit=document with '}privacy.rows_per_unit_max={most}, or data.{name}={usual}",
        )

    def _require_numbers(self) -> None:
        require(self.steps > 0, f"steps={self.steps}", "a run needs at least one step", "Use 1 or more")
        require_name(self.name)
        require(self.seed is None or self.seed >= 0, f"seed={self.seed}", "a seed is not negative", "Use 0 or more, or null")
        require(self.replicate >= 0, f"replicate={self.replicate}", "repeats are numbered from 0", "Use 0 or more")
        require(
            self.microbatch == "auto" or self.microbatch > 0,
            f"microbatch={self.microbatch}",
            "a microbatch has at least one example",
            "Use 1 or more, or auto",
        )

    def _require_batches_fit(self) -> None:
        require(
            not (isinstance(self.noise, NoiseBatchRatio) and not isinstance(self.batch_schedule, Constant)),
            "noise=noise_batch_ratio",
            "the ratio is noise over one batch size, but the batch size varies",
            "Use batch_schedule=constant or noise=multiplier",
        )
        require(
            self.privacy.unit_mode != "one_row" or isinstance(self.batch_schedule, Constant),
            "privacy.unit_mode=one_row",
            "the row of a unit depends on the epoch, and epochs have a length only at one batch size",
            "Use batch_schedule=constant or privacy.unit_mode=sample_units",
        )

    def _require_audit_fits(self) -> None:
        if not isinstance(self.audit, Canaries):
            return
        require(
            self.is_private,
            "audit=canaries with mechanism=none",
            "a run without noise makes no claim, so an audit has nothing to test",
            "Use audit=none",
        )
        require(
            self.privacy.adjacency != "replace_one",
            f"audit=canaries with privacy.adjacency={self.privacy.adjacency}",
            "a canary that is left out contributes zero, so it does not replace another unit",
            "Use privacy.adjacency=zero_out, or audit=none",
        )
        for is_met, value in (
            (self.mechanism.is_independent_gaussian, f"mechanism={self.mechanism.name}"),
            (not self.clip.is_adaptive, f"clip={self.clip.kind}"),
        ):
            require(
                is_met,
                f"audit=canaries, {value}",
                "scores of canaries are defined only for independent noise and one clipping norm",
                "Use audit=none",
            )
        value = f"audit.sequences={self.audit.sequences} with task={self.task.name}"
        is_met = not self.audit.sequences or not isinstance(self.task, Regression | MultiLabel)
        require(is_met, value, "a canary of text would have no target", "Use audit.sequences=0, which plants gradients alone")

    def _require_model_fits(self) -> None:
        require(
            self.data.sequence_length <= self.model.positions,
            f"data.sequence_length={self.data.sequence_length}",
            f"model {self.model.name} has {self.model.positions} positions",
            f"Use data.sequence_length={self.model.positions}, or a model with more positions",
        )
        rows = self.model.vocabulary_size
        require(
            rows is None or rows >= self.data.vocabulary.size,
            f"data.vocabulary.size={self.data.vocabulary.size}",
            f"model {self.model.name} has a word table of {rows} rows",
            f"Use data.vocabulary.size={rows}",
        )
        is_cudnn = self.model.attention == "cudnn"
        for is_met, value, reason, fix in (
            (self.mesh.platform in ("gpu", "any"), f"mesh={self.mesh.name}", "cuDNN needs a GPU", "Use model.attention=xla"),
            (
                self.clipping_method.name != "ghost",
                "clipping_method=ghost",
                "ghost clipping repeats the backward pass, and that of cuDNN differs in its last bits from one time to the next",
                "Use clipping_method=book_keeping",
            ),
        ):
            require(is_met or not is_cudnn, f"model.attention=cudnn, {value}", reason, fix)

    def _require_telemetry_fits(self) -> None:
        require(
            self.privacy.rows_per_example == 1 or not self.telemetry.is_released,
            "telemetry=released, privacy.unit_mode=sample_units",
            "the loss of a unit is a sum over its rows, and no limit is declared for this sum",
            "Use telemetry=secret",
        )
        require(
            self.is_private or not self.telemetry.is_released,
            "telemetry=released",
            "mechanism=none makes no claim, so no claim can include released telemetry",
            "Use telemetry=secret, or mechanism=dp_sgd",
        )
        require(
            self.task.accuracy_counts is not None or not self.telemetry.is_released,
            f"telemetry=released, task={self.task.name}",
            "an example of this task has no accuracy that could be released",
            "Use telemetry=secret",
        )

    def _require_end_fits(self) -> None:
        schedule = self.schedule
        require(
            not (schedule.stop_at_non_finite and self.is_private),
            "schedule.stop_at_non_finite=true",
            "a private run does not show that an example has no finite gradient: that example adds nothing to the sum",
            "Use mechanism=none, as debug=nan does",
        )
        if schedule.stop_after_evaluations_without_gain is None:
            return
        require(
            not self.is_private,
            f"schedule.stop_after_evaluations_without_gain={schedule.stop_after_evaluations_without_gain}, mechanism={self.mechanism.name}",
            "the last step of a private run is not chosen by held-out rows: the claim does not cover what the choice reveals of them",
            "Use null, or mechanism=none",
        )
        totals: Any = defaultdict(float, confusion=((1.0,),), values=(((0.0,), (0.0,), (1.0,)),))
        measured = self.task.metrics(totals)
        name = self.gain_in
        require(name in measured, f"schedule.gain_in={name}", "is not measured by this task", f"Use one of {', '.join(measured)}")

    def _require_secret_trials_fit(self) -> None:
        services, charge = self.logger.services, None if self.tune is None else self.tune.charge
        require(
            charge != "repeat_and_select" or not services,
            f"logger={','.join(services)} with tune.charge={charge}",
            "only the winner of this search is released, and a service would be told of every trial, and so of their secret number",
            "Use logger=tensorboard, or tune.charge=composition",
        )

    @property
    def gain_in(self) -> str:
        """The held-out metric by which a run may end early."""
        return self.schedule.gain_in or self.task.metric

    @property
    def given_protected(self) -> tuple[str, ...]:
        """Who is given metrics that were computed without noise, by the user's own declaration."""
        told = [f"callbacks.{name} ({outside_code.package_of(type(one))})" for name, one in self.callbacks.items() if one.protected]
        return (*(self.logger.services if self.logger.send_protected else ()), *told)

    @property
    def vocabulary_size(self) -> int:
        """The number of rows of the model's embedding table, as the model declares it, or else as the data declares it."""
        return self.model.vocabulary_size or self.data.vocabulary.size

    @property
    def widths(self) -> tuple[int, ...]:
        """The lengths in tokens that texts are padded to, ascending."""
        return widths_of(self.length_buckets, self.data.sequence_length)

    @property
    def trained(self) -> Trained:
        """The trained parameters: `train`, without the parameters that the mechanism's noise does not cover."""
        return self.mechanism.trained(self.train) if isinstance(self.mechanism, ForwardNoise) else self.train

    @property
    def receiver(self) -> Receiver:
        """What the parameters that the run starts from must fit."""
        of_training = self.model, self.task, self.trained, self.optimizer
        return Receiver(*of_training, self.data, self.privacy, self.is_private, self.vocabulary_size, self.chosen_by)

    @property
    def fitted(self) -> Fitted:
        return self._part(Fitted)

    @property
    def claim(self) -> Claim:
        return self._part(Claim)

    @property
    def one_step(self) -> OneStep:
        return self._part(OneStep)

    def _part(self, kind: type[Any]) -> Any:
        """Returns the declarations that the record `kind` holds."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @property
    def outside(self) -> tuple[outside_code.Part, ...]:
        """The parts whose code is not dpx's own."""
        return tuple(outside_code.parts(self))

    @property
    def is_private(self) -> bool:
        return self.mechanism.is_private

    @property
    def claim_checksum(self) -> str:
        """The SHA-256 of the declaration, which must not change during a run: as plain data, without default values, reporting, and
        settings of how it is computed."""
        plain = identifying_values(self)
        plain["data"].pop("directory", None)
        for name in COMPUTATION:
            plain["model"].pop(name, None)
        # Two packages may have classes of one name.
        # A callback may come and go in a run: what it trusts is charged by the packages of each step.
        if outside := [part for part in self.outside if not part.key.startswith("callbacks.")]:
            plain["outside_code"] = {part.key: part.kind for part in outside}
        claim = {key: value for key, value in plain.items() if key not in _WITHOUT_EFFECT + _COMPUTATION}
        return hashlib.sha256(json.dumps(claim, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def computation(self) -> dict[str, Any]:
        """The settings that decide the bits of the parameters: the checksum of the declaration, and how the sum is computed."""
        return {
            "claim": self.claim_checksum,
            "clipping_method": dataclasses.asdict(self)["clipping_method"],
            "model": {name: getattr(self.model, name) for name in COMPUTATION},
            "widths": list(self.widths),
        }


def require_name(name: str) -> None:
    """Raises `ConfigError` for the name of a run that is a path or a pattern: it begins the name of a folder."""
    require(
        re.fullmatch(r"\w[\w.+-]*", name) is not None,
        f"name={name}",
        "the name of a run begins the name of its folder, and this one is a path or holds other characters",
        "Use letters, digits and . _ + -; hydra.run.dir=<folder> chooses the folder",
    )


def _has(declared: Any, key: str) -> bool:
    """Returns whether a declaration has the dotted config key `key`."""
    name, _, rest = key.partition(".")
    return hasattr(declared, name) and (not rest or _has(getattr(declared, name), rest))
