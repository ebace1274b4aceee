"""The grid of `mechanism=discrete_gaussian`: where sums are rounded, and how far one example then moves them.

Each microbatch's clipped sum is rounded to the grid, coordinate by coordinate, and is an exact integer from there on: integers add up over
microbatches and devices in any order. An example lies in one microbatch, whichever the device, so it reaches one rounded sum: before
rounding that moves by at most C, and rounding two numbers to spacing g moves their distance by at most g a coordinate. Under `zero_out`
and `replace_one` the other examples keep their places; under `add_remove` they move up, so that relation is refused.
"""

import math
from fractions import Fraction

from dpx.declaration import require
from dpx.experiment import Experiment
from dpx.mechanism.declarations import DiscreteGaussian, Quantile, ReleasedTelemetry


def spacing(experiment: Experiment) -> float | None:
    """The grid's spacing, a power of two, so that scaling to integers is exact; `None` where sums stay float32."""
    mechanism = experiment.mechanism
    if not isinstance(mechanism, DiscreteGaussian):
        return None
    return math.ldexp(1.0, math.frexp(experiment.clip.clipping_norm)[1] - 1 - mechanism.grid_bits)


def sensitivity(experiment: Experiment, parameters: int) -> float:
    """C + sqrt(d) * spacing, rounded up: how far one example moves the integers, in the gradient's own units."""
    step = spacing(experiment)
    assert step is not None
    return math.nextafter(experiment.clip.clipping_norm + math.nextafter(math.sqrt(parameters), math.inf) * step, math.inf)


def deviation(experiment: Experiment, noise_multiplier: float, parameters: int) -> Fraction:
    """The discrete Gaussian's parameter in steps of the grid: the noise multiplier times the sensitivity, an exact fraction."""
    step = spacing(experiment)
    assert step is not None
    return Fraction(noise_multiplier) * Fraction(sensitivity(experiment, parameters)) / Fraction(step)


def check(experiment: Experiment) -> None:
    """Raises `Refused` for what the proof of integer noise does not cover."""
    if not isinstance(experiment.mechanism, DiscreteGaussian):
        return
    name = "mechanism=discrete_gaussian"
    require(
        experiment.privacy.adjacency != "add_remove",
        f"{name}, privacy.adjacency=add_remove",
        "one row more moves others to another microbatch, so every rounded sum changes",
        "Use privacy.adjacency=zero_out",
    )
    require(
        not isinstance(experiment.clip, Quantile),
        f"{name}, clip=quantile",
        "the count's noise is float32",
        "Use clip=flat",
    )
    require(
        not isinstance(experiment.telemetry, ReleasedTelemetry),
        f"{name}, telemetry=released",
        "the noise of released values is float32",
        "Use telemetry=secret",
    )
    require(
        experiment.accountant.name == "rdp",
        f"{name}, accountant={experiment.accountant.name}",
        "integer noise has the Gaussian's Renyi divergences at integer orders, and no other bound is proved here",
        "Use accountant=rdp",
    )
    require(
        experiment.sampler.assumed is None,
        f"{name}, sampler.assumed={experiment.sampler.assumed}",
        "papers that assume a sampler assume real-valued noise beside it",
        "Leave sampler.assumed out",
    )
    require(
        experiment.sampler.name != "fixed_size",
        f"{name}, sampler=fixed_size",
        "its Renyi bound is proved for real-valued noise",
        "Use sampler=poisson",
    )
