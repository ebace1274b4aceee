"""Computes epsilon of many noisy sums by dp-accounting; equal releases are merged, and its warnings are suppressed."""

import contextlib
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import dp_accounting
import numpy as np
from dp_accounting import dp_event, pld, rdp

from dpx.declaration import require
from dpx.privacy import allocation, cache, closed_form, events, gaussian_losses, loss_grid
from dpx.privacy.allocation import RandomAllocationGaussianDpEvent
from dpx.privacy.events import Release

Charges = list[tuple[Release, int]]
Real = float | int

# Distinct sampling probabilities that are composed one by one; a ramp of more is rounded up to this many.
RATES_MAX = 30

# Below this the float64 convolutions of dp-accounting's PLD carry rounding of the same size as delta.
SMALLEST_DELTA = {"pld": 1e-13, "rdp": 0.0, "deterministic": 0.0}


@runtime_checkable
class Composition(Protocol):
    """The composition of all charges of a run: epsilon at any delta, and delta at any epsilon."""

    def epsilon(self, delta: float, /) -> float:
        """Returns an upper bound on epsilon at `delta`; `math.inf` if no finite bound is found."""
        ...

    def delta(self, epsilon: float, /) -> float:
        """Returns an upper bound on delta at `epsilon`, at most 1."""
        ...


class _Renyi(rdp.RdpAccountant):
    """dp-accounting's RDP with a margin for rounding, because for q below about 1e-8 its float64 sums can come out as 0 or less."""

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, RandomAllocationGaussianDpEvent):
            if do_compose:
                self._rdp = self._rdp + count * _divergences_of_epoch(event, tuple(self._orders))
            return None
        if not do_compose or not isinstance(event, _SAMPLED):
            return super()._maybe_compose(event, count, do_compose)
        orders = tuple(self._orders)
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            alpha, q = np.asarray(orders, float), event.sampling_probability
            # log-sum-exp of terms up to alpha*q in size, log-gamma off by 1e-13 relative at alpha = 1024.
            margin = (1e-15 + 1e-13 * alpha * q) * alpha / (alpha - 1) if q < 1 else np.zeros_like(alpha)
            self._rdp = self._rdp + count * margin
        self._rdp = self._rdp + count * _divergences_of_one(event, orders, self.neighboring_relation)
        return None

    def epsilon(self, delta: float) -> float:
        return float(self.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.get_delta(epsilon))


# The charges of a run are composed many times during the run; the cost of one step is the same each time.
@functools.lru_cache(maxsize=256)
def _divergences_of_one(event: dp_accounting.DpEvent, orders: tuple[float, ...], relation: dp_accounting.NeighboringRelation) -> np.ndarray:
    """Returns the Renyi divergences of one sampled release, as dp-accounting adds them up."""
    one: Any = rdp.RdpAccountant(list(orders), relation)
    return one.compose(event)._rdp


_divergences_of_epoch = functools.lru_cache(maxsize=64)(allocation.divergences)


class _Losses(pld.PLDAccountant):
    """dp-accounting's PLD with the methods `epsilon` and `delta`, and with a margin in delta for rounding errors of either sign."""

    def __init__(self, relation: dp_accounting.NeighboringRelation, interval: float, margin: float):
        super().__init__(relation, interval)
        self._margin = margin

    def _maybe_compose(self, event, count, do_compose):
        is_own = isinstance(event, gaussian_losses.RevealedGaussianDpEvent | RandomAllocationGaussianDpEvent)
        if is_own and not do_compose:
            return None
        if do_compose and isinstance(event, dp_accounting.GaussianDpEvent) and event.noise_multiplier > 0:
            # As dp-accounting, which computes it one loss at a time.
            all_of_them = dp_accounting.GaussianDpEvent(event.noise_multiplier / math.sqrt(count))
            self._pld = self._pld.compose(_losses_of_one(all_of_them, self._value_discretization_interval, self.neighboring_relation))
            return None
        if not do_compose or not (is_own or isinstance(event, _SAMPLED) and _is_noisy(event)):
            return super()._maybe_compose(event, count, do_compose)
        one = _losses_of_one(event, self._value_discretization_interval, self.neighboring_relation)
        if count > _FEW:
            # dp-accounting chooses the form by size ** count, an integer with millions of digits for millions of steps.
            of_adding = None if one._symmetric else one._pmf_add.to_dense_pmf()
            one = type(one)(one._pmf_remove.to_dense_pmf(), of_adding)
        self._pld = self._pld.compose(one.self_compose(count))
        return None

    def epsilon(self, delta: float) -> float:
        margin = self._allowed(delta)
        return float(self.get_epsilon(delta - margin)) if delta > margin else math.inf

    def delta(self, epsilon: float) -> float:
        bound = float(self.get_delta(epsilon))
        return min(1.0, bound + self._allowed(bound))

    def _allowed(self, delta: float) -> float:
        # A margin below a thousandth of delta moves epsilon by less than the grid does; without the margin anyone can recompute a statement
        # to its last digit.
        return self._margin if self._margin > 1e-3 * delta else 0.0


# Releases whose distribution takes longest to compute, again for every grid: seconds on the finest grid.
_SAMPLED = (
    dp_accounting.PoissonSampledDpEvent,
    dp_accounting.SampledWithoutReplacementDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
    dp_event.MixtureOfGaussiansDpEvent,
)


def _is_noisy(event: Any) -> bool:
    """Returns whether `event` is a sampled Gaussian release with noise; dp-accounting has separate branches for all other events."""
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return event.standard_deviation > 0 and any(event.sensitivities)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        inner = event.event
        return isinstance(inner, dp_accounting.GaussianDpEvent) and inner.noise_multiplier > 0 and event.sampling_probability > 0
    return isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent) and event.noise_multiplier > 0 and event.sampling_probability > 0


# Above this number of compositions, dp-accounting also composes distributions of two or more losses as arrays.
_FEW = 1000


# More entries than a ramp has rates; a distribution takes about a megabyte, four at most.
@functools.lru_cache(maxsize=40)
def _losses_of_one(event: Any, interval: float, relation: dp_accounting.NeighboringRelation) -> Any:
    """Returns the privacy losses of one release on a grid of width `interval`.

    dp-accounting computes the same losses with its own arguments.
    """
    if isinstance(event, gaussian_losses.RevealedGaussianDpEvent):
        return gaussian_losses.of_revealed_draw(event, interval)
    if isinstance(event, RandomAllocationGaussianDpEvent):
        return allocation.of_epoch(event, interval)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return gaussian_losses.of_poisson_sample(event.noise_multiplier, 1.0, interval, relation)
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return pld.privacy_loss_distribution.from_mixture_gaussian_mechanism(
            event.standard_deviation, event.sensitivities, event.sampling_probs, value_discretization_interval=interval
        )
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        q, size, cap = event.sampling_probability, event.dataset_size, event.truncated_batch_size
        return gaussian_losses.of_truncated_sample(event.noise_multiplier, q, size, cap, interval, relation)
    return gaussian_losses.of_poisson_sample(event.event.noise_multiplier, event.sampling_probability, interval, relation)


# dp-accounting computes e to the power of one step of the grid: above about 709 this overflows float64.
_WIDEST_GRID = 600.0


def compose(
    charges: Charges,
    accountant: str = "pld",
    adjacency: str = "zero_out",
    orders: Sequence[Real] | None = None,
    interval: float | None = None,
    coarse: float | None = None,
) -> Composition:
    """Composes the charges of a run by one accountant.

    Args:
        charges: Pairs of a `dpx.privacy.events.Release` and the number of steps that made it.
        accountant: "pld" (privacy loss distributions, Koskela et al. 2020), "rdp" (Renyi divergences, Mironov 2017, converted by Canonne
            et al. 2020) or "deterministic" (Gaussian profiles without sampling, Balle and Wang 2018).
        adjacency: "zero_out", "add_remove" or "replace_one".
        orders: Renyi orders above 1, for "rdp"; `None` for those of dp-accounting.
        interval: The width of the grid of privacy losses, for "pld". A coarser grid is faster, and its epsilon is never below the exact
            value; `None` chooses the width (`loss_grid.grid`).
        coarse: The largest width of that grid, if it is to be coarser than the chosen one: epsilon is then never below that of
            `None` (`loss_grid.coarser`).

    Returns:
        Epsilon and delta as functions of each other, both upper bounds.

    Raises:
        ConfigError: If the accountant has no bound for such a release under this adjacency.
    """
    event, relation = events.composed(charges, adjacency, accountant), events.RELATION[adjacency]
    if kinds := sorted({type(events.from_text(one.event, adjacency)).__name__ for one, _ in charges if one.event}):
        # An event that a package defined.
        known = pld.PLDAccountant(relation) if accountant == "pld" else rdp.RdpAccountant(neighboring_relation=relation)
        reason = f"dp-accounting cannot compose {', '.join(kinds)} with this accountant under adjacency={adjacency}"
        fix = f"Use accountant={'rdp' if accountant == 'pld' else 'pld'}, or another sampler"
        require(known.supports(event), f"accountant={accountant}", reason, fix)
    merged = tuple(events.merge(charges))
    if accountant == "pld":
        grid = interval or loss_grid.coarser(charges, adjacency, coarse)
        require(
            grid <= _WIDEST_GRID,
            "accountant=pld",
            "the noise is so small that its privacy losses exceed the range of the grid",
            "Use accountant=deterministic or rdp, or more noise",
        )
        # A composition with an interval is needed once: in the cache it would displace the compositions that statements need again.
        made = partial(_composed_losses if interval is None else _compose_losses, merged, adjacency, grid, loss_grid.rounding(charges))
        by = {"grid": grid}
    elif accountant == "deterministic":
        made, by = partial(closed_form.Gaussians, event), {}
    else:
        proved = proved_orders(charges, orders)
        made, by = partial(renyi, event, adjacency, proved), {"orders": None if proved is None else list(proved)}
    # The compositions of a search for noise have an interval: its result is kept instead.
    if interval is not None or not cache.is_keeping():
        return made()
    # Every field, since the repr of a release leaves out the event of a package.
    content = [[asdict(release), count] for release, count in merged]
    return _Kept({"charges": content, "by": [accountant, adjacency], **by}, made)


class _Kept:
    """A composition whose epsilons are kept on disk; it is made where one of them is not there yet."""

    def __init__(self, question: dict[str, Any], made: Callable[[], Composition]):
        self._question, self._made = question, made

    def epsilon(self, delta: float) -> float:
        question = self._question | {"delta": delta}
        kept = cache.read("epsilon", question)
        if kept is None:
            kept = self._made().epsilon(delta)
            cache.write("epsilon", question, kept)
        return kept

    def delta(self, epsilon: float) -> float:
        return self._made().delta(epsilon)


def _compose_losses(charges: tuple[tuple[Release, int], ...], adjacency: str, interval: float, rounding: float) -> Composition:
    event = events.composed(list(charges), adjacency, "pld")
    with quiet():
        return _Losses(events.RELATION[adjacency], interval, rounding).compose(event)  # pyright: ignore[reportReturnType]


# Statements need the composition of the planned end many times; a composition takes a few megabytes.
_composed_losses = functools.lru_cache(maxsize=8)(_compose_losses)


def renyi(event: dp_accounting.DpEvent, adjacency: str = "zero_out", orders: Sequence[Real] | None = None) -> Composition:
    """Composes an event by Renyi accounting; raises what dp-accounting raises for an unknown event."""
    with quiet():
        return _Renyi(orders, events.RELATION[adjacency]).compose(event)  # pyright: ignore[reportReturnType]


# For discrete noise, bounds are proved only at these orders.
INTEGER_ORDERS = (*range(2, 65), 96, 128, 192, 256, 512, 1024)


def proved_orders(charges: Charges, orders: Sequence[Real] | None) -> Sequence[Real] | None:
    """Returns the Renyi orders at which `charges` have a bound: all of `orders`, or only whole orders if noise is discrete."""
    if not any(release.is_discrete for release, _ in charges):
        return orders
    whole = [float(order) for order in orders or INTEGER_ORDERS if float(order).is_integer()]
    require(bool(whole), f"accountant.orders={orders}", "integer noise has a bound at integer orders only", "Add orders 2 to 64")
    return whole


def bucketed(charges: Charges, rates: int | None = None, *, up: bool = True) -> Charges:
    """Returns charges with at most `rates` (`RATES_MAX`) distinct sampling probabilities for each kind and noise, each rounded up.

    A larger q never lowers epsilon, so the result bounds the original: by 0.3 % at 30 rates of a linear ramp (`rounding_error`). All rates
    of one bucket get its largest rate, or with `up=False` all but the largest its smallest; buckets have equal width in q.
    """
    rates = rates or RATES_MAX
    alike: dict[Release, Charges] = {}
    for release, count in events.merge(charges):
        alike.setdefault(replace(release, sampling_probability=1.0), []).append((release, count))
    rounded: Charges = []
    for group in alike.values():
        if len(group) <= rates:
            rounded += group
            continue
        qs = np.array([release.sampling_probability for release, _ in group])
        limits = np.linspace(qs.min(), qs.max(), rates + 1)[1:]
        place = np.minimum(np.searchsorted(limits, qs * (1 - 1e-12)), rates - 1)
        shared = qs.copy()
        for bucket in np.unique(place):
            inside = place == bucket
            top = qs[inside].max()
            shared[inside] = top if up else np.where(qs[inside] == top, top, qs[inside].min())
        rounded += [(replace(release, sampling_probability=float(q)), count) for (release, count), q in zip(group, shared, strict=True)]
    return events.merge(rounded)


def rounding_error(charges: Charges, delta: Real, adjacency: str = "zero_out", rates: int | None = None, accountant: str = "rdp") -> float:
    """Returns the most that `bucketed` can raise epsilon at `delta`: the difference from the same buckets rounded down."""
    ends = [compose(bucketed(charges, rates, up=up), accountant, adjacency).epsilon(float(delta)) for up in (True, False)]
    return ends[0] - ends[1]


def check_delta(delta: Real, accountant: str) -> None:
    """Raises `ConfigError` for a delta outside (0, 1), or too small for the accountant's arithmetic."""
    require(0 < delta < 1, f"delta={delta}", "delta is a probability above 0 and below 1", "Use a value below 1/N")
    require(
        delta >= SMALLEST_DELTA.get(accountant, 0.0),
        f"delta={delta}",
        f"accountant={accountant} rounds at about 1e-15, so it cannot resolve this delta",
        "Use accountant=rdp",
    )


def charges_of(stages: Iterable[Sequence[Real]], noise_multiplier: Real, sampler: str = "poisson") -> Charges:
    """Returns the charges of stages `[(q, steps), ...]` at one noise multiplier, for samplers that q alone describes.

    A long ramp of q is rounded up (`bucketed`).
    """
    kind: Any = sampler
    fix = "Use sampler=poisson, or dpx.privacy.compose"
    require(sampler in ("poisson", "gaussian", "slot_revealed"), f"sampler={sampler}", "has further parameters than (q, steps)", fix)
    require(_is_number(noise_multiplier), f"noise_multiplier={noise_multiplier!r}", "is not one number", "Give the noise multiplier")
    given: Any = stages
    fix = "Give a list of pairs, such as [(0.01, 1000)]"
    require(isinstance(given, Iterable), f"stages={given!r}", "is not a list of pairs (q, steps)", fix)
    charges: Charges = []
    for one in given:
        pair: list[Any] = list(one) if isinstance(one, Iterable) else []
        require(len(pair) == 2 and all(map(_is_number, pair)), f"stages: {one!r}", "is not a pair (q, steps)", fix)
        q, steps = pair
        is_whole = math.isfinite(steps) and steps == int(steps) >= 0
        require(is_whole, f"steps={steps}", "is not a whole number, 0 or more", "Give the number of steps that have this q")
        charges.append((Release(noise_multiplier=noise_multiplier, sampling_probability=float(q), kind=kind), int(steps)))
    return bucketed(charges)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def epsilon(
    stages: Iterable[Sequence[Real]],
    *,
    noise_multiplier: Real,
    delta: Real,
    accountant: str = "pld",
    orders: Sequence[Real] | None = None,
    sampler: str = "poisson",
    adjacency: str = "zero_out",
) -> float:
    """Computes an upper bound on epsilon of a sequence of noisy clipped sums.

    Args:
        stages: Pairs (q, steps): the probability with which a step draws a given unit, and how many steps have it.
        noise_multiplier: The standard deviation of the noise on the sum, divided by the clipping norm.
        delta: The probability with which the bound may fail, above 0 and below 1; it should be far below one over the number of units.
        accountant: "pld", "rdp" or "deterministic", as for `compose`.
        orders: Renyi orders above 1, for "rdp"; `None` for those of dp-accounting.
        sampler: "poisson", if each unit is drawn independently, or "gaussian", if every unit takes part in every step.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Returns:
        Epsilon; `math.inf` if no accountant finds a finite bound.

    Raises:
        ConfigError: For a delta that the accountant cannot resolve over so many steps, for another sampler, and if the accountant has no
            bound.

    Example:
        >>> import dpx
        >>> stages = [(0.01, 1000)]
        >>> round(dpx.privacy.epsilon(stages, noise_multiplier=1.0, delta=1e-5, accountant="rdp"), 2)
        2.1
    """
    check_delta(delta, accountant)
    charges = charges_of(stages, noise_multiplier, sampler)
    found = compose(charges, accountant, adjacency, orders).epsilon(delta)
    if math.isinf(found) and accountant == "pld":
        by_rdp = compose(charges, "rdp", adjacency, orders).epsilon(delta)
        reason = f"its grid cannot resolve delta={delta:g} over these steps, and accountant=rdp finds epsilon {by_rdp:.4g}"
        require(math.isinf(by_rdp), f"accountant={accountant}", reason, "Use accountant=rdp")
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses dp-accounting's warnings that a fractional order was dropped: a dropped order only loosens the bound."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(before)


def finite(value: float) -> float | None:
    """Returns `value` for JSON, which has no infinity: `None` if no finite bound was found."""
    return value if math.isfinite(value) else None
