"""Computes privacy losses of Gaussian releases whose draws are hidden by sampling, or seen by everyone.

Those of sampled releases are the same to the bit as dp-accounting's, with the outcomes of a whole grid computed at once. dp-accounting
inverts one privacy loss at a time, which takes half of the time of composing a step.
"""

from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.stats import binom

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


class GaussianLosses(GaussianPrivacyLoss):
    """dp-accounting's privacy loss of a Gaussian release under Poisson sampling, evaluated on all losses of a grid at once."""

    _known: dict[float, float] = {}

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """Returns the hockey-stick divergence at each of `epsilon`, a number or an array: the same floats as dp-accounting's."""
        if np.ndim(epsilon) == 0 or self.sampling_prob == 1 or self.adjacency_type == AdjacencyType.REPLACE:
            return super().get_delta_for_epsilon(epsilon)
        self._known = _outcome_of_each(self, np.asarray(epsilon))
        try:
            return super().get_delta_for_epsilon(epsilon)
        finally:
            self._known = {}

    def inverse_privacy_loss(self, privacy_loss: float) -> float:
        """Returns the outcome at which the loss is `privacy_loss`."""
        known = self._known.get(privacy_loss)
        return super().inverse_privacy_loss(privacy_loss) if known is None else known


def _outcome_of_each(mechanism: GaussianPrivacyLoss, losses_P: np.ndarray) -> dict[float, float]:
    """Returns the outcome of each loss.

    It leaves out losses that no outcome has, and those for which dp-accounting has another formula.
    """
    q, removes = mechanism.sampling_prob, mechanism.adjacency_type == AdjacencyType.REMOVE
    sign = 1.0 if removes else -1.0
    inside_P = sign * losses_P > np.log1p(-q)
    inside_P &= ~np.isclose(losses_P, sign * np.log(1 - q), rtol=1e-8) & (losses_P != 0)
    losses_P = losses_P[inside_P]
    unsampled_P = sign * _log_of_affine(1 / q, sign * losses_P, 1 - 1 / q)
    # Declared for one loss, it takes an array as well.
    invert: Any = mechanism._inverse_privacy_loss_without_subsampling_remove
    outcomes_P = invert(unsampled_P) + (0 if removes else mechanism.sensitivity)
    return dict(zip(losses_P.tolist(), outcomes_P.tolist(), strict=True))


def _log_of_affine(a: float, b_P: np.ndarray, c: float) -> np.ndarray:
    """Returns log(a exp(b) + c) of each b, for a > 0 and c <= 0, by the same operations as dp-accounting for one b."""
    shifted_P = b_P + np.log(a)
    return shifted_P if c == 0 else shifted_P + np.log1p(-np.exp(np.log(-c) - shifted_P))


def of_poisson_sample(sigma: float, q: float, interval: float, relation: dp_accounting.NeighboringRelation) -> Any:
    """Returns the loss distribution of a Gaussian release on a Poisson sample, as `from_gaussian_mechanism` of dp-accounting makes it.

    Args:
        sigma: The standard deviation of the noise for a sensitivity of 1.
        q: The sampling probability, in (0, 1].
        interval: The width of the grid of losses.
        relation: dp-accounting's neighbouring relation.

    Returns:
        A `PrivacyLossDistribution`, rounded upward by connect-the-dots (Doroshenko et al. 2022).
    """

    def on_the_grid(adjacency: AdjacencyType) -> Any:
        losses = GaussianLosses(sigma, sampling_prob=q, adjacency_type=adjacency)
        return distribution._create_pld_pmf_from_monotone_privacy_loss(
            losses, value_discretization_interval=interval, use_connect_dots=True
        )

    if relation == REPLACE_ONE:
        return distribution.PrivacyLossDistribution(on_the_grid(AdjacencyType.REPLACE))
    return distribution._pld_for_subsampled_mechanism(on_the_grid, q)


def of_truncated_sample(sigma: float, q: float, size: int, cap: int, interval: float, relation: dp_accounting.NeighboringRelation) -> Any:
    """Returns the loss distribution of a Gaussian release on a Poisson sample of `size` units that is cut to `cap`.

    It is that of dp-accounting's `from_truncated_subsampled_gaussian_mechanism`; the other arguments are those of `of_poisson_sample`.
    """
    not_full = of_poisson_sample(sigma, q, interval, relation)
    full = float(binom.sf(cap - 1, size - 1, q))
    if full == 0.0:
        return not_full
    # In a full batch the unit replaces another one: at twice the sensitivity, and at the rate of a unit in full batches.
    rate = float(binom.sf(cap, size, q) * cap / full / size)
    return of_poisson_sample(sigma / 2, rate, interval, REPLACE_ONE).compute_mixture(not_full, full)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedGaussianDpEvent(dp_accounting.DpEvent):
    """The event of one draw: a Gaussian release with probability `sampling_probability`, and everyone sees whether it took place.

    Each of n draws takes a unit with probability p; if it does, the unit's vector of norm at most C is released with noise of standard
    deviation sigma C, in a place that shows whether it was taken. Both neighbours have the same draws, so the number K of uses is
    Binomial(n, p) in both, and given K the releases are one Gaussian of mu = sqrt(K) / sigma:

        delta(epsilon) = sum_k P(K = k) delta_Gaussian(epsilon; sqrt(k) / sigma),

    which `dpx.privacy.closed_form.delta_by_uses` computes for equal draws alone. The privacy losses of this event compose with those of
    other releases.

    A Poisson-sampled release hides who takes part, so its epsilon is many times smaller; it is not a bound here.
    """

    sampling_probability: float
    noise_multiplier: float


def of_revealed_draw(event: RevealedGaussianDpEvent, interval: float) -> distribution.PrivacyLossDistribution:
    """Returns the privacy losses of one draw on a grid of width `interval`.

    They are those of the Gaussian with the draw's probability, else exactly 0.

    A mixture whose component is seen has the mixture of the components' losses, so each part rounded up gives a bound.
    """
    taken = distribution.from_gaussian_mechanism(event.noise_multiplier, value_discretization_interval=interval)
    return taken.compute_mixture(distribution.identity(interval), event.sampling_probability)
