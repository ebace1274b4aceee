"""Several sums over one draw with noise of their own, as the one Gaussian release that they are.

Divided by its sensitivity S_i, every sum's contribution of one unit has norm at most 1 and noise of deviation z_i. Stacked and
weighted by 1/z_i, a unit moves the whole by at most (sum z_i^-2)^1/2 under noise of deviation 1: one release of noise multiplier
(sum z_i^-2)^-1/2 (Andrew et al. 2021, theorem 1). A replaced unit moves each sum by 2 S_i, so the whole by twice as much, as events
already charge. Charged as separate events, each would get a draw of its own that never happened.
"""

import math

from dpx.declaration import require

# Rounding must not take the joint multiplier below the one that was asked for.
_ROUNDING = 1 + 1e-12


def joint(*noise_multipliers: float | None) -> float:
    """Noise multiplier of sums released on one draw; `None` stands for a sum that is not released."""
    released = [z for z in noise_multipliers if z is not None]
    return released[0] if len(released) == 1 else math.fsum(z**-2 for z in released) ** -0.5


def remaining(target: float, auxiliary: dict[str, float | None]) -> float:
    """The noise multiplier that is left to the gradient's sum, so that jointly with `auxiliary` it is `target`.

    `auxiliary` holds the others' multipliers by name; raises `ConfigError` where they alone spend the target.
    """
    released = {name: z for name, z in auxiliary.items() if z is not None}
    left = target**-2 - math.fsum(z**-2 for z in released.values())
    require(
        left > 0,
        ", ".join(f"{name}={z:.4g}" for name, z in released.items()),
        f"spends all that a joint noise multiplier of {target:.4g} allows",
        f"Use a value well above {target:.4g}",
    )
    return left**-0.5 * _ROUNDING if released else target
