"""The mechanism, its clip and its noise, as declared. `clip` is part of the claim; how it is computed is `clipping`."""

from typing import Literal

from dpx.declaration import declaration, require


@declaration
class NoPrivacy:
    """Plain training: no clipping and no noise; the run is stamped `not_private`."""

    name: Literal["none"] = "none"


@declaration
class DpSgd:
    """Per-example clipped sums, Gaussian noise once per logical batch (Abadi et al. 2016; any optimiser on top)."""

    name: Literal["dp_sgd"] = "dp_sgd"


Mechanism = NoPrivacy | DpSgd


def _positive_norm(clipping_norm: float) -> None:
    require(clipping_norm > 0, f"clip.clipping_norm={clipping_norm}", "the clipping norm must be positive", "Give a norm above 0")


@declaration
class Flat:
    """clip(g) = g * min(1, C / ||g||), over the whole parameter vector."""

    clipping_norm: float
    kind: Literal["flat"] = "flat"

    def __post_init__(self) -> None:
        _positive_norm(self.clipping_norm)


@declaration
class Normalised:
    """clip(g) = C * g / (||g|| + stability): every example weighs nearly C (Bu et al. 2023, AUTO-S)."""

    clipping_norm: float
    stability: float = 0.01
    kind: Literal["normalised"] = "normalised"

    def __post_init__(self) -> None:
        _positive_norm(self.clipping_norm)
        require(self.stability > 0, f"clip.stability={self.stability}", "a zero gradient would divide by zero", "Give a value above 0")


@declaration
class PerLayer:
    """Each group of parameters (a layer, the embeddings, a head) clipped by itself to C / sqrt(groups); the whole has norm at most C."""

    clipping_norm: float
    kind: Literal["per_layer"] = "per_layer"

    def __post_init__(self) -> None:
        _positive_norm(self.clipping_norm)


Clip = Flat | Normalised | PerLayer


@declaration
class Multiplier:
    """Noise stated as sigma, relative to the clipping norm on the sum."""

    noise_multiplier: float
    kind: Literal["multiplier"] = "multiplier"

    def __post_init__(self) -> None:
        require(
            self.noise_multiplier > 0,
            f"noise.noise_multiplier={self.noise_multiplier}",
            "private training needs noise",
            "Give a value above 0, or mechanism=none",
        )


@declaration
class NoiseBatchRatio:
    """Noise stated as sigma over the expected batch size (McKenna et al. 2025); needs a constant batch size."""

    noise_batch_ratio: float
    kind: Literal["noise_batch_ratio"] = "noise_batch_ratio"

    def __post_init__(self) -> None:
        require(
            self.noise_batch_ratio > 0,
            f"noise.noise_batch_ratio={self.noise_batch_ratio}",
            "private training needs noise",
            "Give a value above 0, or mechanism=none",
        )


@declaration
class TargetEpsilon:
    """The smallest sigma whose epsilon, by the run's accountant over the whole schedule, is at most `epsilon`."""

    epsilon: float
    kind: Literal["target_epsilon"] = "target_epsilon"

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"noise.epsilon={self.epsilon}", "epsilon must be positive", "Give a target above 0")


Noise = Multiplier | NoiseBatchRatio | TargetEpsilon
