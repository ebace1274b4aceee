"""Computes privacy losses of Gaussian releases: sampled or not, and with draws that everyone sees.

Those of releases without such draws are the same to the bit as dp-accounting's, with the outcomes of a whole grid computed at once.
dp-accounting inverts one privacy loss at a time and passes the masses through a dictionary, which takes most of the time of composing.
"""

import math
from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.stats import binom

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


class GaussianLosses(GaussianPrivacyLoss):
    """dp-accounting's privacy loss of a Gaussian release, sampled or not, evaluated on all losses of a grid at once."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """Returns the hockey-stick divergence at each of `epsilon`, a number or an array: the same floats as dp-accounting's."""
        q, adjacency = self.sampling_prob, self.adjacency_type
        if np.ndim(epsilon) == 0 or (adjacency == AdjacencyType.REPLACE and q < 1):
            return super().get_delta_for_epsilon(epsilon)
        losses_P = np.asarray(epsilon)
        deltas_P = np.zeros_like(losses_P)
        inside_P = np.ones(losses_P.shape, bool)
        if q < 1 and adjacency == AdjacencyType.ADD:
            inside_P = losses_P < -math.log1p(-q)
        elif q < 1:
            inside_P = losses_P > math.log1p(-q)
            deltas_P[~inside_P] = -np.expm1(losses_P[~inside_P])
        losses_P = losses_P[inside_P]
        outcomes_P = _outcomes(self, losses_P)
        deltas_P[inside_P] = self.mu_upper_cdf(outcomes_P) - np.exp(losses_P + self.mu_lower_log_cdf(outcomes_P))
        return np.clip(deltas_P, 0, 1)


def _outcomes(mechanism: GaussianPrivacyLoss, losses_P: np.ndarray) -> np.ndarray:
    """Returns the outcome of each loss that some outcome has, by the same operations as dp-accounting for one loss."""
    q, adjacency = mechanism.sampling_prob, mechanism.adjacency_type
    if adjacency == AdjacencyType.REPLACE:
        return -losses_P * mechanism._standard_deviation**2 / mechanism.sensitivity / 2
    removes = adjacency == AdjacencyType.REMOVE
    # Declared for one loss, they take an array as well.
    invert: Any = (
        mechanism._inverse_privacy_loss_without_subsampling_remove if removes else mechanism._inverse_privacy_loss_without_subsampling_add
    )
    if q == 1:
        return invert(losses_P)
    sign = 1.0 if removes else -1.0
    # At these dp-accounting has another formula.
    apart_P = (losses_P == 0) | np.isclose(losses_P, sign * np.log(1 - q), rtol=1e-8)
    outcomes_P = np.empty_like(losses_P)
    outcomes_P[apart_P] = [mechanism.inverse_privacy_loss(loss) for loss in losses_P[apart_P].tolist()]
    # log(exp(loss) / q + 1 - 1 / q), by the same operations as dp-accounting for one loss.
    shifted_P = sign * losses_P[~apart_P] + np.log(1 / q)
    outcomes_P[~apart_P] = invert(sign * (shifted_P + np.log1p(-np.exp(np.log(1 / q - 1) - shifted_P))))
    return outcomes_P


def of_poisson_sample(sigma: float, q: float, interval: float, relation: dp_accounting.NeighboringRelation) -> Any:
    """Returns the loss distribution of a Gaussian release on a Poisson sample, as dp-accounting's `from_gaussian_mechanism` makes it.

    Args:
        sigma: The standard deviation of the noise for a sensitivity of 1.
        q: The sampling probability, in (0, 1]; at 1 nothing is sampled.
        interval: The width of the grid of losses.
        relation: dp-accounting's neighbouring relation.

    Returns:
        A `PrivacyLossDistribution`, rounded upward by connect-the-dots (Doroshenko et al. 2022).
    """

    def on_the_grid(adjacency: AdjacencyType) -> Any:
        # The masses that dp-accounting's connect-the-dots gives to the points of the grid, at once as an array.
        losses = GaussianLosses(sigma, sampling_prob=q, adjacency_type=adjacency)
        bounds = losses.connect_dots_bounds()
        assert bounds.epsilon_lower is not None and bounds.epsilon_upper is not None
        lower, upper = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        deltas_P = losses.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
        make = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
        if upper - lower < pld_pmf._MAX_PMF_SPARSE_SIZE:
            return make(interval, lower, upper, deltas_P)
        rises_P = np.diff(deltas_P)
        if not (np.all((0 <= deltas_P) & (deltas_P <= 1)) and np.all(rises_P <= pld_pmf._DELTA_DIFF_TOLERANCE)):
            # It says what is wrong.
            return make(interval, lower, upper, deltas_P)
        deltas_P = np.minimum.accumulate(deltas_P)
        rises_P = np.diff(deltas_P)
        masses_P = np.empty_like(deltas_P)
        masses_P[0] = 1 - deltas_P[0] + rises_P[0] / math.expm1(interval)
        masses_P[1:-1] = (rises_P[1:] - rises_P[:-1] * math.exp(interval)) / math.expm1(interval)
        masses_P[-1] = rises_P[-1] / math.expm1(-interval)
        return pld_pmf.DensePLDPmf(interval, lower, np.maximum(0.0, masses_P), deltas_P[-1], pessimistic_estimate=True)

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
    taken = of_poisson_sample(event.noise_multiplier, 1.0, interval, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return taken.compute_mixture(distribution.identity(interval), event.sampling_probability)
