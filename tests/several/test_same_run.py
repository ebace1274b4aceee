"""What the processes of a run compare before its first step: one checksum that nothing on which they must agree can change unseen."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dpx.audit.canaries import COINS
from dpx.claim.calibration import Calibrated
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.orbax_checkpoints import export
from dpx.files.run_folder import RunFolder
from dpx.files.weights import FROZEN
from dpx.processes import Team
from dpx.processes.place import Place
from dpx.training import follower, microbatch, opening

from ..training.conftest import declare
from ..training.test_adaptive import synthetic
from .test_place import mesh_of

CALIBRATED = Calibrated(1.0, ((0.1, 4),), ((10, 4),), 100, {"rdp": 2.5})
STRATEGY = np.asarray([0.8, 0.4], np.float32)


def opened(claim="claim", data="data", **changes):
    given = {"mesh": mesh_of(), "calibrated": CALIBRATED, "microbatch": 8, "strategy": STRATEGY}
    return follower.opened(claim, follower.facts_of_run(**(given | changes)), data)


OTHER_RUNS = {
    "claim": {"claim": "another"},
    "data": {"data": "another"},
    "mesh": {"mesh": mesh_of(data=2)},
    "calibration": {"calibrated": dataclasses.replace(CALIBRATED, noise_multiplier=1.1)},
    "units": {"calibrated": dataclasses.replace(CALIBRATED, size=101)},
    "microbatch": {"microbatch": 4},
    "strategy": {"strategy": np.nextafter(STRATEGY, np.float32(1))},
    "no strategy": {"strategy": None},
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_another_run_has_another_checksum(name):
    assert opened() == opened() != opened(**OTHER_RUNS[name])


def test_nor_does_a_run_of_another_version_or_code_have_the_same(monkeypatch):
    own = opened()
    with monkeypatch.context() as patch:
        patch.setattr("dpx.__version__", "0.0.1")
        assert opened() != own
    monkeypatch.setattr("dpx.training.fingerprint.code_checksum", lambda _: "another")
    assert opened() != own


def keep_frozen(private, value):
    params = {"layers": {"up": {"kernel": jnp.full((2, 3), value)}}}
    export(private / FROZEN, params, weights.facts(params, ()))


STARTED = {"opened": "run", "first_step": 5, "noise_epoch": 1, "tag": "ab"}
OTHER_STARTS = {"opened": "another", "first_step": 6, "noise_epoch": 2, "tag": "cd"}


@pytest.mark.parametrize("name", OTHER_STARTS)
def test_another_start_has_another_checksum(tmp_path, name):
    own, again, other = (follower.started(**(STARTED | more), private=tmp_path) for more in ({}, {}, {name: OTHER_STARTS[name]}))
    assert own == again != other


def test_so_do_other_frozen_parameters_and_other_canaries(tmp_path):
    found = []
    for number, value in enumerate((1.0, 1.0, 1.0 + 2**-23)):
        keep_frozen(tmp_path / str(number), value)
        found.append(follower.started(**STARTED, private=tmp_path / str(number)))
    assert found[0] == found[1] != found[2]
    for number in (0, 1):
        (tmp_path / str(number) / COINS).write_text(f'{{"coins": [{number}]}}')
        found.append(follower.started(**STARTED, private=tmp_path / str(number)))
    assert len(set(found)) == 4


class Heard(Team):
    """Process 0 of two; the other one answers with `answer`."""

    def __init__(self, answer):
        super().__init__(Place(0, 2, "a:1"))
        self.answer, self.told = answer, {}

    def gather(self, value):
        return [value, self.answer]

    def tell(self, name, **facts):
        self.told[name] = facts
        if name == "open":
            raise Opened


class Opened(Exception):
    pass


@pytest.mark.parametrize(("otherwise", "fix"), [follower.OPENED, follower.STARTED])
def test_a_process_with_another_checksum_is_refused_in_one_line(otherwise, fix):
    follower.require_agreement(Heard("a"), "a", (otherwise, fix))
    with pytest.raises(ConfigError) as caught:
        follower.require_agreement(Heard("b"), "a", (otherwise, fix))
    assert str(caught.value).startswith(f"process 1: {otherwise}. {fix}") and "\n" not in str(caught.value)


def test_process_zero_measures_the_microbatch_and_tells_it_under_the_checksum(tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(microbatch, "_rates", lambda *_: {2: 10.0, 4: 30.0, 8: 20.0})
    both = Heard("")
    monkeypatch.setattr(opening, "team", lambda: both)
    monkeypatch.setattr(opening, "_start_jax", lambda mesh, _: mesh.make())
    experiment = declare(data=synthetic(str(tmp_path / "data")), microbatch="auto")
    with pytest.raises(Opened), opening.open_run(experiment, RunFolder(tmp_path / "run")):
        pass
    told = both.told["open"]
    assert told["microbatch"] == 4
    assert follower.opened("claim", told, "data") != follower.opened("claim", told | {"microbatch": 8}, "data")
