"""What an audit may conclude: one primary bound at its own error, all others at 0.001 together, estimates at none.

A bound that exceeds the claim at its delta fails the run. An estimate without a finite-sample guarantee is written down and
can neither fail a run nor pass one.

Shape legend: M canaries.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from dpx.audit import one_run, trade_off
from dpx.audit.guesses import Guesses, guess
from dpx.declaration import declaration, require
from dpx.privacy import closed_form

Estimator = Literal["one_run", "f_dp", "gaussian_dp"]
# (guesses, delta, error) -> a lower bound on epsilon at delta that holds with probability 1 - error.
ESTIMATORS: dict[str, Callable[[Guesses, float, float], float]] = {
    "one_run": one_run.epsilon_lower_bound,
    "f_dp": trade_off.epsilon_lower_bound,
    "gaussian_dp": trade_off.gaussian_epsilon_lower_bound,
}
# What every combination but the primary shares.
SHARED_ERROR = 0.001
OTHER_GUESSES = (100, 400, 1000)
OTHER_DELTAS = (1e-5, 1e-6)


@declaration
class Primary:
    """The combination that was declared before anything ran. `gaussian_dp` needs a claim that is a Gaussian curve."""

    estimator: Estimator = "one_run"
    score: Literal["inner_product"] = "inner_product"
    guesses: int = 400
    delta: float = 1e-5
    error: float = 0.05

    def __post_init__(self) -> None:
        require(
            self.guesses > 0 and self.guesses % 2 == 0,
            f"guesses={self.guesses}",
            "as many coins are guessed in as out",
            "Use an even number",
        )
        require(
            0 < self.delta < 1, f"delta={self.delta}", "delta is a probability above 0 and below 1", "Use a value below 1 over the canaries"
        )
        require(0 < self.error < 1, f"error={self.error}", "an error is a probability above 0 and below 1", "Use 0.05 or less")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon beside the claim at the same delta. Without `guarantee` it decides nothing."""

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
        return self.guarantee and self.epsilon > self.claim


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`primary` and `others` decide, `estimates` inform."""

    primary: Bound
    others: tuple[Bound, ...]
    estimates: tuple[Bound, ...]

    @property
    def refuting(self) -> tuple[Bound, ...]:
        """Bounds above their claim, the primary first."""
        return tuple(bound for bound in (self.primary, *self.others) if bound.refutes)

    def as_json(self) -> dict[str, Any]:
        def listed(bounds: Sequence[Bound]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(bound) | {"refutes": bound.refutes} for bound in bounds]

        return {
            "passes": not self.refuting,
            "primary": listed([self.primary])[0],
            "others": listed(self.others),
            "without_guarantee": listed(self.estimates),
        }


def judge(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"], claim: Callable[[float], float], primary: Primary) -> Verdict:
    """Every bound the scores allow; `claim(delta)` is the epsilon that is claimed at `delta`."""
    declared = (primary.estimator, primary.guesses, primary.delta)
    combinations = [(name, r, delta) for name in ESTIMATORS for r in OTHER_GUESSES if r <= len(scores_M) for delta in OTHER_DELTAS]
    combinations = [combination for combination in combinations if combination != declared]

    def bound(name: str, guesses: int, delta: float, error: float) -> Bound:
        seen = guess(scores_M, is_in_M, guesses)
        return Bound(name, guesses, seen.correct, delta, error, ESTIMATORS[name](seen, delta, error), claim(delta))

    others = tuple(bound(*combination, SHARED_ERROR / len(combinations)) for combination in combinations)
    estimates = tuple(_plug_in(scores_M, is_in_M, delta, claim) for delta in OTHER_DELTAS)
    return Verdict(bound(*declared, primary.error), others, estimates)


def _plug_in(scores_M: np.ndarray, is_in_M: np.ndarray, delta: float, claim: Callable[[float], float]) -> Bound:
    """Epsilon of the Gaussian whose mu is the standardised difference of the two groups' means; no error is known for it."""
    inside, outside = scores_M[is_in_M], scores_M[~is_in_M]
    deviation = math.sqrt((inside.var() + outside.var()) / 2)
    mu = abs(float(inside.mean() - outside.mean())) / deviation if deviation > 0 else math.inf
    epsilon = closed_form.epsilon(mu, delta) if 0 < mu < 30 else math.inf if mu else 0.0
    return Bound("plug_in_gaussian", len(scores_M), 0, delta, None, epsilon, claim(delta), guarantee=False)
