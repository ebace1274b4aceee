"""Declares `mechanism=discrete_gaussian`: integer sums and integer noise, which have no low-order bits that could leak information.

Each microbatch's clipped sum is rounded to the grid, coordinate by coordinate, and is an exact integer from there on: integers add up over
microbatches and devices in any order. An example lies in one microbatch on one device, so it reaches one rounded sum: before rounding that
moves by at most C, and rounding two numbers to spacing g moves their distance by at most g per coordinate. All other rounded sums are the
same integers because all other examples keep their places (`needs_fixed_places`); a microbatch of other examples would be rounded
differently, by up to g per coordinate each. So every setting that moves examples is refused (`dpx.mechanism.declared_mechanism`):
`add_remove`, and `length_buckets` of several lengths.

int32 arithmetic wraps around: sums and noise are taken modulo 2^32, which is a function of their exact values and so has no privacy cost.

Draws are exactly those of the discrete Gaussian: P(k) proportional to exp(-k^2 / (2 s^2)) over the integers, with s^2 a rational number.
They are made by rejection from a discrete Laplace distribution (Canonne, Kamath, Steinke 2020, algorithms 2 and 3). Every decision is
whether a uniform number lies below exp(-x) for a rational x. Float64 decides clear cases; within `MARGIN` more random bits and exact
arithmetic decide, so no rounding shifts a probability. `job=benchmark_noise` measures the cost of a draw.

Shape legend: N candidates.
"""

import functools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.mechanism.mechanism_protocol import Declared, Mechanism, NoisySum
from dpx.randomness import BitStream, RootSecret

# Far above the error of float64 in exp and in its arguments here (below 1e-14), and reached once in 1e12 decisions.
MARGIN = 1e-12


def discrete_gaussian(stream: BitStream, deviation: Fraction, count: int) -> np.ndarray:
    """Returns `count` independent draws, int64, whose parameter s is `deviation`; `stream` is consumed."""
    draws, have = [], 0
    while have < count:
        # A proposal is kept with probability 0.45 to 0.5 in all.
        draws.append(_kept(stream, deviation * deviation, math.floor(deviation) + 1, int((count - have) * 2.3) + 64))
        have += len(draws[-1])
    return np.concatenate(draws)[:count]


def _kept(stream: BitStream, variance: Fraction, width: int, proposals: int) -> np.ndarray:
    """Returns the accepted draws among `proposals` tries at a discrete Laplace of scale `width`."""
    low_N, is_negative_N = _uniform(stream, width, proposals)
    keep_N = _below_exp(stream, low_N / width, lambda at: Fraction(int(low_N[at]), width))
    low_N, is_negative_N = low_N[keep_N], is_negative_N[keep_N]
    size_N = low_N + width * _geometric(stream, len(low_N))
    # Zero has one sign.
    once_N = ~(is_negative_N & (size_N == 0))
    size_N, is_negative_N = size_N[once_N], is_negative_N[once_N]
    centre = variance / width
    exponent_N = np.square(size_N - float(centre)) / (2 * float(variance))
    keep_N = _below_exp(stream, exponent_N, lambda at: (int(size_N[at]) - centre) ** 2 / (2 * variance))
    return np.where(is_negative_N, -size_N, size_N)[keep_N]


def _uniform(stream: BitStream, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uniform int64 below `width`, a fair sign) from up to `count` words; words past the last whole multiple are dropped."""
    words_N = stream.words(count)
    surplus = (1 << 64) % (2 * width)
    words_N = words_N[words_N < np.uint64((1 << 64) - surplus)] if surplus else words_N
    below_N = (words_N % np.uint64(2 * width)).astype(np.int64)
    return below_N >> 1, (below_N & 1).astype(bool)


def _geometric(stream: BitStream, count: int) -> np.ndarray:
    """Returns `count` geometric draws: how often a uniform number lies below exp(-1) before one does not."""
    draws, active = np.zeros(count, np.int64), np.arange(count)
    while len(active):
        active = active[_below_exp(stream, np.ones(len(active)), lambda at: Fraction(1))]
        draws[active] += 1
    return draws


def _below_exp(stream: BitStream, exponent_N: np.ndarray, exactly: Callable[[int], Fraction]) -> np.ndarray:
    """Returns whether a new uniform number lies below exp(-x), for each x; `exactly(i)` is the i-th x as a fraction."""
    words_N = stream.words(len(exponent_N))
    uniform_N, limit_N = (words_N >> np.uint64(11)).astype(np.float64) * 2.0**-53, np.exp(-exponent_N)
    below_N = uniform_N + (2.0**-53 + MARGIN) <= limit_N
    for at in np.flatnonzero(~below_N & (uniform_N < limit_N + MARGIN)):
        below_N[at] = _exactly_below(stream, int(words_N[at]), exactly(int(at)))
    return below_N


def _exactly_below(stream: BitStream, value: int, exponent: Fraction) -> bool:
    """Returns whether the uniform number whose first 64 bits are `value` lies below exp(-`exponent`).

    It draws further bits until that is certain.
    """
    if exponent == 0:
        return True
    bits = 64
    while True:
        digits = bits // 3 + 30
        with localcontext() as context:
            context.prec = digits
            nearest = Fraction((-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp())
        # Decimal's exp is correctly rounded; its argument is off by one part in 10^digits, times exponents below 10^6.
        error = nearest / 10 ** (digits - 10)
        if Fraction(value + 1, 1 << bits) <= nearest - error:
            return True
        if Fraction(value, 1 << bits) >= nearest + error:
            return False
        value, bits = (value << 64) | int(stream.words(1)[0]), bits + 64


# Clamping moves no two coordinates further apart, and makes the conversion to int32 well defined.
LARGEST = 2.0**30
# A parameter is drawn in at most so many parts of its columns, each of which has at least so many numbers: then a stream takes longer to
# draw than to begin.
_MOST_PARTS, _LEAST_NUMBERS = 64, 1 << 12


@declaration
class DiscreteGaussian(Mechanism):
    """Adds exact discrete Gaussian noise to integer sums, so that the low-order bits of floats cannot leak (Canonne et al. 2020).

    The grid's spacing is 2^-`grid_bits` times the largest power of two that is at most the clipping norm.

    Attributes:
        grid_bits: Fineness of the grid of integers.
    """

    grid_bits: int = 20
    name: Literal["discrete_gaussian"] = "discrete_gaussian"
    sum_dtype: ClassVar[str] = "int32"
    needs_fixed_places: ClassVar[bool] = True
    floating_point: ClassVar[str] = (
        "each microbatch is clipped and added up in float32 before it is rounded to the grid; from there on all numbers are integers"
    )

    def __post_init__(self) -> None:
        require(
            8 <= self.grid_bits <= 22,
            f"mechanism.grid_bits={self.grid_bits}",
            "the grid would be too coarse to train on, or its integers would overflow",
            "Use 8 to 22",
        )

    def spacing(self, clipping_norm: float) -> float:
        """Returns the grid's spacing, a power of two, so that scaling to integers is exact."""
        return math.ldexp(1.0, math.frexp(clipping_norm)[1] - 1 - self.grid_bits)

    def sensitivity(self, clipping_norm: float, parameters: int) -> float:
        """Returns C + sqrt(d) * spacing, rounded up: the most that one example moves the integers, in the gradient's own units.

        It assumes that no other example changes its place.
        """
        root = math.nextafter(math.sqrt(parameters), math.inf)
        return math.nextafter(clipping_norm + root * self.spacing(clipping_norm), math.inf)

    def deviation(self, noise_multiplier: float, clipping_norm: float, parameters: int) -> Fraction:
        """Returns the discrete Gaussian's parameter in steps of the grid: the noise multiplier times the sensitivity, an exact fraction."""
        return Fraction(noise_multiplier) * Fraction(self.sensitivity(clipping_norm, parameters)) / Fraction(self.spacing(clipping_norm))

    def check(self, declared: Declared) -> None:
        sampler, clip, telemetry = declared.sampler, declared.clip, declared.telemetry
        accountant = declared.accountant.name
        refusals = (
            (clip.is_adaptive, f"clip={clip.kind}", "the noise of the count is in float32", "Use clip=flat"),
            (telemetry.is_released, "telemetry=released", "the noise of released values is in float32", "Use telemetry=secret"),
            (
                accountant != "rdp",
                f"accountant={accountant}",
                "integer noise has the Gaussian's Renyi divergences at integer orders, and dpx has no proof of another bound",
                "Use accountant=rdp",
            ),
            (
                sampler.assumed is not None,
                f"sampler.assumed={sampler.assumed}",
                "papers that assume a sampler also assume real-valued noise",
                "Remove sampler.assumed",
            ),
            (
                not sampler.covers_integer_noise,
                f"sampler={sampler.name}",
                "its Renyi bound is proved for real-valued noise",
                "Use sampler=poisson",
            ),
        )
        for is_refused, value, reason, fix in refusals:
            require(not is_refused, f"mechanism=discrete_gaussian, {value}", reason, fix)

    def ledger_fields(self) -> dict[str, Any]:
        return {"noise": "discrete_gaussian"}

    def draw(self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: Any) -> Any:
        """Returns the noise itself: a tree like `params`, laid out like them, of int32 multiples of the spacing."""
        import jax

        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        return grid_noise(secret, step, params, self.deviation(noise_multiplier, clipping_norm, parameters))

    def summand(self, total: Any, clipping_norm: float) -> Any:
        return to_grid(total, self.spacing(clipping_norm))

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        """Adds the integer noise.

        `deviation` is not used: the integers were drawn with a deviation that includes the grid's share of the sensitivity.
        """
        return NoisySum(*with_grid_noise(total, drawn, self.spacing(clipping_norm)), state)

    def noise_facts(self, clipping_norm: float, count_parameters: Callable[[], int]) -> dict[str, Any]:
        return {
            "grid_margin": self.sensitivity(clipping_norm, count_parameters()) / clipping_norm - 1,
            "generator": "SHAKE-256 streams whose keys are derived by keyed BLAKE2b from one root secret",
            "generator_strength_bits": 256,
            "noise_reach_in_deviations": None,
        }

    def explanation(self) -> list[str]:
        return ["Sums and noise are integers on a fine grid, so the low-order bits of floating-point numbers reveal nothing in addition."]


def to_grid(tree: Any, spacing: float) -> Any:
    """Rounds every leaf to the nearest multiple of `spacing` and returns int32 multiples."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.clip(jnp.round(leaf / spacing), -LARGEST, LARGEST).astype(jnp.int32), tree)


def grid_noise(secret: RootSecret, step: int, params: Any, deviation: Fraction) -> Any:
    """Returns a tree like `params` of int32 draws, laid out like them: each process draws only what its devices hold.

    There is one keyed stream for each (step, parameter path, part of the columns, block of its rows), whatever the layout.
    """
    import jax

    from dpx.randomness import path_name

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        at = _grid_at(partial(secret.stream, "grid_noise", step, path_name(path)), leaf.shape, deviation)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, at)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _grid_at(stream: Callable[..., BitStream], shape: tuple[int, ...], deviation: Fraction) -> Callable[[Any], np.ndarray]:
    """Returns a function that draws the numbers of a parameter at a place, a tuple of slices; `stream(part, block)` is that of a block."""
    from dpx.mechanism.noise import row_blocks

    width = (shape[-1] if shape else 1) // _parts(shape)

    @functools.cache
    def part(number: int) -> np.ndarray:
        blocks = row_blocks((math.prod(shape[:-1]), width))
        drawn = [discrete_gaussian(stream(number, block), deviation, math.prod(size)) for block, size in enumerate(blocks)]
        return np.concatenate(drawn).astype(np.int32).reshape(*shape[:-1], width)

    def at(place: Any) -> np.ndarray:
        if not shape:
            return part(0)[0]
        first, end, _ = place[-1].indices(shape[-1])
        before = first // width
        drawn = np.concatenate([part(number) for number in range(before, -(-end // width))], axis=-1)
        return drawn[(*place[:-1], slice(first - before * width, end - before * width))]

    return at


def _parts(shape: tuple[int, ...]) -> int:
    """Returns into how many equal parts the columns of a parameter are cut; the layout of parameters cuts them too (`Layout.storage`)."""
    parts = math.gcd(shape[-1], _MOST_PARTS) if shape else 1
    while parts > 1 and math.prod(shape) < parts * _LEAST_NUMBERS:
        parts //= 2
    return parts


def with_grid_noise(total: Any, noise: Any, spacing: float) -> tuple[Any, Any, Any]:
    """Returns (sum, noisy sum, sum of squares of the noise) in the gradient's units, from int32 trees."""
    import jax
    import jax.numpy as jnp

    float_of = lambda leaf: leaf.astype(jnp.float32) * spacing  # noqa: E731
    squares = jnp.sum(jnp.stack([jnp.sum(jnp.square(float_of(leaf))) for leaf in jax.tree.leaves(noise)]))
    return jax.tree.map(float_of, total), jax.tree.map(lambda a, b: float_of(a + b), total, noise), squares
