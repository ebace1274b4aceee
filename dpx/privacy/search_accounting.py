"""Charges a search for trials that were chosen after results: by a privacy filter, or by a number of repetitions drawn in secret.

A filter is a budget declared before the first trial, within which sampling, noise and steps may depend on earlier results. An accountant
proves nothing for events that were chosen after results: composition theorems fix the parameters beforehand. Rogers, Roth, Ullman and
Vadhan 2016 (arXiv 1605.08294) ask the question and define the filter: a rule that stops before a budget is passed. Two filters are proved
to cost no more than ordinary composition, and only they are used here:

- Renyi: for one order fixed beforehand, go on as long as the divergences of all mechanisms so far, the next one included, add up to at
  most the budget. All outputs together then have at most the budget's divergence at that order (Feldman and Zrnic 2021, arXiv
  2008.11193, theorem 4.3; Lecuyer 2021, arXiv 2103.01379). An order chosen after the results has no such theorem.
- zCDP: the same with the sum of rho (Whitehouse, Ramdas, Rogers and Wu 2023, arXiv 2203.05481, theorem 1 with all its deltas 0). It is
  the Renyi filter at all orders at once: divergence rho * order at each. Only Gaussian releases of everyone are charged by it.

Both hold for trials that are interleaved, such as one that is resumed after a later one began: filters at a fixed order extend to
concurrent composition (Haney and others 2023, arXiv 2309.05901). For whole privacy loss distributions, composing and stopping is no
filter in general ("Privacy Filters are Captured by Residues", arXiv 2602.15815), so accountant=pld is refused.

The budget becomes (epsilon, delta) by Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), proposition 12, as in dp-accounting, and for
zCDP by Bun and Steinke 2016 (arXiv 1605.02065), proposition 1.3.

A search may instead repeat a mechanism a secret, random number of times and release only the best result (Liu and Talwar 2019; Papernot and
Steinke 2022, theorem 2 for the truncated negative binomial, theorem 6 for Poisson). The repetitions must be independent draws of one
mechanism, their number independent of the data, and nothing but the winner released. The charge is that of the mechanism as declared: both
theorems use its divergences, never the results of single repetitions. So neither theorem applies if a repetition was lost, stopped or drawn
again (`dpx.claim.search_claim`).
"""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import Literal

import dp_accounting
from dp_accounting import dp_event, rdp

from dpx.declaration import ConfigError, require
from dpx.privacy import accounting, events
from dpx.privacy.accounting import Charges, Real

# Sums of costs and the budget are each rounded once or twice; neither may admit a trial that exceeds the budget.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Filter:
    """A declared budget (`epsilon`, `delta`), enforced by Renyi divergence at `order`, or by rho if `kind` is zcdp.

    For zcdp `order` is `None`.
    """

    kind: Literal["renyi", "zcdp"]
    epsilon: Real
    delta: Real
    order: Real | None
    adjacency: str

    def __post_init__(self) -> None:
        require(
            self.limit > 0,
            f"tune.budget.epsilon={self.epsilon}, tune.budget.order={self.order}",
            f"at delta {self.delta} the conversion from this order uses the whole budget",
            "Use a larger order, or a larger epsilon",
        )

    @property
    def accountant(self) -> str:
        """Returns the name of the accountant whose epsilon the filter states."""
        return "rdp" if self.kind == "renyi" else "zcdp"

    @property
    def limit(self) -> float:
        """Returns the largest sum of costs that converts to `epsilon` at `delta`; 0 or less if no sum does."""
        if self.kind == "zcdp":
            return zcdp_limit(self.epsilon, self.delta)
        assert self.order is not None
        return renyi_limit(self.epsilon, self.delta, self.order)

    def cost(self, charges: Charges) -> float:
        """Returns the part of `limit` that the `charges` use; costs add up. Raises `ConfigError` for charges without such a cost."""
        if not charges:
            return 0.0
        if self.kind == "zcdp":
            return zcdp(charges, self.adjacency)
        assert self.order is not None
        return renyi(charges, self.order, self.adjacency)

    def holds(self, charges: Charges) -> bool:
        """Returns whether all of `charges` together stay within the budget."""
        return self.cost(charges) * (1 + _ROUNDING) <= self.limit


def renyi(charges: Charges, order: Real, adjacency: str) -> float:
    """Returns the Renyi divergence of `charges` at one order, in nats; `math.inf` if no bound is found there."""
    require(
        float(order).is_integer() or not any(release.is_discrete for release, _ in charges),
        f"tune.budget.order={order}",
        "integer noise is bounded at integer orders only",
        "Use a whole order",
    )
    composed = accounting.compose(accounting.bucketed(charges), "rdp", adjacency, [float(order)])
    assert isinstance(composed, rdp.RdpAccountant)
    divergence = float(composed.rdp[0])
    return divergence if divergence >= 0 else math.inf


def renyi_limit(epsilon: Real, delta: Real, order: Real) -> float:
    """Returns the divergence at `order` that converts to `epsilon` at `delta`."""
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def zcdp(charges: Charges, adjacency: str) -> float:
    """Returns rho of `charges`: the sum of 1 / (2 z^2) over Gaussian releases of noise multiplier z.

    Raises `ConfigError` for other releases.
    """
    costs = []
    for release, count in charges:
        event = events.event(release, adjacency, "rdp")
        if isinstance(event, dp_accounting.PoissonSampledDpEvent) and event.sampling_probability == 1:
            event = event.event
        if not isinstance(event, dp_accounting.GaussianDpEvent) or release.is_discrete:
            value, reason = (
                f"tune.budget.kind=zcdp, sampler={release.kind}",
                "this budget covers only Gaussian noise on sums over all units",
            )
            raise ConfigError(value, reason, "Use tune.budget.kind=renyi with an order, or sampler=deterministic")
        costs.append(count / (2 * event.noise_multiplier**2))
    return math.fsum(costs)


def zcdp_limit(epsilon: Real, delta: Real) -> float:
    """Returns the rho for which rho + 2 (rho log(1 / delta))^(1/2) is `epsilon`."""
    wide = math.log(1 / delta)
    # The difference of two near roots, without cancellation.
    return (epsilon / (math.sqrt(wide + epsilon) + math.sqrt(wide))) ** 2


def repeated(charges: Charges, adjacency: str, mean: float | int, shape: float | int) -> dp_accounting.DpEvent:
    """Returns the event of the best of a random number of repetitions of `charges`; `shape` is infinite for Poisson."""
    return dp_event.RepeatAndSelectDpEvent(events.composed(charges, adjacency, "rdp"), float(mean), float(shape))


def epsilon(
    charges: Charges,
    *,
    delta: float,
    mean: float | int,
    shape: float | int,
    adjacency: str = "zero_out",
    orders: Sequence[float] | None = None,
) -> float:
    """Returns epsilon of the winner by Renyi accounting, the only accounting with a theorem for it; `math.inf` if it finds no bound."""
    accounting.check_delta(delta, "rdp")
    event = repeated(charges, adjacency, mean, shape)
    return accounting.renyi(event, adjacency, accounting.proved_orders(charges, orders)).epsilon(delta)


def draw(mean: float | int, shape: float | int) -> int:
    """Draws the number of repetitions from the operating system's randomness, by inversion; 0 is possible for Poisson alone.

    Store it: it is as secret as the noise, and a second draw would be another mechanism.
    """
    return quantile(secrets.SystemRandom().random(), float(mean), float(shape))


def quantile(uniform: float, mean: float, shape: float) -> int:
    """Returns the smallest number of repetitions whose distribution function is above `uniform`, a number in [0, 1).

    Raises `ConfigError` for a mean below 1 and for a `uniform` outside [0, 1).
    """
    require(mean >= 1, f"mean={mean}", "a search needs a mean of at least one trial", "Use 1 or more")
    require(0 <= uniform < 1, f"uniform={uniform}", "must be at least 0 and below 1", "Draw from [0, 1)")
    number, probability, ratio = _first(mean, shape)
    reached = probability
    while reached <= uniform and probability > 0:
        probability *= ratio(number)
        number += 1
        reached += probability
    return number


def _first(mean: float, shape: float):
    """Returns the smallest possible number, its probability, and the ratio P[k+1] / P[k] as a function of k."""
    if math.isinf(shape):
        return 0, math.exp(-mean), lambda k: mean / (k + 1)
    gamma = truncation(mean, shape)
    if gamma == 1:
        return 1, 1.0, lambda k: 0.0
    if shape == 0:
        return 1, (1 - gamma) / -math.log(gamma), lambda k: (1 - gamma) * k / (k + 1)
    # P[1] = shape (1 - gamma) / (gamma^-shape - 1); P[k+1] / P[k] = (1 - gamma) (k + shape) / (k + 1).
    return 1, shape * (1 - gamma) / math.expm1(-shape * math.log(gamma)), lambda k: (1 - gamma) * (k + shape) / (k + 1)


def truncation(mean: float, shape: float) -> float:
    """Returns the parameter gamma of the truncated negative binomial with that mean, rounded towards fewer repetitions."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if _mean(middle, shape) > mean:
            low = middle
        else:
            high = middle


def _mean(gamma: float, shape: float) -> float:
    if shape == 0:
        return (1 - gamma) / (gamma * -math.log(gamma))
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))
