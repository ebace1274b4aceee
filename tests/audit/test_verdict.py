"""What may fail a run: the primary at its own error, the others at 0.001 together, estimates never."""

import json
import math

import numpy as np
import pytest

from dpx.audit import verdict
from dpx.audit.verdict import ESTIMATORS, SHARED_ERROR, judge, require_passes
from dpx.config.declared_audit import Primary
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.privacy import closed_form

M = 20_000


def scores(mu, seed=0):
    drawn = np.random.default_rng(seed)
    is_in = drawn.random(M) < 0.5
    return {"gradient": (is_in * mu + drawn.normal(size=M), is_in)}


def claim(delta):
    return closed_form.epsilon(0.5, delta)


def test_all_other_combinations_share_one_error():
    found = judge(scores(0.5), claim, Primary())
    assert sum(bound.error or 1 for bound in found.others) == pytest.approx(SHARED_ERROR)
    keys = [(bound.estimator, bound.guesses, bound.delta) for bound in (found.primary, *found.others)]
    assert len(keys) == len(set(keys)) == len(ESTIMATORS) * len(verdict.OTHER_GUESSES) * len(verdict.OTHER_DELTAS)
    assert found.primary.error == 0.05 and found.passes


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_any_primary_catches_half_the_noise(estimator):
    found = judge(scores(1.0), claim, Primary(estimator=estimator))
    assert found.primary.refutes and not found.passes


def test_another_bound_can_fail_a_run_whose_primary_passes():
    found = judge(scores(1.6), claim, Primary(guesses=2))
    assert not found.primary.refutes and not found.passes


def test_an_estimate_decides_nothing():
    found = judge(scores(0.55), claim, Primary())
    estimate = found.without_guarantee[0]
    assert estimate.epsilon and estimate.claim and estimate.epsilon > estimate.claim and not estimate.refutes
    assert found.passes and not estimate.guarantee


def test_the_estimate_is_close_to_the_truth():
    found = judge(scores(1.0), claim, Primary())
    assert found.without_guarantee[0].epsilon == pytest.approx(closed_form.epsilon(1.0, 1e-5), rel=0.1)


def test_scores_without_noise_are_judged():
    is_in = np.arange(M) % 2 == 0
    found = judge({"gradient": (is_in.astype(float), is_in)}, claim, Primary())
    assert found.primary.refutes and found.without_guarantee[0].epsilon == math.inf


def test_a_bound_at_the_claim_is_no_refutation():
    bound = judge(scores(0.5), claim, Primary()).primary
    assert bound.epsilon
    for claimed, refutes in ((bound.epsilon, False), (bound.epsilon / 2, True)):
        assert judge(scores(0.5), lambda _, claimed=claimed: claimed, Primary()).primary.refutes is refutes


def test_scores_of_two_kinds_share_the_error_of_the_others():
    both = scores(0.5) | {"loss": scores(0.5, seed=1)["gradient"]}
    found = judge(both, claim, Primary())
    assert {bound.score for bound in found.others} == {"gradient", "loss"}
    assert sum(bound.error or 1 for bound in found.others) == pytest.approx(SHARED_ERROR)
    assert len(found.others) == 2 * len(ESTIMATORS) * len(verdict.OTHER_GUESSES) * len(verdict.OTHER_DELTAS) - 1
    assert judge(both, claim, Primary(score="loss")).primary.score == "loss"


def test_a_bound_of_another_score_fails_a_run_too():
    both = scores(0.5) | {"loss": scores(1.6)["gradient"]}
    document = to_json(judge(both, claim, Primary()))
    assert not document["primary"]["refutes"] and not document["passes"]
    with pytest.raises(ConfigError, match="^audit: the lower bound .*loss.* exceeds the claim"):
        require_passes(document)


def test_a_gaussian_bound_is_drawn_from_a_gaussian_claim_alone():
    found = judge(scores(0.5), claim, Primary(), is_gaussian=False)
    assert {bound.estimator for bound in (found.primary, *found.others)} == {"one_run", "f_dp"}
    with pytest.raises(ConfigError, match="^estimator=gaussian_dp"):
        judge(scores(0.5), claim, Primary(estimator="gaussian_dp"), is_gaussian=False)


def test_a_score_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="^score=loss"):
        judge(scores(0.5), claim, Primary(score="loss"))


def test_the_document_is_json():
    assert json.loads(json.dumps(to_json(judge(scores(0.5), claim, Primary()))))["primary"]["guesses"] == 400


@pytest.mark.parametrize(("changes", "word"), [({"guesses": 3}, "guesses=3"), ({"delta": 0.0}, "delta=0.0"), ({"error": 1.0}, "error=1.0")])
def test_a_primary_that_cannot_stand_is_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        Primary(**changes)
