"""Defines the parts of an experiment that other rooms read: its claim, one step, and the run that weights come from or go to.

`dpx.config.experiment.Experiment` returns each by a property of the same name. No jax.
"""

import dataclasses

from dpx.clipping import ClippingMethod
from dpx.config.declared_audit import Audit
from dpx.config.declared_init import Init, MeasuredTable
from dpx.config.declared_tuning import Tune
from dpx.data.declared_data import Data
from dpx.files.weights import Shapes
from dpx.mechanism.clip import Clip
from dpx.mechanism.declared_mechanism import Noise
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.mechanism.telemetry import Telemetry
from dpx.models.shape import AnyModel
from dpx.models.trained import Trained
from dpx.optimizer import Optimizer
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.sampler import Sampler
from dpx.sampler.batch_schedule import BatchSchedule
from dpx.statement import outside_code
from dpx.task.declared_task import Task


@dataclasses.dataclass(frozen=True)
class Receiver:
    """Describes the run that the starting parameters must fit. `vocabulary_size` is the number of rows of its embedding table."""

    model: AnyModel
    task: Task
    train: Trained
    optimizer: Optimizer
    data: Data
    privacy: Privacy
    is_private: bool
    vocabulary_size: int
    chosen_by: MeasuredTable | None = None

    @property
    def shapes(self) -> Shapes:
        return self.task.parameter_shapes(self.model, self.vocabulary_size)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What released weights are of: a network, the text that it was fitted to, and the weights that it began from.

    `vocabulary_size` is the number of rows of its embedding table.
    """

    name: str
    model: AnyModel
    task: Task
    vocabulary_size: int
    data: Data
    privacy: Privacy
    init: Init
    train: Trained


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a run claims, and all that the claim is computed from: nothing of how its sums are computed or what it reports.

    `widths` are the lengths in tokens that texts are padded to; `outside` are the parts whose code is not dpx's own;
    `given_protected` names who is given metrics that were computed without noise.
    """

    name: str
    replicate: int
    seed: int | None
    steps: int
    model: AnyModel
    vocabulary_size: int
    task: Task
    data: Data
    widths: tuple[int, ...]
    train: Trained
    privacy: Privacy
    sampler: Sampler
    batch_schedule: BatchSchedule
    mechanism: Mechanism
    clip: Clip
    noise: Noise
    clipping_method: ClippingMethod
    telemetry: Telemetry
    accountant: Accountant
    audit: Audit
    tune: Tune | None
    outside: tuple[outside_code.Part, ...]
    given_protected: tuple[str, ...]

    @property
    def is_private(self) -> bool:
        return self.mechanism.is_private

    @property
    def reasons_of_mechanism(self) -> list[str]:
        """Why the mechanism's noise does not cover what is trained."""
        return self.mechanism.reasons_against(self.train, lambda: self.task.parameter_shapes(self.model, 1))


@dataclasses.dataclass(frozen=True)
class OneStep:
    """What a step computes: the loss by the trained parameters, its clipped sums, their noise, and the update."""

    model: AnyModel
    task: Task
    trained: Trained
    privacy: Privacy
    mechanism: Mechanism
    clip: Clip
    clipping_method: ClippingMethod
    telemetry: Telemetry
    optimizer: Optimizer
