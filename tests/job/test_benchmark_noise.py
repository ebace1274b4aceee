"""The benchmark of noise says how far each generator reaches and times it."""

import pytest

from dpx.declaration import ConfigError
from dpx.job.doctor import BenchmarkNoise


def test_only_jax_s_own_normal_stops_short_of_eight_sigma():
    document = BenchmarkNoise(draws=2048, rounds=1).document()
    reach = {row["generator"]: row["reach"] for row in document["rows"]}
    assert 5.3 < reach["jax.random.normal"] < 5.6 and reach["gaussian"] > 8 and reach["discrete_gaussian"] is None
    assert all(0 < row["ns_spread"][0] <= row["ns"] <= row["ns_spread"][1] for row in document["rows"])


def test_an_odd_number_of_draws_is_refused():
    with pytest.raises(ConfigError, match="job.draws=1000"):
        BenchmarkNoise(draws=1000)
