"""Both branches of the ratio, against reference cases of McKenna et al. 2025."""

import json
from pathlib import Path

import pytest

from dpx.cost.designs import noise_batch_ratio

CASES = json.loads((Path(__file__).parent / "reference.json").read_text())


# The larger of two, which takes six times as long.
SLOW = {"mckenna-baseline-large-eps64": pytest.mark.slow}
RATIOS = [case for case in CASES if case["kind"] == "noise_batch_ratio"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"], marks=SLOW.get(case["id"], ())) for case in RATIOS])
def test_reference(case):
    given, expected = case["inputs"], case["expected"]
    claim = {"epsilon": given["epsilon"], "delta": given["delta"], "interval": 5e-4}
    found = noise_batch_ratio(given["dataset_size"], given["batch_size"], given["steps"], **claim)
    rel = case["tolerance"]["rel"]
    assert found.ratio == pytest.approx(expected["noise_batch_ratio"], rel=rel)
    assert found.poisson == pytest.approx(expected["sigma_poisson"], rel=rel)
    assert found.deterministic == pytest.approx(expected["sigma_deterministic"], rel=rel)
    assert (found.participations, found.chosen) == (expected["participations"], expected["chosen"])
