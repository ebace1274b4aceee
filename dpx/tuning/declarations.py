"""How the choice among the trials of a search is charged, as declared."""

from typing import Literal

from dpx.declaration import declaration, require


@declaration
class Tune:
    """A search of `trials` trials; under `repeat_and_select` that is the mean of their secret number and `shape` its distribution's."""

    charge: Literal["uncharged", "composition", "repeat_and_select"] = "uncharged"
    trials: int = 30
    shape: float = 1.0

    def __post_init__(self) -> None:
        require(self.trials >= 1, f"tune.trials={self.trials}", "a search has a trial", "Use 1 or more")
        require(self.shape >= 0, f"tune.shape={self.shape}", "no distribution has that shape", "Use 0 or more, .inf for Poisson")
