"""Declared noise becomes a noise multiplier that never exceeds the target epsilon; invalid claims are refused."""

import dataclasses
from typing import Any

import pytest

import dpx.privacy
from dpx.claim import calibration
from dpx.claim.calibration import calibrate, differing
from dpx.claim.caveats import real_draws
from dpx.config.declared_audit import Canaries, Primary
from dpx.declaration import ConfigError
from dpx.mechanism.declared_mechanism import Multiplier, NoiseBatchRatio, TargetEpsilon
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.privacy import accounting, cache, closed_form, solve
from dpx.privacy.declared_privacy import Deterministic, GdpClt, Pld, Rdp
from dpx.privacy.events import Release
from dpx.sampler import BallsInBins, FixedSize, Poisson, Shuffled, TruncatedPoisson
from dpx.sampler.batch_schedule import Constant, Linear, Staged
from tests.processes import WIDTH

N = 10_000


def _plan_of(of: Any, calibrated: Any) -> Any:
    return calibration.plan_of(of.claim, calibrated)


def test_stated_noise_is_kept(small):
    calibrated = calibrate(small().claim, N)
    assert calibrated.noise_multiplier == 1.0 and calibrated.stages == ((64 / N, 20),) and calibrated.batch_stages == ((64, 20),)
    expected = dpx.privacy.epsilon([(64 / N, 20)], noise_multiplier=1.0, delta=1e-6)
    assert calibrated.epsilon["pld"] == expected and calibrated.epsilon["rdp"] > expected


def test_ratio_is_noise_over_batch(small):
    assert calibrate(small(noise=NoiseBatchRatio(noise_batch_ratio=0.25)).claim, N).noise_multiplier == 16.0


@pytest.mark.parametrize("accountant", [None, Rdp()])
def test_target_is_met_from_below(small, accountant):
    experiment = small(noise=TargetEpsilon(epsilon=0.5), **({"accountant": accountant} if accountant else {}))
    calibrated = calibrate(experiment.claim, N)
    own = experiment.accountant.name
    assert 0.5 * 0.998 < calibrated.epsilon[own] <= 0.5


def test_a_plan_holds_the_audit_and_says_which_setting_differs(small):
    audit = Canaries(gradients=400, sequences=0, primary=Primary(guesses=100))

    def planned(**changes):
        experiment = small(**({"audit": audit, "accountant": Rdp(value_discretization_interval=WIDTH)} | changes))
        return _plan_of(experiment, calibrate(experiment.claim, N))

    before = planned()
    assert differing(before, planned()) == [] == differing(None, before)
    later = dataclasses.replace(audit, primary=dataclasses.replace(audit.primary, error=0.2))
    assert differing(before, planned(audit=later)) == ["audit"]
    assert differing(before, planned(privacy={"delta": 1e-7}, steps=9)) == ["steps", "batch_sizes", "privacy"]


def test_plain_training_has_no_noise(small):
    calibrated = calibrate(small(mechanism=NoPrivacy()).claim, N)
    assert calibrated.noise_multiplier is None and calibrated.epsilon == {} and calibrated.stages == ((64 / N, 20),)


def test_stages_are_accounted_at_their_own_rates(small):
    calibrated = calibrate(small(batch_schedule=Staged(sizes=[32, 64], stage_steps=5)).claim, N)
    assert calibrated.stages == ((32 / N, 5), (64 / N, 15))


@pytest.mark.slow
def test_a_ramp_is_bounded_from_above_and_closely(small, monkeypatch):
    monkeypatch.setattr(accounting, "RATES_MAX", 6)
    experiment = small(steps=20, batch_schedule=Linear(start=20, end=400, ramp_steps=20), accountant=Rdp())
    calibrated = calibrate(experiment.claim, N)
    charges = [(Release(noise_multiplier=1.0, sampling_probability=q), steps) for q, steps in calibrated.stages]
    exact = accounting.compose(charges, "rdp").epsilon(1e-6)
    assert len(calibrated.stages) == 20 and exact < calibrated.epsilon["rdp"] <= exact * 1.1


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"privacy": {"delta": 1e-3}}, N, "privacy.delta=0.001"),
        ({"batch_schedule": Constant(size=N + 1)}, N, f"batch size {N + 1}"),
        ({"privacy": {"adjacency": "add_remove"}}, N, "declared_size"),
        ({"privacy": {"adjacency": "replace_one"}, "accountant": Rdp()}, N, "replace"),
        ({"privacy": {"adjacency": "replace_one", "unit": "document", "rows_per_unit_max": 4}}, N, "rows_per_unit_max=4"),
        ({"sampler": Shuffled(), "batch_schedule": Staged(sizes=[32, 64], stage_steps=5)}, N, "sampler=shuffled"),
        ({"sampler": FixedSize()}, N, "replace_one only"),
        ({"sampler": TruncatedPoisson(), "accountant": Rdp()}, N, "no event for truncated Poisson sampling"),
        ({"accountant": GdpClt(), "noise": TargetEpsilon(epsilon=1.0)}, N, "cannot set the noise"),
        ({"privacy": {"unit": "document", "rows_per_unit_max": 4}, "accountant": Rdp()}, N, "several rows"),
    ],
)
def test_claims_that_cannot_stand_are_refused_in_one_line(small, changes, size, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        calibrate(small(**changes).claim, size)
    assert "\n" not in str(refusal.value)


def test_large_delta_can_be_allowed(small):
    assert calibrate(small(privacy={"delta": 1e-3, "allow_large_delta": True}).claim, N).epsilon["pld"] > 0


def test_declared_size_stands_in_for_the_count(small):
    experiment = small(privacy={"adjacency": "add_remove"}, data={"declared_size": 20_000})
    assert calibrate(experiment.claim, N).stages == ((64 / 20_000, 20),)


def test_a_unit_of_rows_costs_more_than_a_row(small):
    coarse = Pld(value_discretization_interval=WIDTH)
    row = calibrate(small(steps=2, accountant=coarse).claim, N).epsilon
    document = calibrate(small(steps=2, accountant=coarse, privacy={"unit": "document", "rows_per_unit_max": 2}).claim, N).epsilon
    assert document["pld"] > 1.3 * row["pld"] and "rdp" not in document


def claim(epsilon=1.0):
    return {"stages": [(0.01, 100)], "epsilon": epsilon, "delta": 1e-6, "accountant": "rdp"}


def test_calibrations_are_kept_and_found_again(own_cache, monkeypatch):
    first = dpx.privacy.noise_multiplier(**claim())
    monkeypatch.setattr(solve, "_refine", lambda *_, **__: pytest.fail("solved again"))
    assert dpx.privacy.noise_multiplier(**claim()) == first
    assert len(list((own_cache / "calibration").iterdir())) == 1


def test_a_calibration_is_named_by_its_question_the_formula_and_the_accountants_version(monkeypatch):
    question = {"charges": [["release", 5]], "target": [1.0, 1e-6]}
    name = cache.key(question)
    assert cache.key(dict(reversed(question.items()))) == name
    others = [cache.key(question | {"target": [1.0, 1e-5]})]
    monkeypatch.setattr(cache, "version", lambda _: "another")
    others.append(cache.key(question))
    monkeypatch.setattr(cache, "FORMULA", cache.FORMULA + 1)
    assert len({name, *others, cache.key(question)}) == 4


NO_MULTIPLIER = [f'{{"value": {value}, "checksum": ""}}' for value in ('"x"', "0.01", "0", "-1", "NaN", "Infinity")]


@pytest.mark.parametrize("text", ["", "{", *NO_MULTIPLIER])
def test_a_damaged_or_wrong_cache_is_not_believed(own_cache, text):
    first = dpx.privacy.noise_multiplier(**claim())
    (path,) = (own_cache / "calibration").iterdir()
    path.write_text(text)
    assert dpx.privacy.noise_multiplier(**claim()) == first


def test_an_unwritable_cache_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("DPX_CACHE", "/proc/nowhere")
    assert dpx.privacy.noise_multiplier(**claim()) > 0
    assert cache.read("calibration", {"target": "absent"}) is None


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_targets_are_refused(epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        dpx.privacy.noise_multiplier(**claim(epsilon))


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6])
def test_impossible_deltas_are_refused(delta):
    with pytest.raises(ConfigError, match="delta"):
        dpx.privacy.epsilon([(0.01, 100)], noise_multiplier=1.0, delta=delta)


def test_a_delta_below_the_arithmetic_is_refused_by_pld_only():
    with pytest.raises(ConfigError, match="accountant=rdp"):
        dpx.privacy.epsilon([(0.01, 100)], noise_multiplier=1.0, delta=1e-15)
    assert dpx.privacy.epsilon([(0.01, 100)], noise_multiplier=1.0, delta=1e-15, accountant="rdp") > 0


@pytest.mark.parametrize("target", [1e-3, 1e3])
def test_extreme_targets_are_met(target):
    value = dpx.privacy.noise_multiplier(**claim(target))
    assert dpx.privacy.epsilon([(0.01, 100)], noise_multiplier=value, delta=1e-6, accountant="rdp") <= target


def test_noise_stays_what_was_declared(small):
    assert small().noise == Multiplier(noise_multiplier=1.0)


def test_the_truncated_entry_carries_its_cap(small):
    experiment = small(sampler=TruncatedPoisson())
    entered = calibration.Entries.of(experiment.claim).of_step(N, 1.0, 64)
    assert entered.cap is not None and entered.cap >= 64 + 6 * 8 * 0.99 and entered.size == N
    plain, truncated = calibrate(small().claim, N).epsilon["pld"], calibrate(experiment.claim, N).epsilon["pld"]
    assert plain <= truncated <= plain * 1.001


def test_without_amplification_every_step_counts_whole(small):
    calibrated = calibrate(small(accountant=Deterministic(), noise={"noise_multiplier": 20.0}).claim, N)
    assert calibrated.epsilon["deterministic"] == pytest.approx(closed_form.epsilon(20**0.5 / 20, 1e-6))
    assert calibrated.epsilon["pld"] < calibrated.epsilon["deterministic"]


def test_delta_is_held_against_the_counted_size_where_that_is_public(small):
    few = {"declared_size": 100, "allow_other_size": True}
    with pytest.raises(ConfigError, match=r"privacy.delta=0.001: not below 1/N = 0.0001"):
        calibrate(small(data=few, privacy={"delta": 1e-3}, batch_schedule={"size": 10}).claim, 10_000)


@pytest.mark.parametrize(
    ("sampler", "adjacency", "counted", "message"),
    [
        (Poisson(), "zero_out", 10_300, "the text gives 10300 rows, so a step draws 1.03 times the batch size"),
        (Poisson(), "zero_out", 1_000, "draws 0.1 times the batch size. Use data.declared_size=null, or data.allow_other_size=true"),
        (FixedSize(), "replace_one", 9_999, "draws from exactly the number of rows that it is accounted at, and the text gives 9999"),
        (TruncatedPoisson(), "zero_out", 10_001, "sampler=truncated_poisson draws from exactly the number"),
    ],
)
def test_a_declared_size_that_the_text_does_not_give_is_refused(small, sampler, adjacency, counted, message):
    declared = small(sampler=sampler, data={"declared_size": 10_000}, privacy={"adjacency": adjacency})
    with pytest.raises(ConfigError, match=message) as refusal:
        calibrate(declared.claim, counted)
    assert str(refusal.value).startswith("data.declared_size=10000: ") and "\n" not in str(refusal.value)
    allowed = dataclasses.replace(declared, data=dataclasses.replace(declared.data, allow_other_size=True))
    if sampler.depends_on_size:
        with pytest.raises(ConfigError, match=message):
            calibrate(allowed.claim, counted)
    else:
        # The charge is for the declared number: what is drawn of each row does not follow the count.
        assert calibrate(allowed.claim, counted).stages == calibrate(declared.claim, 10_000).stages


def test_a_run_says_how_many_rows_its_steps_draw_where_that_is_public(small):
    near = small(data={"declared_size": 10_000})
    assert calibrate(near.claim, 10_150) and calibrate(near.claim, 9_850)
    (line,) = real_draws(near.data, near.privacy, 10_150)
    assert line == "data.declared_size=10000, and the text gives 10150 rows: a step draws 1.015 times the batch size on average"
    assert real_draws(near.data, near.privacy, 10_000) == []
    hidden = small(data={"declared_size": 10_000}, privacy={"adjacency": "add_remove"})
    assert calibrate(hidden.claim, 5) == calibrate(hidden.claim, 10_000) and real_draws(hidden.data, hidden.privacy, 5) == []


def test_under_add_remove_delta_is_held_against_the_declared_size_alone(small):
    """A refusal that followed the protected number would tell something of it."""
    declared = {"data": {"declared_size": 100}, "batch_schedule": {"size": 10}}
    found = [calibrate(small(**declared, privacy={"delta": 1e-3, "adjacency": "add_remove"}).claim, size) for size in (50, 10_000)]
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match=r"not below 1/N = 0.01"):
        calibrate(small(**declared, privacy={"delta": 0.02, "adjacency": "add_remove"}).claim, 10)


@pytest.mark.usefixtures("own_cache")
def test_a_run_keeps_the_noise_it_began_with_unless_its_plan_changed(small):
    experiment = small(noise=TargetEpsilon(epsilon=2.0), accountant=Pld(value_discretization_interval=WIDTH))
    now = calibrate(experiment.claim, N)
    plan = _plan_of(experiment, now)
    assert now.noise_multiplier is not None
    assert plan.step is not None
    sigma = now.noise_multiplier * 1.0001
    other = dataclasses.replace(plan, step=dataclasses.replace(plan.step, noise_multiplier=sigma))
    kept = calibrate(experiment.claim, N, other)
    assert kept.noise_multiplier == sigma and kept.epsilon["pld"] < now.epsilon["pld"]
    assert calibrate(experiment.claim, N, plan) == now
    other_size = dataclasses.replace(plan.step, noise_multiplier=sigma, size=5)
    for changed in ({"steps": 3}, {"step": other_size}, {"batch_sizes": ((1, 2),)}):
        assert calibrate(experiment.claim, N, dataclasses.replace(other, **changed)) == now


def test_balls_in_bins_is_refused_where_n_is_protected(small):
    with pytest.raises(ConfigError, match="permutation of all N rows"):
        calibrate(small(sampler=BallsInBins(), data={"declared_size": N}, privacy={"adjacency": "add_remove"}).claim, N)


def test_an_epsilon_below_what_is_resolved_is_refused_before_anything_is_solved():
    with pytest.raises(ConfigError, match=r"^epsilon=1e-300: no accountant resolves an epsilon this small. Give a target of 1e-12 or more"):
        solve.noise_multiplier([(0.01, 300)], epsilon=1e-300, delta=1e-6)
