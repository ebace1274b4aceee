"""Draws the conclusions of an audit: one primary bound at its own error, all others at 0.001 together. Estimates prove nothing.

A combination is a score (with the coins of its canaries), an estimator, a number of guesses and a delta. A bound that
exceeds the claim at its delta fails the run. An estimate without a finite-sample guarantee is recorded and
can neither fail a run nor pass one.

A whole trade-off curve is tested by one run with the f-DP argument of Mahloujifar, Melis and Chaudhuri 2024, for fair coins. Let a
mechanism be f-DP, F = 1 - f (concave, increasing), and let an attacker guess exactly r of m independent fair coins, N of them correctly,
with p_n = P[N = n]. Then, for every c >= 1,

    (1/m) sum_{n >= c} n p_n  <=  F((1/m) sum_{n >= c-1} (r - n) p_n).                                   (*)

Proof. Fix i and the other coins; the mechanism is f-DP in coin i. Let E be "coin i is guessed in, and at least c - 1 others
correctly": P[E | in] <= F(P[E | out]), and likewise with in and out exchanged. The mean of both over the coin, by concavity, is
P[i correct, others >= c-1] <= F(P[i wrong, others >= c-1]), and again the mean over i and the other coins, abstentions counting
zero on both sides. If i is correct, others >= c-1 says N >= c; if wrong, it says N >= c-1. Summing over i counts n, and r - n.

Given P[N >= v] = tau, the least total mass that satisfies (*) is found greedily from v down: mass moved from n to n - 1
loosens every constraint below and tightens none, so all of tau lies at v and each p_{c-1} is just what (*) asks for. Where
that total exceeds 1, P[N >= v] < tau: v correct guesses then refute f at error tau.

Epsilon has a lower bound from one run with many canaries (Steinke, Nasr and Jagielski 2023, theorem 5.2). Of r guesses, the number of
correct ones is at most W ~ Binomial(r, e^eps / (1 + e^eps)) in distribution, up to a term in delta: P[correct >= v] <= P[W >= v] + 2 m
delta max_{1 <= i <= v} P[v - i <= W < v] / i, with m coins, abstentions included.

Shape legend: M canaries.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from dpx.config.declared_audit import Primary
from dpx.declaration import ConfigError, require
from dpx.files.records import described, record
from dpx.privacy import closed_form
from dpx.privacy.lines import AuditBound, Verdict

# Searches end within this of the largest refuted epsilon, on its lower side.
RESOLUTION = 1e-3
# No search goes beyond this: a ratio of e^20 already distinguishes any two runs.
LARGEST = 20.0


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The number of `correct` guesses among exactly `guesses` guesses about `canaries` independent fair coins."""

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        fits = 0 <= self.correct <= self.guesses <= self.canaries and self.guesses > 0
        require(
            fits,
            f"guesses={self.guesses}",
            f"{self.correct} correct guesses of {self.guesses} about {self.canaries} coins are not possible counts",
            "Give 0 <= correct <= guesses <= canaries, with at least one guess",
        )


def guess(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"], guesses: int) -> Guesses:
    """Guesses "in" for the highest half of `guesses` scores and "out" for the lowest, whatever the coins; ties are broken by position."""
    require(
        guesses % 2 == 0 and 0 < guesses <= len(scores_M),
        f"guesses={guesses}",
        f"must be an even number between 2 and the number of canaries, {len(scores_M)}",
        "Guess in for half of the coins and out for the other half",
    )
    order = np.argsort(scores_M, kind="stable")
    correct = is_in_M[order[-guesses // 2 :]].sum() + (~is_in_M[order[: guesses // 2]]).sum()
    return Guesses(len(scores_M), guesses, int(correct))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Returns an upper bound on the probability that so many guesses are correct under an (epsilon, delta)-DP mechanism."""
    wins, chance = guesses.correct, expit(epsilon)
    if wins == 0:
        return 1.0
    reach = np.arange(1, wins + 1)
    near = np.cumsum(binom.pmf(wins - reach, guesses.guesses, chance))
    slack = 2 * guesses.canaries * delta * float(np.max(near / reach))
    return min(1.0, float(binom.sf(wins - 1, guesses.guesses, chance)) + slack)


def one_run_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
    """Returns a lower bound that is at most the true epsilon at `delta` with probability at least 1 - error."""
    return largest_refuted(lambda epsilon: p_value(guesses, epsilon, delta) < error)


def largest_refuted(is_refuted, largest: float = LARGEST) -> float:
    """Returns the largest value up to `largest` for which the monotone `is_refuted` holds, rounded down; 0 if no value is refuted."""
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, largest
    for _ in range(math.ceil(math.log2(largest / RESOLUTION))):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


# F's inverse: the least false-positive rate at which a true-positive rate can be reached.
Inverse = Callable[[float], float]


def gaussian(mu: float) -> Inverse:
    """Returns the inverse of the curve of mu-GDP, F(x) = Phi(Phi^-1(x) + mu) (Dong, Roth and Su 2022)."""
    return lambda rate: float(ndtr(ndtri(rate) - mu))


def approximate(epsilon: float, delta: float) -> Inverse:
    """Returns the inverse of the curve of (epsilon, delta)-DP, F(x) = min(delta + e^eps x, 1 - e^-eps (1 - delta - x))."""
    factor = math.exp(epsilon)
    return lambda rate: max(0.0, (rate - delta) / factor, 1 - delta - (1 - rate) * factor)


def refutes(guesses: Guesses, inverse: Inverse, error: float) -> bool:
    """Returns whether as many correct guesses have probability below `error` under every mechanism with this curve."""
    m, r = guesses.canaries, guesses.guesses
    total = error
    correct, wrong = guesses.correct * error, (r - guesses.correct) * error
    for c in range(guesses.correct, 0, -1):
        asked = m * inverse(min(1.0, correct / m))
        if asked > wrong:
            added = (asked - wrong) / (r - c + 1)
            total, correct, wrong = total + added, correct + (c - 1) * added, asked
            if total > 1:
                return True
    return False


def f_dp_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
    """Returns a lower bound that is at most the true epsilon at `delta` with probability at least 1 - error."""
    return largest_refuted(lambda epsilon: refutes(guesses, approximate(epsilon, delta), error))


def mu_lower_bound(guesses: Guesses, error: float) -> float:
    """Returns a lower bound that is at most the true mu of a mu-GDP mechanism with probability at least 1 - error."""
    return largest_refuted(lambda mu: refutes(guesses, gaussian(mu), error), largest=10.0)


def gaussian_dp_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
    """Returns epsilon at `delta` of `mu_lower_bound`: a bound only for mechanisms whose privacy curve is Gaussian."""
    mu = mu_lower_bound(guesses, error)
    return max(0.0, closed_form.epsilon(mu, delta) - 1e-6) if mu else 0.0


# By the score's name: the scores of its canaries and their coins.
Scored = Mapping[str, tuple[Float[np.ndarray, " M"], Bool[np.ndarray, " M"]]]
# (guesses, delta, error) -> a lower bound on epsilon at delta that holds with probability 1 - error.
ESTIMATORS: dict[str, Callable[[Guesses, float, float], float]] = {
    "one_run": one_run_lower_bound,
    "f_dp": f_dp_lower_bound,
    "gaussian_dp": gaussian_dp_lower_bound,
}
# The error that all combinations but the primary share.
SHARED_ERROR = 0.001
OTHER_GUESSES = (100, 400, 1000)
OTHER_DELTAS = (1e-5, 1e-6)


@record
class Judged(Verdict):
    """The whole result of an audit, as `private/audit.json` holds it: estimates beside the bounds that decide."""

    without_guarantee: tuple[AuditBound, ...] = described("Estimates, which only inform.")


def judge(scored: Scored, claim: Callable[[float], float], primary: Primary, *, is_gaussian: bool = True) -> Judged:
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

    def beside(score: str, name: str, guesses: int, correct: int, delta: float, error: float | None, epsilon: float) -> AuditBound:
        claimed = claim(delta)
        return AuditBound(
            score=score,
            estimator=name,
            guesses=guesses,
            correct=correct,
            delta=delta,
            error=error,
            epsilon=epsilon,
            claim=claimed,
            guarantee=error is not None,
            refutes=error is not None and epsilon > claimed,
        )

    def bound(score: str, name: str, guesses: int, delta: float, error: float) -> AuditBound:
        seen = guess(*scored[score], guesses)
        return beside(score, name, guesses, seen.correct, delta, error, ESTIMATORS[name](seen, delta, error))

    first = bound(*declared, primary.error)
    others = tuple(bound(*combination, SHARED_ERROR / len(combinations)) for combination in combinations)
    estimates = []
    for score, (scores_M, is_in_M) in scored.items():
        # Of the Gaussian whose mu is the standardised difference of the two groups' means; no error is known for it.
        inside, outside, mu = scores_M[is_in_M], scores_M[~is_in_M], 0.0
        if len(inside) and len(outside):
            deviation = math.sqrt((inside.var() + outside.var()) / 2)
            mu = abs(float(inside.mean() - outside.mean())) / deviation if deviation > 0 else math.inf
        for delta in OTHER_DELTAS:
            epsilon = closed_form.epsilon(mu, delta) if 0 < mu < 30 else math.inf if mu else 0.0
            estimates.append(beside(score, "plug_in_gaussian", len(scores_M), 0, delta, None, epsilon))
    passes = not any(one.refutes for one in (first, *others))
    return Judged(passes=passes, primary=first, others=others, without_guarantee=tuple(estimates))


def require_passes(document: dict[str, Any]) -> None:
    """Raises `ConfigError` if a bound of an audit, as JSON, exceeds its claim."""
    refuting = [bound for bound in (document["primary"], *document["others"]) if bound["refutes"]]
    if refuting:
        worst = max(refuting, key=lambda bound: bound["epsilon"] - bound["claim"])
        reason = f"the lower bound {worst['epsilon']:.3f} ({worst['estimator']}, {worst['score']}, {worst['guesses']} guesses)"
        reason += f" exceeds the claim {worst['claim']:.3f}"
        raise ConfigError("audit", reason, "Do not release outputs of this mechanism until its noise and its clipping are corrected")
