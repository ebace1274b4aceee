"""Declares canaries that are trained with a run. The conclusions that an audit may draw are fixed here, before anything runs."""

from typing import Literal

from dpx.declaration import declaration, require
from dpx.privacy.declared_privacy import Privacy

Estimator = Literal["one_run", "f_dp", "gaussian_dp"]
Score = Literal["gradient", "loss"]


@declaration
class Primary:
    """The one combination that is declared in advance, with its own error.

    Attributes:
        estimator: Lower bound on epsilon: one_run, f_dp, or gaussian_dp, which needs a privacy statement that is a Gaussian curve.
        score: What is compared: the gradient canaries or the loss of the sequence canaries.
        guesses: Number of canaries that are guessed, the others are left out.
        delta: Delta at which the lower bound is computed.
        error: Probability with which the lower bound may be wrong.
    """

    estimator: Estimator = "one_run"
    score: Score = "gradient"
    guesses: int = 400
    delta: float = 1e-5
    error: float = 0.05

    def __post_init__(self) -> None:
        require(
            self.guesses > 0 and self.guesses % 2 == 0,
            f"guesses={self.guesses}",
            "half of the guesses say in and half say out, so their number must be even",
            "Use an even number",
        )
        require(
            0 < self.delta < 1, f"delta={self.delta}", "delta is a probability above 0 and below 1", "Use a value below 1 over the canaries"
        )
        require(0 < self.error < 1, f"error={self.error}", "an error is a probability above 0 and below 1", "Use 0.05 or less")


@declaration
class NoCanaries:
    """A run without an audit."""

    name: Literal["none"] = "none"

    def places(self, privacy: Privacy) -> int:
        """Returns the number of units that canaries add to N."""
        return 0


@declaration
class Canaries:
    """Units that are planted among the protected ones, each in or out by its own secret coin, and drawn and clipped like any other.

    A gradient canary (Dirac) has a gradient along its own coordinate, of ten times the clipping norm; its score comes from the noisy sums
    on that coordinate. A sequence canary is random text, scored by its mean loss under the final parameters. Every combination but the
    primary one shares an error of 0.001.

    Attributes:
        gradients: Number of gradient canaries.
        sequences: Number of sequence canaries.
        primary: The combination that is declared in advance.
        masks: Draws of what is hidden, over which the loss of a sequence canary is averaged.
    """

    gradients: int
    sequences: int
    primary: Primary
    masks: int = 8
    name: Literal["canaries"] = "canaries"

    def __post_init__(self) -> None:
        require(self.gradients >= 0, f"audit.gradients={self.gradients}", "a number of canaries cannot be negative", "Use 0 or more")
        require(self.sequences >= 0, f"audit.sequences={self.sequences}", "a number of canaries cannot be negative", "Use 0 or more")
        require(self.masks > 0, f"audit.masks={self.masks}", "canaries would not be scored", "Use 1 or more")
        known = {"gradient": self.gradients, "loss": self.sequences}[self.primary.score]
        require(
            self.primary.guesses <= known,
            f"audit.primary.guesses={self.primary.guesses}",
            f"there are {known} canaries with score={self.primary.score}",
            "Plant more, guess fewer, or declare the other score",
        )

    @property
    def count(self) -> int:
        """Returns the number of canaries."""
        return self.gradients + self.sequences

    def places(self, privacy: Privacy) -> int:
        """Returns the number that canaries add to N.

        It counts units or, if rows are drawn singly, as many rows for each canary as a unit may have.
        """
        return self.count * self.places_each(privacy)

    def places_each(self, privacy: Privacy) -> int:
        """Returns the number of places of one canary."""
        return privacy.rows_per_unit_max if privacy.unit_mode == "group" else 1


Audit = NoCanaries | Canaries
