"""`job=doctor`: its checks pass here, and fail where the noise or a sum is wrong."""

import json

import jax.numpy as jnp
import pytest

from dpx.files.run_folder import RunFolder
from dpx.job import doctor
from dpx.mechanism import noise
from tests.composed import composed


def test_the_noise_of_this_machine_passes() -> None:
    checks = doctor._noise()
    assert len(checks) == 2 and all(one["passes"] for one in checks)


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        (lambda total: total * 1.03, [True, True]),
        # As wide as a Gaussian, and another distribution.
        (lambda total: jnp.sign(total) * doctor.DEVIATION, [False, True]),
    ],
)
def test_wrong_noise_fails(monkeypatch, wrong, fails) -> None:
    right = noise.add_noise
    monkeypatch.setattr(noise, "add_noise", lambda *given: ({"kernel": wrong(right(*given)[0]["kernel"])}, None))
    assert [not one["passes"] for one in doctor._noise()] == fails


def test_a_check_that_fails_is_written_and_raised(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_sums", lambda: [doctor._check("clipped sum", float("nan"), doctor.SUM_BOUND)])
    monkeypatch.setattr(doctor, "_noise", list)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RuntimeError, match="clipped sum: outside its bound"):
        doctor.Doctor()(composed()[0], folder)
    written = json.loads((folder.release / "doctor.json").read_text())
    assert written["machine"]["platform"] == "cpu" and written["installation"]["unmet_requirements"] == []


@pytest.mark.slow
def test_the_sums_of_this_machine_pass() -> None:
    assert [one["passes"] for one in doctor._sums()] == [True] * len(doctor.METHODS)
