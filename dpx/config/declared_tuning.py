"""Declarations of how the choice among the trials of a search is charged."""

from dataclasses import field
from typing import Literal

from dpx.declaration import MAY_BE_INFINITE, declaration, require

# How the choice among the trials of a search is charged.
Charge = Literal["uncharged", "composition", "repeat_and_select"]


@declaration
class Budget:
    """Declares the epsilon that all trials of a search may cost together, at the run's delta, declared before the first trial
    (`dpx.privacy.search_accounting`).

    Raises `ConfigError` for an `order` that does not fit `kind`.

    Attributes:
        kind: renyi adds costs at one Renyi order, zcdp adds rho and takes no order.
        epsilon: The budget; null means none.
        order: Renyi order (above 1) at which costs of trials are added, fixed beforehand.
    """

    kind: Literal["renyi", "zcdp"] = "renyi"
    epsilon: float | None = None
    order: float | None = None

    def __post_init__(self) -> None:
        if self.epsilon is None:
            is_left_out = self.order is None and self.kind == "renyi"
            require(is_left_out, "tune.budget", "has no epsilon", "Add tune.budget.epsilon, or remove the budget")
            return
        require(self.epsilon > 0, f"tune.budget.epsilon={self.epsilon}", "does not allow any trial", "Use a value above 0")
        if self.kind == "zcdp":
            require(self.order is None, f"tune.budget.order={self.order}", "a zCDP budget is valid at every order", "Remove the order")
            return
        require(
            self.order is not None and self.order > 1,
            f"tune.budget.order={self.order}",
            "the costs of trials are added up at one Renyi order above 1, which must be fixed before the first trial",
            "Use a value above 1, smaller the less noise there is, or tune.budget.kind=zcdp",
        )

    @property
    def is_declared(self) -> bool:
        return self.epsilon is not None


@declaration
class Tune:
    """Declares a search.

    Attributes:
        charge: How the choice among the trials is charged.
        trials: Number of trials; under repeat_and_select the mean of their secret number.
        shape: Shape of the secret number's distribution: 0 logarithmic, 1 geometric, .inf Poisson, others truncated negative binomial.
        budget: What all trials may cost together.
    """

    charge: Charge = "uncharged"
    trials: int = 30
    shape: float = field(default=1.0, metadata=MAY_BE_INFINITE)
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        require(self.trials >= 1, f"tune.trials={self.trials}", "a search needs at least one trial", "Use 1 or more")
        require(self.shape >= 0, f"tune.shape={self.shape}", "no distribution has that shape", "Use 0 or more, .inf for Poisson")
        require(
            self.charge == "composition" or not self.budget.is_declared,
            f"tune.budget.epsilon={self.budget.epsilon} with tune.charge={self.charge}",
            "a budget needs trials that are charged by composition",
            "Use tune.charge=composition, or remove the budget",
        )
