"""Steps of a run with random allocation are charged as they are planned and drawn, and what breaks the argument is refused."""

from typing import Any

import pytest

from dpx.claim.calibration import Entries, calibrate
from dpx.declaration import ConfigError
from dpx.mechanism.banded import Banded
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.dp_fp import DpFp
from dpx.mechanism.dp_sgd import DpSgd
from dpx.privacy import ledger
from dpx.privacy.declared_privacy import Deterministic, Pld, Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.sampler import RandomAllocation
from dpx.sampler.batch_schedule import Linear, Staged
from dpx.training import loop

from .conftest import declare

SIZE = 100


class FromElsewhere(DpSgd):
    """A mechanism of another package."""

    def ledger_fields(self) -> dict[str, Any]:
        return super().ledger_fields()


FromElsewhere.__module__ = "elsewhere"


def allocated(**changes: Any):
    return declare(sampler=RandomAllocation(), noise=Multiplier(noise_multiplier=1.0), **changes)


@pytest.mark.parametrize(
    "schedule", [Staged(sizes=[10, 30], stage_steps=4), Staged(sizes=[10, 10, 30], stage_steps=2), Linear(start=10, end=30, ramp_steps=5)]
)
def test_the_steps_of_a_run_are_charged_as_planned(schedule, tmp_path) -> None:
    experiment = allocated(batch_schedule=schedule, steps=9)
    calibrated = calibrate(experiment.claim, SIZE)
    facts = {"from_step": 0, "start": None, "secret_tag": "", "secret_place": None, "why": "a test"}
    opened, entered = NoiseEpoch(number=0, name="one", fingerprint={}, **facts), Ledger(tmp_path / "ledger")
    run: Any = object.__new__(loop.Run)
    for name, value in {"experiment": experiment, "calibrated": calibrated, "ledger": entered, "job": None}.items():
        object.__setattr__(run, name, value)
    # Step 5 twice, as after a kill: it repeats its places and its noise.
    for step in (0, 1, 2, 3, 4, 5, 5, 6, 7, 8):
        loop._enter(run, opened, step)
    planned = Entries.of(experiment.claim).planned(calibrated.batch_stages, SIZE, 1.0, entered.identity, opened)
    assert entered.segments() == planned
    assert {one.kind for one, _ in ledger.releases(planned)} == {"random_allocation"}


def test_epochs_that_share_a_number_are_charged_apart() -> None:
    # Epochs of 10 steps from step 0, then of 4 from step 8: numbers 0 and 0, 1, 2.
    experiment = allocated(batch_schedule=Staged(sizes=[10, 25], stage_steps=8), steps=18)
    charges = ledger.releases(Entries.of(experiment.claim).planned(calibrate(experiment.claim, SIZE).batch_stages, SIZE, 1.0))
    assert sorted((one.sampling_probability, count) for one, count in charges) == [(0.1, 1), (0.25, 3)]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"mechanism": Banded(bands=2)}, "mechanism=banded"),
        ({"mechanism": DiscreteGaussian()}, "sampler=random_allocation"),
        ({"mechanism": DpFp(micro_batches=2)}, "mechanism=dp_fp|sampler=random_allocation"),
        ({"mechanism": FromElsewhere()}, "dpx's own Gaussian noise"),
        ({"privacy": Privacy(delta=1e-4, adjacency="replace_one"), "accountant": Pld()}, "in one neighbour only"),
        ({"privacy": Privacy(delta=1e-4, unit="document", rows_per_unit_max=3)}, "in several steps"),
    ],
    ids=["banded", "integer", "forward", "package", "replaced", "rows apart"],
)
def test_what_the_argument_does_not_cover_is_refused_in_one_line(changes, refusal) -> None:
    with pytest.raises(ConfigError, match=refusal) as refused:
        calibrate(allocated(**changes).claim, SIZE)
    assert "\n" not in str(refused.value)


def test_replaced_units_are_charged_without_amplification() -> None:
    def charged(**of: Any) -> dict[str, float]:
        privacy, accountant = Privacy(delta=1e-4, adjacency="replace_one"), Deterministic(value_discretization_interval=0.01)
        one = declare(noise=Multiplier(noise_multiplier=1.0), privacy=privacy, accountant=accountant, **of)
        return calibrate(one.claim, SIZE).epsilon

    # Four steps of one epoch are one release; those of Poisson, without amplification, are four.
    found = charged(sampler=RandomAllocation())
    assert list(found) == ["deterministic"] and found["deterministic"] < charged()["deterministic"]
