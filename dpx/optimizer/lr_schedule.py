"""Declares the learning rate as a function of the step: the papers' schedule (Anil et al. 2021, section 4.2), and some of optax's.

A duration is a whole number of steps, or a fraction below 1 of the run's steps.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

from dpx.declaration import declaration, require


def in_steps(duration: int | float, steps: int) -> int:
    """Returns a declared duration in a run of `steps` steps, rounded to whole steps."""
    return duration if isinstance(duration, int) else round(duration * steps)


def _require_duration(name: str, duration: int | float) -> None:
    value = f"lr_schedule.{name}={duration}"
    require(duration >= 0, value, "warm-up cannot be negative" if name == "warmup_steps" else "cannot be negative", "Use 0 for none")
    require(
        isinstance(duration, int) or duration < 1, value, "a fraction of the run is below 1", "Use a fraction, or a whole number of steps"
    )


def _require_final(final_fraction: float) -> None:
    require(
        0 <= final_fraction <= 1,
        f"lr_schedule.final_fraction={final_fraction}",
        "is not a fraction of the peak",
        "Use a value between 0 and 1",
    )


@declaration
class _Peak:
    """A schedule that rises linearly from zero to a peak.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the warm-up; below 1 a fraction of all steps.
    """

    learning_rate: float
    warmup_steps: int | float

    def __post_init__(self) -> None:
        rate = f"lr_schedule.learning_rate={self.learning_rate}"
        require(self.learning_rate > 0, rate, "the peak rate must be positive", "Give a rate above 0")
        _require_duration("warmup_steps", self.warmup_steps)


@declaration
class WarmUpThen(_Peak):
    """Increases the rate linearly from zero to the peak; `decay` then reduces it until the last step.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the warm-up; below 1 a fraction of all steps.
        decay: Form of the decay.
        final_fraction: Rate at the last step, as a fraction of the peak.
    """

    decay: Literal["quadratic", "linear", "exponential", "constant"]
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_final(self.final_fraction)
        require(
            self.decay != "exponential" or self.final_fraction > 0,
            f"lr_schedule.final_fraction={self.final_fraction}",
            "an exponential schedule never reaches zero",
            "Give a final fraction above 0",
        )

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` if a run of `steps` steps would never reach the peak rate."""
        require(
            in_steps(self.warmup_steps, steps) <= steps,
            f"lr_schedule.warmup_steps={self.warmup_steps}",
            f"the run of {steps} steps would end before its warm-up",
            f"Set lr_schedule.warmup_steps={max(1, steps // 10)}, or a fraction such as 0.1, or raise steps",
        )

    def at(self, step: int, steps: int) -> float:
        """Returns the rate of update `step` (from 0) in a run of `steps` steps: the paper's eta_t with t = step + 1."""
        t, warmup_steps = step + 1, in_steps(self.warmup_steps, steps)
        if t < warmup_steps:
            return self.learning_rate * t / warmup_steps
        left = max(steps - t, 0) / max(steps - warmup_steps, 1)
        return self.learning_rate * self._decayed(left)

    def _decayed(self, left: float) -> float:
        end = self.final_fraction
        if self.decay == "constant":
            return 1.0
        if self.decay == "exponential":
            return end ** (1.0 - left)
        return end + (1.0 - end) * left ** (2 if self.decay == "quadratic" else 1)


class OfOptax(_Peak):
    """A schedule that optax computes. A subclass is a declaration."""

    def curve(self, steps: int) -> Callable[[Any], Any]:
        """Returns optax's schedule for a run of `steps` steps: the rate as a function of the count."""
        raise NotImplementedError

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` if a run of `steps` steps would end before the peak rate or at it."""
        require(
            in_steps(self.warmup_steps, steps) < steps,
            f"lr_schedule.warmup_steps={self.warmup_steps}",
            f"the run of {steps} steps would end before its decay",
            f"Use fewer than {steps}, or more steps",
        )

    def at(self, step: int, steps: int) -> float:
        """Returns the rate of update `step` (from 0) in a run of `steps` steps.

        It is optax's value at count step + 1, so that the first step of a warm-up from zero does not have the rate zero.
        """
        return _rates(self, steps)[min(step, steps - 1)]


@functools.lru_cache(maxsize=8)
def _rates(schedule: OfOptax, steps: int) -> list[float]:
    """Returns the rate of every update of a run, computed at once: one step at a time, each would wait for the device.

    They are computed on the host and not under jit: an inexact division there can make the argument of the last root of a polynomial
    negative.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        # The environment allows jax only an accelerator.
        host = None
    with jax.default_device(host):
        return np.asarray(jax.vmap(schedule.curve(steps))(jnp.arange(1, steps + 1)), np.float32).tolist()


@declaration
class Cosine(OfOptax):
    """Uses `optax.warmup_cosine_decay_schedule`: a linear warm-up, then half a cosine.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the warm-up; below 1 a fraction of all steps.
        final_fraction: Rate at the last step, as a fraction of the peak.
        exponent: Power of the cosine.
    """

    final_fraction: float = 0.0
    exponent: float = 1.0
    kind: Literal["cosine"] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_final(self.final_fraction)
        require(self.exponent > 0, f"lr_schedule.exponent={self.exponent}", "the rate would not decay", "Give a number above 0")

    def curve(self, steps: int) -> Callable[[Any], Any]:
        import optax

        peak, warmup_steps = self.learning_rate, in_steps(self.warmup_steps, steps)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, steps, peak * self.final_fraction, self.exponent)


@declaration
class WarmUpStableDecay(OfOptax):
    """Warms up linearly, holds the peak rate, and decays linearly at the end (Hu et al. 2024).

    It joins optax's schedules by `optax.join_schedules`.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the warm-up; below 1 a fraction of all steps.
        decay_steps: Steps of the decay at the end; below 1 a fraction of all steps.
        final_fraction: Rate at the last step, as a fraction of the peak.
    """

    decay_steps: int | float
    final_fraction: float = 0.0
    kind: Literal["warm_up_stable_decay"] = "warm_up_stable_decay"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_duration("decay_steps", self.decay_steps)
        _require_final(self.final_fraction)

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` if warm-up and decay are together longer than a run of `steps` steps."""
        super().require_fits(steps)
        require(
            in_steps(self.warmup_steps, steps) + in_steps(self.decay_steps, steps) <= steps,
            f"lr_schedule.warmup_steps={self.warmup_steps}, lr_schedule.decay_steps={self.decay_steps}",
            f"together they are longer than the run of {steps} steps",
            "Shorten one of them, or use more steps",
        )

    def curve(self, steps: int) -> Callable[[Any], Any]:
        import optax

        peak, warmup_steps, decay_steps = self.learning_rate, in_steps(self.warmup_steps, steps), in_steps(self.decay_steps, steps)
        parts = [
            optax.linear_schedule(0.0, peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * self.final_fraction, decay_steps),
        ]
        return optax.join_schedules(parts, [warmup_steps, steps - decay_steps])


@declaration
class OneCycle(OfOptax):
    """Uses `optax.cosine_onecycle_schedule` (Smith & Topin 2018).

    The rate rises from the peak over `div_factor`, then falls to that value over `final_div_factor`, each along half a cosine.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the rise; below 1 a fraction of all steps.
        div_factor: The peak over the first rate.
        final_div_factor: The first rate over the last.
    """

    div_factor: float = 25.0
    final_div_factor: float = 1e4
    kind: Literal["one_cycle"] = "one_cycle"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("div_factor", "final_div_factor"):
            value = getattr(self, name)
            require(value >= 1, f"lr_schedule.{name}={value}", "the rate would end or begin above its peak", "Use 1 or more")

    def curve(self, steps: int) -> Callable[[Any], Any]:
        import optax

        # Optax takes a fraction and rounds it down to steps.
        fraction = (in_steps(self.warmup_steps, steps) + 0.5) / steps
        return optax.cosine_onecycle_schedule(steps, self.learning_rate, fraction, self.div_factor, self.final_div_factor)


@declaration
class Polynomial(OfOptax):
    """Warms up linearly, then uses `optax.polynomial_schedule`.

    Attributes:
        learning_rate: The peak rate.
        warmup_steps: Steps of the warm-up; below 1 a fraction of all steps.
        power: Power of the remaining part of the run.
        final_fraction: Rate at the last step, as a fraction of the peak.
    """

    power: float = 1.0
    final_fraction: float = 0.0
    kind: Literal["polynomial"] = "polynomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_final(self.final_fraction)
        require(self.power > 0, f"lr_schedule.power={self.power}", "the rate would not decay", "Give a number above 0")

    def curve(self, steps: int) -> Callable[[Any], Any]:
        import optax

        peak, warmup_steps = self.learning_rate, in_steps(self.warmup_steps, steps)
        decay = optax.polynomial_schedule(peak, peak * self.final_fraction, self.power, steps - warmup_steps)
        return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])


LrSchedule = WarmUpThen | Cosine | WarmUpStableDecay | OneCycle | Polynomial
