"""The mechanism, its clip and its noise, as declared. `clip` is part of the claim; how it is computed is `clipping`."""

from typing import Literal

from dpx.declaration import declaration, require

# The largest absolute value that a Gaussian draw takes, in deviations: sqrt(2 ln 2^64), rounded down (`dpx.mechanism.gaussian`).
REACH = 9.41


@declaration
class NoPrivacy:
    """Plain training: no clipping and no noise; the run is stamped `not_private`."""

    name: Literal["none"] = "none"


@declaration
class DpSgd:
    """Per-example clipped sums, Gaussian noise once per logical batch (Abadi et al. 2016; any optimiser on top)."""

    name: Literal["dp_sgd"] = "dp_sgd"


@declaration
class DiscreteGaussian:
    """dp_sgd hardened against the low-order bits of floats: integer sums, exact discrete Gaussian noise (Canonne et al. 2020).

    The grid's spacing is 2^-`grid_bits` times the largest power of two that is at most the clipping norm.
    """

    grid_bits: int = 20
    name: Literal["discrete_gaussian"] = "discrete_gaussian"

    def __post_init__(self) -> None:
        require(
            8 <= self.grid_bits <= 22,
            f"mechanism.grid_bits={self.grid_bits}",
            "the grid would be too coarse to train on, or its integers would wrap",
            "Use 8 to 22",
        )


@declaration
class Banded:
    """Noise correlated over `bands` steps, so that much of it cancels in the sum of all updates (Choquette-Choo et al. 2023, BandMF).

    Released is x + C^-1 z for a lower-triangular Toeplitz matrix C with `bands` diagonals and columns of norm 1, optimised for prefix sums.
    A row may take part once in any `bands` steps, which `sampler=cyclic_poisson` sees to. Keeps `bands` - 1 noise vectors as state.
    """

    bands: int = 4
    name: Literal["banded"] = "banded"

    def __post_init__(self) -> None:
        require(self.bands >= 2, f"mechanism.bands={self.bands}", "one band is independent noise", "Use 2 or more, or mechanism=dp_sgd")


Mechanism = NoPrivacy | DpSgd | DiscreteGaussian | Banded


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


@declaration
class Quantile:
    """Flat clipping at a norm C_t that follows a quantile of the examples' norms (Andrew et al. 2021).

    C_0 is `clipping_norm`. Each step also releases how many of its examples lie within C_t, on the same draw as the sum and with noise of
    its own; C_{t+1} = C_t exp(-`learning_rate` (noisy fraction - `target_quantile`)). An example counts +1/2 within C_t and -1/2 beyond
    it, so `count_noise_multiplier` is the noise's deviation over a sensitivity of 1/2 (the paper's sigma_b is half of it).
    """

    clipping_norm: float
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float = 20.0
    kind: Literal["quantile"] = "quantile"

    def __post_init__(self) -> None:
        _positive_norm(self.clipping_norm)
        require(
            0 < self.target_quantile < 1,
            f"clip.target_quantile={self.target_quantile}",
            "a quantile lies in (0, 1)",
            "Use 0.5 for the median",
        )
        require(
            0 < self.learning_rate <= 1,
            f"clip.learning_rate={self.learning_rate}",
            "the norm would stand still or jump",
            "Use a value in (0, 1]",
        )
        require(
            self.count_noise_multiplier > 0,
            f"clip.count_noise_multiplier={self.count_noise_multiplier}",
            "a count without noise has no guarantee",
            "Give a value above 0",
        )


Clip = Flat | Normalised | PerLayer | Quantile


@declaration
class SecretTelemetry:
    """What is measured while training depends on the data without noise and stays under private/."""

    kind: Literal["secret"] = "secret"


@declaration
class ReleasedTelemetry:
    """Each step also releases its mean loss (each example's held to 0..`loss_limit`) and its mean accuracy, with noise.

    `noise_multiplier` is that of both values together, over their joint sensitivity (`dpx.mechanism.telemetry`).
    """

    noise_multiplier: float = 20.0
    loss_limit: float = 10.0
    kind: Literal["released"] = "released"

    def __post_init__(self) -> None:
        require(
            self.noise_multiplier > 0,
            f"telemetry.noise_multiplier={self.noise_multiplier}",
            "released values need noise",
            "Give a value above 0, or telemetry=secret",
        )
        require(self.loss_limit > 0, f"telemetry.loss_limit={self.loss_limit}", "every loss would be cut to 0", "Give a value above 0")


Telemetry = SecretTelemetry | ReleasedTelemetry


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
