"""Numbers that independent implementations agree on, each from the settings of a published paper (`reference.json`)."""

import json
from pathlib import Path

import pytest

import dpx.privacy

CASES = json.loads((Path(__file__).parent / "reference.json").read_text())


# Calibration by PLD composes 20,000 steps at every trial; the default suite composes this one once, at the noise that RDP found.
SLOW = {"anil-sigma-pld-65536"}


def of_kind(kind):
    marks = {case["id"]: [pytest.mark.slow] * (case["id"] in SLOW) for case in CASES}
    return [pytest.param(case, id=case["id"], marks=marks[case["id"]]) for case in CASES if case["kind"] == kind]


def check(value, expected, tolerance):
    assert value == pytest.approx(expected, rel=tolerance.get("rel", 0), abs=tolerance.get("abs", 0))


@pytest.mark.parametrize("case", of_kind("epsilon"))
def test_epsilon(case):
    given = case["inputs"]
    value = dpx.privacy.epsilon(
        stages=[tuple(run) for run in given["runs"]],
        noise_multiplier=given["noise_multiplier"],
        delta=given["delta"],
        accountant=given["accountant"],
        orders=given.get("orders"),
    )
    check(value, case["expected"], case["tolerance"])


@pytest.mark.parametrize("case", of_kind("noise_multiplier"))
def test_noise_multiplier(case):
    given = case["inputs"]
    claim = {"stages": [tuple(run) for run in given["runs"]], "delta": given["delta"], "accountant": given["accountant"]}
    value = dpx.privacy.noise_multiplier(epsilon=given["epsilon"], **claim)
    check(value, case["expected"], case["tolerance"])
    assert dpx.privacy.epsilon(noise_multiplier=value, **claim) <= given["epsilon"]
    assert dpx.privacy.epsilon(noise_multiplier=value * 0.999, **claim) > given["epsilon"]
