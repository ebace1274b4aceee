"""Computes lower bounds on epsilon from one run with many canaries (Steinke, Nasr and Jagielski 2023, theorem 5.2).

Of r guesses, the number of correct ones is at most W ~ Binomial(r, e^eps / (1 + e^eps)) in distribution, up to a term in delta:
P[correct >= v] <= P[W >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= W < v] / i, with m coins, abstentions included.

Shape legend: M canaries.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit
from scipy.stats import binom

from dpx.declaration import require

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


def epsilon_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
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
