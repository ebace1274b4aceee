"""Draws the conclusions of an audit: one primary bound at its own error, all others at 0.001 together. Estimates prove nothing.

A combination is a score (with the coins of its canaries), an estimator, a number of guesses and a delta. A bound that
exceeds the claim at its delta fails the run. An estimate without a finite-sample guarantee is recorded and
can neither fail a run nor pass one.

Shape legend: M canaries.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from dpx.audit import one_run, trade_off
from dpx.audit.declarations import Primary
from dpx.audit.one_run import Guesses, guess
from dpx.declaration import ConfigError, require
from dpx.privacy import closed_form

# By the score's name: the scores of its canaries and their coins.
Scored = Mapping[str, tuple[Float[np.ndarray, " M"], Bool[np.ndarray, " M"]]]
# (guesses, delta, error) -> a lower bound on epsilon at delta that holds with probability 1 - error.
ESTIMATORS: dict[str, Callable[[Guesses, float, float], float]] = {
    "one_run": one_run.epsilon_lower_bound,
    "f_dp": trade_off.epsilon_lower_bound,
    "gaussian_dp": trade_off.gaussian_epsilon_lower_bound,
}
# The error that all combinations but the primary share.
SHARED_ERROR = 0.001
OTHER_GUESSES = (100, 400, 1000)
OTHER_DELTAS = (1e-5, 1e-6)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon beside the claimed epsilon at the same delta. Without `guarantee` it decides nothing."""

    score: str
    estimator: str
    guesses: int
    correct: int
    delta: float
    error: float | None
    epsilon: float
    claim: float
    guarantee: bool = True

    @property
    def refutes(self) -> bool:
        """Returns whether a bound with a guarantee exceeds the claimed epsilon."""
        return self.guarantee and self.epsilon > self.claim


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of an audit: `primary` and `others` decide, `estimates` only inform."""

    primary: Bound
    others: tuple[Bound, ...]
    estimates: tuple[Bound, ...]

    @property
    def refuting(self) -> tuple[Bound, ...]:
        """Returns the bounds above their claimed epsilon, the primary one first."""
        return tuple(bound for bound in (self.primary, *self.others) if bound.refutes)

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as JSON, in the form of `private/audit.json`."""

        def listed(bounds: Sequence[Bound]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(bound) | {"refutes": bound.refutes} for bound in bounds]

        return {
            "passes": not self.refuting,
            "primary": listed([self.primary])[0],
            "others": listed(self.others),
            "without_guarantee": listed(self.estimates),
        }


def judge(scored: Scored, claim: Callable[[float], float], primary: Primary, *, is_gaussian: bool = True) -> Verdict:
    """Returns the verdict with every bound that the scores allow; `claim(delta)` is the epsilon that is claimed at `delta`.

    `is_gaussian` says that the claimed curve is Gaussian; otherwise `gaussian_dp` proves nothing and is left out.
    Raises `ConfigError` if the primary bound cannot be computed.
    """
    declared = (primary.score, primary.estimator, primary.guesses, primary.delta)
    require(primary.score in scored, f"score={primary.score}", "no canary has this score", f"Use {', '.join(scored)}")
    require(
        is_gaussian or primary.estimator != "gaussian_dp",
        "estimator=gaussian_dp",
        "this estimator needs a claim that is a Gaussian curve, where every unit takes part in every release",
        "Use one_run or f_dp",
    )
    estimators = [name for name in ESTIMATORS if is_gaussian or name != "gaussian_dp"]
    combinations = [
        (score, name, guesses, delta)
        for score, (scores_M, _) in scored.items()
        for name in estimators
        for guesses in OTHER_GUESSES
        if guesses <= len(scores_M)
        for delta in OTHER_DELTAS
        if (score, name, guesses, delta) != declared
    ]

    def bound(score: str, name: str, guesses: int, delta: float, error: float) -> Bound:
        seen = guess(*scored[score], guesses)
        return Bound(score, name, guesses, seen.correct, delta, error, ESTIMATORS[name](seen, delta, error), claim(delta))

    others = tuple(bound(*combination, SHARED_ERROR / len(combinations)) for combination in combinations)
    estimates = tuple(_plug_in(score, *scored[score], delta, claim) for score in scored for delta in OTHER_DELTAS)
    return Verdict(bound(*declared, primary.error), others, estimates)


def require_passes(document: dict[str, Any]) -> None:
    """Raises `ConfigError` if a bound of `Verdict.as_json` exceeds its claim."""
    refuting = [bound for bound in (document["primary"], *document["others"]) if bound["refutes"]]
    if refuting:
        worst = max(refuting, key=lambda bound: bound["epsilon"] - bound["claim"])
        reason = f"the lower bound {worst['epsilon']:.3f} ({worst['estimator']}, {worst['score']}, {worst['guesses']} guesses)"
        reason += f" exceeds the claim {worst['claim']:.3f}"
        raise ConfigError("audit", reason, "Do not release outputs of this mechanism until its noise and its clipping are corrected")


def _plug_in(score: str, scores_M: np.ndarray, is_in_M: np.ndarray, delta: float, claim: Callable[[float], float]) -> Bound:
    """Returns epsilon of the Gaussian whose mu is the standardised difference of the two groups' means; no error is known for it."""
    inside, outside = scores_M[is_in_M], scores_M[~is_in_M]
    if not (len(inside) and len(outside)):
        return Bound(score, "plug_in_gaussian", len(scores_M), 0, delta, None, 0.0, claim(delta), guarantee=False)
    deviation = math.sqrt((inside.var() + outside.var()) / 2)
    mu = abs(float(inside.mean() - outside.mean())) / deviation if deviation > 0 else math.inf
    epsilon = closed_form.epsilon(mu, delta) if 0 < mu < 30 else math.inf if mu else 0.0
    return Bound(score, "plug_in_gaussian", len(scores_M), 0, delta, None, epsilon, claim(delta), guarantee=False)
