"""Epsilon as a run goes by: that of the step it is shown at, never below the statement's, and nearly free."""

from functools import partial

import pytest

from dpx.claim import spent as spent_module
from dpx.claim.calibration import Entries, calibrate
from dpx.claim.spent import Spending, require_planned
from dpx.declaration import ConfigError
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.privacy import accounting, ledger
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.privacy.segments import until

from .conftest import declare

STEPS, SIZE = 40, 500
EXPERIMENT = declare(steps=STEPS, accountant=Pld(), noise=Multiplier(noise_multiplier=0.7), privacy=Privacy(delta=1e-4))


def begun(path, steps, epoch=0, entered=None):
    """A ledger with a separate noise epoch for `steps`."""
    entered, name = entered or Ledger(path / "ledger"), f"epoch {epoch}"
    opened = {"start": None, "secret_tag": "", "secret_place": None, "fingerprint": {}, "why": "a test"}
    entered.open_noise_epoch(NoiseEpoch(number=epoch, name=name, from_step=steps[0], **opened))
    for step in steps:
        entered.append(step, Entries.of(EXPERIMENT.claim).of_step(SIZE, 0.7, 10, epoch, name))
    return entered


def stated(entered, end):
    """What a statement of the first `end` steps composes."""
    return accounting.compose(accounting.bucketed(ledger.releases(until(entered.segments(), end)))).epsilon(1e-4)


def spent(entered, bound: float | None = float("inf")):
    found = Spending(EXPERIMENT.accountant, EXPERIMENT.privacy, EXPERIMENT.steps, entered)
    found.bound = bound
    return found


@pytest.mark.parametrize("done", [1, 7, 39])
def test_it_is_that_of_the_step_it_is_shown_at(tmp_path, done):
    # The next step is entered, and running, when this one's metrics are read.
    entered = begun(tmp_path, range(done + 1))
    shown = spent(entered).after(done)
    assert shown is not None
    assert stated(entered, done) <= shown < 1.003 * stated(entered, done) < stated(entered, done + 1)


def test_the_last_step_is_composed_as_the_statement_does(tmp_path):
    entered = begun(tmp_path, range(STEPS))
    assert spent(entered).after(STEPS) == stated(entered, STEPS)


def test_steps_of_an_older_noise_epoch_count_in_full(tmp_path):
    entered = begun(tmp_path, range(4, 8), epoch=1, entered=begun(tmp_path, range(10)))
    assert spent(entered).after(6) == pytest.approx(stated(begun(tmp_path / "other", range(12)), 12), rel=3e-3)


def test_it_stays_below_the_planned_end_and_needs_a_claim(tmp_path):
    entered = begun(tmp_path, range(20))
    assert spent(entered, bound=0.5).after(20) == 0.5
    assert spent(entered, bound=None).after(20) is None


def test_showing_epsilon_is_given_up_where_it_takes_long_but_at_the_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(spent_module, "SECONDS", 0.0)
    monkeypatch.setattr(spent_module, "SHARE", 0.0)
    found = spent(begun(tmp_path, range(STEPS)))
    assert found.after(2) is not None
    assert found.after(4) is None and found.after(STEPS) is not None


def test_one_steps_losses_are_found_once_for_all_points(tmp_path, monkeypatch):
    monkeypatch.setattr(spent_module, "SECONDS", 60.0)
    accounting._losses_of_one.cache_clear()
    found = spent(begun(tmp_path, range(STEPS)))
    shown = [found.after(done) or 0.0 for done in range(1, STEPS, 2)]
    assert 0.0 < shown[0] and shown == sorted(shown)
    assert accounting._losses_of_one.cache_info().misses == 1


CALIBRATED = calibrate(EXPERIMENT.claim, SIZE)


def restart(entered, from_step):
    plan = partial(Entries.of(EXPERIMENT.claim).planned, CALIBRATED.batch_stages, SIZE, 0.7, entered.identity)
    require_planned(EXPERIMENT.accountant, EXPERIMENT.privacy, plan, entered, from_step)


def test_a_restart_that_repeats_no_step_with_fresh_noise_is_within_the_plan(tmp_path):
    restart(Ledger(tmp_path / "new"), 0)
    restart(begun(tmp_path, range(20)), 20)


@pytest.mark.parametrize(("charged", "again"), [(20, 19), (1, 0), (STEPS, STEPS - 1)])
def test_one_that_does_needs_the_users_command(tmp_path, charged, again):
    with pytest.raises(ConfigError, match=rf"^restart from step {again}: needs fresh noise, and epsilon at the end would be .* planned"):
        restart(begun(tmp_path, range(charged)), again)
