"""The defaults of mechanisms, clips, telemetry and noise, and the edges of what they may be."""

import pytest

from dpx.declaration import ConfigError
from dpx.mechanism.banded import Banded
from dpx.mechanism.clip import AdaptiveClip, Flat, Normalised, PerLayer
from dpx.mechanism.declared_mechanism import Multiplier, NoiseBatchRatio, TargetEpsilon
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.mechanism_protocol import REACH, Mechanism
from dpx.mechanism.telemetry import ReleasedTelemetry

TINY = 1e-9


class ByFlag:
    is_forward = True


@pytest.mark.parametrize(
    ("bases", "body", "kind"),
    [
        ((Mechanism,), {"is_forward": True}, "ForwardNoise"),
        ((Mechanism,), {"reparametrises": False}, "Reparametrisation"),
        ((ByFlag, Mechanism), {}, "ForwardNoise"),
    ],
)
def test_a_mechanism_that_says_by_a_flag_what_it_noises_is_refused(bases, body, kind):
    with pytest.raises(ConfigError, match=f"OfAPackage.*says nothing any more. Inherit dpx.mechanism.mechanism_protocol.{kind}"):
        type("OfAPackage", bases, body)


@pytest.mark.parametrize(
    ("kind", "given", "field", "least", "below"),
    [
        (DiscreteGaussian, {}, "grid_bits", 8, 7),
        (Banded, {}, "bands", 2, 1),
        (Flat, {}, "clipping_norm", 1e-6, 0.99e-6),
        (PerLayer, {}, "clipping_norm", 1e-6, 0.99e-6),
        (Normalised, {}, "clipping_norm", 1e-6, 0.99e-6),
        (Normalised, {"clipping_norm": 1.0}, "stability", TINY, 0.0),
        (AdaptiveClip, {}, "clipping_norm", 1e-6, 0.99e-6),
        (AdaptiveClip, {"clipping_norm": 1.0}, "target_quantile", TINY, 0.0),
        (AdaptiveClip, {"clipping_norm": 1.0}, "learning_rate", TINY, 0.0),
        (AdaptiveClip, {"clipping_norm": 1.0}, "count_noise_multiplier", TINY, 0.0),
        (ReleasedTelemetry, {}, "noise_multiplier", TINY, 0.0),
        (ReleasedTelemetry, {}, "loss_limit", TINY, 0.0),
        (Multiplier, {}, "noise_multiplier", TINY, 0.0),
        (NoiseBatchRatio, {}, "noise_batch_ratio", TINY, 0.0),
        (TargetEpsilon, {}, "epsilon", TINY, 0.0),
    ],
)
def test_the_least_value_stands_and_what_is_below_does_not(kind, given, field, least, below):
    assert getattr(kind(**given, **{field: least}), field) == least
    for wrong in (below, -least):
        with pytest.raises(ConfigError, match=f"{field}={wrong}"):
            kind(**given, **{field: wrong})


@pytest.mark.parametrize(
    ("kind", "given", "field", "most", "above"),
    [
        (DiscreteGaussian, {}, "grid_bits", 22, 23),
        (AdaptiveClip, {"clipping_norm": 1.0}, "target_quantile", 1 - 1e-9, 1.0),
        (AdaptiveClip, {"clipping_norm": 1.0}, "learning_rate", 1.0, 1.0 + 1e-9),
    ],
)
def test_the_largest_value_stands_and_what_is_above_does_not(kind, given, field, most, above):
    assert getattr(kind(**given, **{field: most}), field) == most
    with pytest.raises(ConfigError, match=f"{field}={above}"):
        kind(**given, **{field: above})


def test_defaults_are_those_of_the_papers_and_the_readme():
    assert (DiscreteGaussian().grid_bits, Banded().bands, Normalised(clipping_norm=1.0).stability) == (20, 4, 0.01)
    quantile, released = AdaptiveClip(clipping_norm=1.0), ReleasedTelemetry()
    assert (quantile.target_quantile, quantile.learning_rate, quantile.count_noise_multiplier) == (0.5, 0.2, 20.0)
    assert (released.noise_multiplier, released.loss_limit) == (20.0, 10.0)


def test_the_stated_reach_is_that_of_64_bits_rounded_down():
    assert 0 < (2 * 64 * 0.6931471805599453) ** 0.5 - REACH < 0.01
