"""Extrapolates losses beyond the steps that were run (McKenna et al. 2025, section 3.3).

L(T) = E + A / T^alpha is fitted to the end of each curve.

The paper fits by Levenberg-Marquardt from starts it does not state. At one alpha the least squares in (E, A) have a closed form, so
alpha is found on a grid that is refined instead: this gives the same minimum without a start, for all curves at once.

Shape legend: ... curves, T records, K steps beyond them, G values of alpha.
"""

import numpy as np

# The paper fits records 16K to 128K of 128K steps.
FITTED_PART = 1 / 8
_ALPHAS, _REFINED = np.geomspace(0.02, 4.0, 60), 4


def fit_power_law(steps_T: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (E, A, alpha) of the least-squares fit L = E + A / T^alpha to `losses` [..., T], with E, A >= 0 and 0.02 <= alpha <= 4."""
    alphas = np.broadcast_to(_ALPHAS, (*losses.shape[:-1], len(_ALPHAS)))
    for _ in range(_REFINED):
        _, _, errors = _linear_part(steps_T, losses, alphas)
        place = np.argmin(errors, axis=-1)[..., None]
        low = np.take_along_axis(alphas, np.maximum(place - 1, 0), -1)
        high = np.take_along_axis(alphas, np.minimum(place + 1, alphas.shape[-1] - 1), -1)
        alphas = low * (high / low) ** np.linspace(0, 1, 21)
    e, a, errors = _linear_part(steps_T, losses, alphas)
    place = np.argmin(errors, axis=-1)[..., None]
    e, a, alpha = (np.take_along_axis(values, place, -1)[..., 0] for values in (e, a, alphas))
    return np.asarray(e), np.asarray(a * steps_T[0] ** alpha), np.asarray(alpha)


def _linear_part(steps_T: np.ndarray, losses: np.ndarray, alphas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the best E and A [..., G] at each alpha [..., G], and the remaining sum of squares; A is for steps relative to the first."""
    basis = np.exp(-alphas[..., None] * np.log(steps_T / steps_T[0]))
    mean, target = basis.mean(-1, keepdims=True), losses[..., None, :]
    centred = basis - mean
    a = np.maximum((centred * target).sum(-1) / (centred**2).sum(-1), 0.0)
    e = target.mean(-1) - a * mean[..., 0]
    # With E at its bound, only A is free.
    a = np.where(e < 0, (basis * target).sum(-1) / (basis**2).sum(-1), a)
    e = np.maximum(e, 0.0)
    return e, a, ((e[..., None] + a[..., None] * basis - target) ** 2).sum(-1)


def extend(steps_T: np.ndarray, losses: np.ndarray, beyond_K: np.ndarray) -> np.ndarray:
    """Returns losses [..., K] at the steps `beyond_K`, each above the last measured one.

    They never lie above the last measured loss, and do not rise with the steps.
    """
    fitted = steps_T >= FITTED_PART * steps_T[-1]
    e, a, alpha = fit_power_law(steps_T[fitted], losses[..., fitted])
    out = e[..., None] + a[..., None] / beyond_K ** alpha[..., None]
    return np.minimum.accumulate(np.minimum(out, losses[..., -1:]), axis=-1)
