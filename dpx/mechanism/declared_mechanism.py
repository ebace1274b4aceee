"""Declares noise, and collects mechanisms, clips and telemetry under the names that configs give them.

Configs name them `dpx.mechanism.declared_mechanism.<name>`, whatever file a declaration lies in. A new part is named by its own file and
needs no line here.

Every proof that assumes fixed places is checked against the declarations under which one unit can move others (`movers`). An example has a
*number* below N, by which samplers draw it, and in a step a *place*: device, microbatch and row there. A proof compares two neighbours, in
which all other units are the same. Some proofs need more: that the others have the same numbers (groups of rows that take turns), or the
same places (sums that are rounded microbatch by microbatch). Such a sampler or mechanism declares this by `needs_fixed_numbers` or
`needs_fixed_places`, also if it comes from another package, and `check` refuses it with any setting that moves them. A mechanism that sums
its own quantity (`summand`) is assumed to need fixed places unless its class says that it does not.

Whatever a unit holds (other text, no text, a gradient that is not finite, fewer rows), it does not move another unit:

- Numbers. Under `zero_out` and `replace_one` N is public, and so is how many rows a unit has where rows are drawn singly: neighbours have
  as many. Which rows of a unit are kept follows from that unit alone (`dpx.data.prepare`).
- Draws. A sampler sees N, q, the step and keys, so it draws the same numbers; which of them a cap leaves out is drawn likewise.
- Places. Chunks and microbatches are cut by position in the draw. An example without text, one whose gradient is dropped as not finite, a
  unit with fewer rows and a canary that is out all occupy their places; so does the unit of a `zero_out` neighbour, which contributes
  zero there. `microbatch=auto` is decided on synthetic rows.

Bounds on exact sums need none of this: the order of real numbers does not change their sum. Those are the Gaussian mechanisms', whose
sums are stated to be rounded (`Mechanism.floating_point`), counts of `clip=quantile` and clamped values of `telemetry=released`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dpx.declaration import declaration, require
from dpx.mechanism.banded import Banded as Banded
from dpx.mechanism.clip import AdaptiveClip as AdaptiveClip
from dpx.mechanism.clip import Clip as Clip
from dpx.mechanism.clip import Flat as Flat
from dpx.mechanism.clip import Normalised as Normalised
from dpx.mechanism.clip import PerLayer as PerLayer
from dpx.mechanism.discrete_gaussian import DiscreteGaussian as DiscreteGaussian
from dpx.mechanism.dp_fp import DpFp as DpFp
from dpx.mechanism.dp_sgd import DpSgd as DpSgd
from dpx.mechanism.dp_sgd import NoPrivacy as NoPrivacy
from dpx.mechanism.mechanism_protocol import REACH as REACH
from dpx.mechanism.mechanism_protocol import Declared
from dpx.mechanism.mechanism_protocol import ForwardNoise as ForwardNoise
from dpx.mechanism.mechanism_protocol import Mechanism as Mechanism
from dpx.mechanism.mechanism_protocol import Reparametrisation as Reparametrisation
from dpx.mechanism.telemetry import ReleasedTelemetry as ReleasedTelemetry
from dpx.mechanism.telemetry import SecretTelemetry as SecretTelemetry
from dpx.mechanism.telemetry import Telemetry as Telemetry


def _require_noise(name: str, value: float) -> None:
    require(
        value > 0, f"noise.{name}={value}", "private training needs a positive amount of noise", "Give a value above 0, or mechanism=none"
    )
    require(value < float("inf"), f"noise.{name}={value}", "no sum can be released with infinite noise", "Give a finite value")


@declaration
class Multiplier:
    """Noise given as sigma.

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum, divided by the clipping norm.
    """

    noise_multiplier: float
    kind: Literal["multiplier"] = "multiplier"

    def __post_init__(self) -> None:
        _require_noise("noise_multiplier", self.noise_multiplier)


@declaration
class NoiseBatchRatio:
    """Noise given as a ratio (McKenna et al. 2025); the batch size must be constant.

    Attributes:
        noise_batch_ratio: Sigma over the expected batch size.
    """

    noise_batch_ratio: float
    kind: Literal["noise_batch_ratio"] = "noise_batch_ratio"

    def __post_init__(self) -> None:
        _require_noise("noise_batch_ratio", self.noise_batch_ratio)


@declaration
class TargetEpsilon:
    """Noise given as a target: the smallest sigma whose epsilon over the whole schedule is at most `epsilon`.

    Attributes:
        epsilon: The largest epsilon allowed, by the run's accountant.
    """

    epsilon: float
    kind: Literal["target_epsilon"] = "target_epsilon"

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"noise.epsilon={self.epsilon}", "epsilon must be positive", "Give a target above 0")
        is_finite = self.epsilon < float("inf")
        require(is_finite, f"noise.epsilon={self.epsilon}", "no noise has this epsilon", "Write mechanism=none to train without privacy")


@declaration
class TargetClt:
    """Noise given as a target by an approximation: the central limit of Gaussian DP (Du and Mi 2021, eq. 11).

    `mechanism=dp_fp` was published with it. The run's epsilon is another number, computed from what is released.

    Attributes:
        epsilon: The epsilon that the central limit gives.
    """

    epsilon: float
    kind: Literal["target_clt"] = "target_clt"

    def __post_init__(self) -> None:
        finite = 0 < self.epsilon < float("inf")
        require(finite, f"noise.epsilon={self.epsilon}", "the target must be positive and finite", "Give a target above 0")


@declaration
class TargetCopy:
    """Noise given as a target for one of the rows that hold the same text, as papers count an example whose text is cut several times.

    The run's epsilon is another number, of a unit with all of its rows.

    Attributes:
        epsilon: The largest epsilon of one row alone.
        accountant: The accountant of that epsilon.
    """

    epsilon: float
    accountant: Literal["rdp", "pld"] = "rdp"
    kind: Literal["target_copy"] = "target_copy"

    def __post_init__(self) -> None:
        finite = 0 < self.epsilon < float("inf")
        require(finite, f"noise.epsilon={self.epsilon}", "the target must be positive and finite", "Give a target above 0")


Noise = Multiplier | NoiseBatchRatio | TargetEpsilon | TargetClt | TargetCopy


class Mover(NamedTuple):
    """A declared `value` under which one unit moves others to other places and, if `moves_numbers`, to other numbers."""

    value: str
    moves_numbers: bool
    reason: str
    fix: str


def movers(adjacency: str, widths: Sequence[int]) -> list[Mover]:
    """Returns all declarations that move other units when one unit changes; `widths` are the lengths that texts are padded to."""
    found = []
    if adjacency == "add_remove":
        reason = "one more unit gives other units another number, and so another step or microbatch"
        found.append(Mover("privacy.adjacency=add_remove", True, reason, "Use privacy.adjacency=zero_out"))
    if len(widths) > 1:
        reason = "the length of one text can move other texts to another microbatch"
        found.append(Mover(f"length_buckets=[{', '.join(map(str, widths))}]", False, reason, "Use length_buckets=null"))
    return found


def needs_fixed_places(mechanism: Mechanism) -> bool:
    """Returns whether the proof of `mechanism` is assumed to need all other examples in their places."""
    kinds = type(mechanism).__mro__
    adds, says = (next(kind for kind in kinds if name in vars(kind)) for name in ("summand", "needs_fixed_places"))
    return mechanism.needs_fixed_places or (adds is not Mechanism and says is Mechanism)


def check(mechanism: Mechanism, declared: Declared) -> None:
    """Raises `ConfigError` if a declaration moves units and the proof of `mechanism`, or of `declared`'s sampler, needs fixed places."""
    sampler = declared.sampler
    for mover in movers(declared.privacy.adjacency, declared.widths):
        for name, needs_staying in (
            (f"mechanism={mechanism.name}", needs_fixed_places(mechanism)),
            (f"sampler={sampler.name}", sampler.needs_fixed_numbers and mover.moves_numbers),
        ):
            require(not needs_staying, f"{name}, {mover.value}", f"{mover.reason}, and the proof needs them to stay", mover.fix)
