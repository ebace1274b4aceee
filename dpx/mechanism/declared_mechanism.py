"""Declares noise, and collects mechanisms, clips and telemetry under the names that configs give them.

Configs name them `dpx.mechanism.declared_mechanism.<name>`, whatever file a declaration lies in. A new part is named by its own file and
needs no line here.
"""

from typing import Literal

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
from dpx.mechanism.mechanism_protocol import Mechanism as Mechanism
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


Noise = Multiplier | NoiseBatchRatio | TargetEpsilon | TargetClt
