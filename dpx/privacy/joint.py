"""Several sums over one draw, each with its own noise, as one Gaussian release.

Divided by its sensitivity S_i, every sum's contribution of one unit has norm at most 1 and noise of deviation z_i. Stacked and weighted by
1/z_i, a unit moves the whole by at most (sum z_i^-2)^1/2 under noise of deviation 1: one release of noise multiplier (sum z_i^-2)^-1/2
(Andrew et al. 2021, theorem 1). A replaced unit moves each sum by 2 S_i, so the whole by twice as much, as events already charge. As
separate events, each sum would be charged with a separate draw that did not happen.
"""

import math

from dpx.declaration import require

# Rounding must not reduce the joint multiplier below the requested one.
_ROUNDING = 1 + 1e-12


def joint(*noise_multipliers: float | None) -> float:
    """The joint noise multiplier of sums released on one draw; `None` means that a sum is not released."""
    released = [z for z in noise_multipliers if z is not None]
    return released[0] if len(released) == 1 else math.fsum(z**-2 for z in released) ** -0.5


def remaining(target: float, auxiliary: dict[str, float | None]) -> float:
    """The noise multiplier of the gradient's sum for which the joint multiplier with `auxiliary` is `target`.

    `auxiliary` holds the multipliers of the other sums by name; raises `ConfigError` if these alone use up the target.
    """
    released = {name: z for name, z in auxiliary.items() if z is not None}
    left = target**-2 - math.fsum(z**-2 for z in released.values())
    require(
        left > 0,
        ", ".join(f"{name}={z:.4g}" for name, z in released.items()),
        f"these releases use all the privacy that a joint noise multiplier of {target:.4g} allows",
        f"Use a value well above {target:.4g}",
    )
    return left**-0.5 * _ROUNDING if released else target
