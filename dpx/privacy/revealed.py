"""Gaussian releases whose draws everyone sees: no amplification by sampling, but only a row's own uses are charged.

Each of n draws takes a unit with probability p; if it does, the unit's vector of norm at most C is released with noise of standard
deviation sigma C, in a place that shows whether it was taken. Both neighbours have the same draws, so the number K of uses is Binomial(n,
p) in both, and given K the releases are one Gaussian of mu = sqrt(K) / sigma:

    delta(epsilon) = sum_k P(K = k) delta_Gaussian(epsilon; sqrt(k) / sigma),

for equal draws alone `dpx.privacy.closed_form.delta_by_uses`; here as privacy losses, which compose with those of other releases.

A Poisson-sampled release hides who takes part, so its epsilon is many times smaller; it is not a bound here.
"""

import attr
import dp_accounting
from dp_accounting.pld import privacy_loss_distribution as losses


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RevealedGaussianDpEvent(dp_accounting.DpEvent):
    """One draw: a Gaussian release with probability `sampling_probability`, and everyone sees whether it took place."""

    sampling_probability: float
    noise_multiplier: float


def losses_of_one(event: RevealedGaussianDpEvent, interval: float) -> losses.PrivacyLossDistribution:
    """The privacy losses of one draw on a grid of `interval`: those of the Gaussian with the draw's probability, else 0 exactly.

    A mixture whose component is seen has the mixture of the components' losses, so each part rounded up gives a bound."""
    taken = losses.from_gaussian_mechanism(event.noise_multiplier, value_discretization_interval=interval)
    return taken.compute_mixture(losses.identity(interval), event.sampling_probability)
