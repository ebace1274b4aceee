"""What accounting at published scale costs: 20,000 steps of Anil et al. 2021 at N = 346M, processor seconds on one core.

`python -m pytest -n0 -q -s -m slow tests/privacy/test_cost.py` prints what it measures. Not in the default suite: it needs minutes.
"""

import time

import pytest

from dpx.privacy import accounting, solve
from dpx.privacy.accounting import charges_of, compose

N, STEPS, DELTA, SIGMA = 346_000_000, 20_000, 2.89e-9, 0.52
FIVE = [(batch / N, STEPS // 5) for batch in (262_144, 524_288, 1_048_576, 1_572_864, 2_097_152)]
RAMP = [((262_144 + step * (1_048_576 - 262_144) / 7_499) / N, 1) for step in range(7_500)] + [(1_048_576 / N, STEPS - 7_500)]


def seconds(subject):
    began = time.process_time()
    subject()
    return time.process_time() - began


def epsilon(runs, accountant):
    return compose(charges_of(runs, SIGMA), accountant).epsilon(DELTA)


def calibrated(runs):
    return solve.solve(charges_of(runs, 1.0), epsilon=5.36, delta=DELTA, accountant="pld", orders=None, adjacency="zero_out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "subject", "limit_s"),
    [
        ("epsilon, 5 rates, RDP", lambda: epsilon(FIVE, "rdp"), 1),
        ("epsilon, ramp of 7,500 rates, RDP", lambda: epsilon(RAMP, "rdp"), 5),
        ("epsilon, ramp of 7,500 rates, PLD", lambda: epsilon(RAMP, "pld"), 20),
        ("calibration, one rate, PLD", lambda: calibrated([(FIVE[-1][0], STEPS)]), 120),
        ("calibration, 5 rates, PLD", lambda: calibrated(FIVE), 120),
    ],
)
def test_published_scale_is_accounted_for_in(what, subject, limit_s):
    found = seconds(subject)
    print(f"\n{what}: {found:.2f} s")
    assert found < limit_s


def test_a_ramp_is_composed_at_thirty_rates():
    assert len(charges_of(RAMP, SIGMA)) <= accounting.RATES_MAX + 1
