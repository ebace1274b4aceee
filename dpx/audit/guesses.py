"""Guesses of secret coins from scores: the outermost scores are guessed, the middle is left open.

Shape legend: M canaries.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from dpx.declaration import require


@dataclasses.dataclass(frozen=True)
class Guesses:
    """`correct` of exactly `guesses` guesses about `canaries` independent fair coins."""

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        fits = 0 <= self.correct <= self.guesses <= self.canaries and self.guesses > 0
        require(
            fits, f"guesses={self.guesses}", f"{self.correct} correct of {self.guesses} about {self.canaries} coins", "Guess some coins"
        )


def guess(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"], guesses: int) -> Guesses:
    """Guesses "in" for the highest half of `guesses` scores and "out" for the lowest, whatever the coins; ties by position."""
    require(
        guesses % 2 == 0 and 0 < guesses <= len(scores_M),
        f"guesses={guesses}",
        f"not an even number between 2 and the {len(scores_M)} canaries",
        "Guess as many coins to be in as out",
    )
    order = np.argsort(scores_M, kind="stable")
    correct = is_in_M[order[-guesses // 2 :]].sum() + (~is_in_M[order[: guesses // 2]]).sum()
    return Guesses(len(scores_M), guesses, int(correct))
