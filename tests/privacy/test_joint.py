"""Sums released on one draw are one release: charged jointly, never as events with separate draws."""

import math

import dp_accounting
import pytest
from dp_accounting import pld

from dpx.claim import calibration, statement
from dpx.claim.calibration import calibrate
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.mechanism.clip import AdaptiveClip
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.privacy import accounting, closed_form, ledger
from dpx.privacy.closed_form import joint, remaining
from dpx.privacy.events import Release
from dpx.privacy.ledger import Ledger
from dpx.sampler import Shuffled

N = 10_000
CLIP = AdaptiveClip(clipping_norm=0.5, count_noise_multiplier=2.0)


def test_stacked_gaussians_are_one():
    # Two sums with everyone in them: mu adds in squares, by the closed form and by dp-accounting's composition.
    first, second = 1.5, 0.7
    both = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(first), dp_accounting.GaussianDpEvent(second)])
    theirs = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(both).get_epsilon(1e-6)
    assert closed_form.epsilon(1 / joint(first, second), 1e-6) == pytest.approx(theirs, rel=1e-3)
    assert joint(first, None) == first and joint(first, second) < min(first, second)


def test_what_remains_is_exactly_what_joins_to_the_target():
    left = remaining(0.8, {"count": 2.0, "telemetry": None})
    assert joint(left, 2.0) == pytest.approx(0.8, rel=1e-11) and joint(left, 2.0) >= 0.8
    assert left == pytest.approx((0.8**-2 - 2.0**-2) ** -0.5)
    with pytest.raises(ConfigError, match=r"count=0.5: these releases use all the privacy that a joint noise multiplier of 0.8 allows"):
        remaining(0.8, {"count": 0.5})


def entered(experiment, path, steps=20):
    found = Ledger(path)
    for step in range(steps):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(N, 1.0, 64))
    return found


def test_an_adaptive_count_is_charged_on_the_draw_of_the_sum(small, tmp_path):
    runs = entered(small(clip=CLIP), tmp_path / "ledger").segments()
    assert (runs[0].noise_multiplier, runs[0].count_noise_multiplier, runs[0].clipping_norm) == (1.0, 2.0, None)
    q = 64 / N
    together = [(Release(noise_multiplier=math.sqrt(1 / 1.25), sampling_probability=q, size=N), 20)]
    assert ledger.releases(runs) == together
    # As two events, each with its own draw, the same noise would seem to cost less than it does.
    apart = [(Release(noise_multiplier=z, sampling_probability=q), 20) for z in (1.0, 2.0)]
    charged = accounting.compose(ledger.releases(runs)).epsilon(1e-6)
    assert charged > accounting.compose(apart).epsilon(1e-6) * 1.05
    assert charged > accounting.compose([(Release(noise_multiplier=1.0, sampling_probability=q), 20)]).epsilon(1e-6)


def test_a_pass_over_the_data_is_charged_jointly(small, tmp_path):
    runs = entered(small(clip=CLIP, sampler=Shuffled()), tmp_path / "ledger").segments()
    ((release, count),) = ledger.releases(runs)
    assert count == 1 and release.noise_multiplier == pytest.approx(joint(1.0, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero_out", pytest.param("replace_one", marks=pytest.mark.slow)])
def test_a_target_epsilon_is_met_by_sum_and_count_together(small, adjacency):
    noise, privacy = TargetEpsilon(epsilon=4.0), {"adjacency": adjacency}
    plain = calibrate(small(noise=noise, privacy=privacy).claim, N).noise_multiplier
    adaptive = calibrate(small(noise=noise, privacy=privacy, clip=CLIP).claim, N)
    assert adaptive.noise_multiplier is not None and plain is not None
    assert joint(adaptive.noise_multiplier, 2.0) == pytest.approx(plain, rel=1e-9)
    assert 3.99 < adaptive.epsilon["pld"] <= 4.0


@pytest.mark.slow
def test_a_count_dearer_than_the_target_is_refused(small):
    with pytest.raises(ConfigError, match="count_noise_multiplier=0.1: these releases use all"):
        calibrate(small(noise=TargetEpsilon(epsilon=4.0), clip=AdaptiveClip(clipping_norm=1.0, count_noise_multiplier=0.1)).claim, N)


def test_the_statement_says_what_is_released_and_recomputes(small, tmp_path):
    experiment = small(clip=CLIP)
    document = to_json(statement.build(experiment.claim, None, calibrate(experiment.claim, N), entered(experiment, tmp_path / "ledger")))
    mechanism = document["mechanism"]
    assert mechanism["clip"] == "quantile" and mechanism["count_noise_multiplier"] == 2.0
    assert mechanism["joint_noise_multiplier"] == pytest.approx(joint(1.0, 2.0))
    assert any("clipping norm" in line for line in mechanism["releases"])
    (item,) = document["ledger"]["events"]
    assert item["event"]["event"]["noise_multiplier"] == pytest.approx(joint(1.0, 2.0))
