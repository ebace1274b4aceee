"""The central limit is reproduced as printed, and shown to under-report."""

import json
import math
from pathlib import Path

import pytest

import dpx.privacy
from dpx.privacy import accounting, closed_form, profile

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "reference.json").read_text())}


def test_three_accountants_at_one_noise():
    case = CASES["li-mnli-eps3"]
    runs, delta, expected = case["inputs"]["runs"], case["inputs"]["delta"], case["expected"]
    sigma = dpx.privacy.noise_multiplier(runs, epsilon=case["inputs"]["epsilon_rdp"], delta=delta, accountant="rdp")
    assert sigma == pytest.approx(expected["noise_multiplier"], rel=0.005)
    clt = profile.gdp_clt_epsilon(accounting.charges_of(runs, sigma), delta)
    assert clt == pytest.approx(expected["epsilon_gdp_clt"], rel=0.005)
    pld = dpx.privacy.epsilon(runs, noise_multiplier=sigma, delta=delta)
    assert pld == pytest.approx(expected["epsilon_pld"], rel=0.005) and clt < pld


def test_the_noise_of_equation_eleven():
    case = CASES["dpfp-eq11-sst2"]
    given, expected = case["inputs"], case["expected"]
    runs = [(given["sampling_probability"], given["compositions"])]
    assert closed_form.mu(given["epsilon_clt"], given["delta"]) == pytest.approx(expected["mu_total"], rel=0.005)
    sigma = profile.gdp_clt_noise_multiplier(runs, epsilon=given["epsilon_clt"], delta=given["delta"])
    assert sigma == pytest.approx(expected["noise_multiplier"], rel=0.005)
    found = dpx.privacy.epsilon(runs, noise_multiplier=sigma, delta=given["delta"])
    assert found == pytest.approx(expected["epsilon_pld_same_sigma"], rel=0.005)


def test_small_noise_overflows_to_infinity_and_not_to_nonsense():
    assert math.isinf(profile.gdp_clt_epsilon(accounting.charges_of([(0.01, 10)], 0.01), 1e-6))


def test_the_limit_is_no_accountant():
    with pytest.raises(ValueError, match="not an accountant that proves"):
        dpx.privacy.epsilon([(0.01, 10)], noise_multiplier=1.0, delta=1e-6, accountant="gdp_clt")
