"""Learning rate as a function of the step: linear warm-up from zero, then a decay (Anil et al. 2021, section 4.2)."""

from typing import Literal

from dpx.declaration import declaration, require


@declaration
class WarmUpThen:
    """`learning_rate` is reached after `warmup_steps`; `decay` then brings it to `final_fraction` of it at the last step."""

    learning_rate: float
    warmup_steps: int
    decay: Literal["quadratic", "linear", "exponential", "constant"]
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.learning_rate > 0,
            f"lr_schedule.learning_rate={self.learning_rate}",
            "the peak rate must be positive",
            "Give a rate above 0",
        )
        require(self.warmup_steps >= 0, f"lr_schedule.warmup_steps={self.warmup_steps}", "warm-up cannot be negative", "Use 0 for none")
        require(
            0 <= self.final_fraction <= 1, f"lr_schedule.final_fraction={self.final_fraction}", "not a fraction of the peak", "Use 0..1"
        )
        require(
            self.decay != "exponential" or self.final_fraction > 0,
            f"lr_schedule.final_fraction={self.final_fraction}",
            "an exponential never reaches zero",
            "Give a final fraction above 0",
        )

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` where a run of `steps` would never reach the peak rate."""
        require(
            self.warmup_steps <= steps,
            f"lr_schedule.warmup_steps={self.warmup_steps}",
            f"the run of {steps} steps would end before its warm-up",
            f"Set lr_schedule.warmup_steps={steps} or less, or raise steps",
        )

    def at(self, step: int, steps: int) -> float:
        """Rate of update `step` (from 0) in a run of `steps`: the paper's eta_t with t = step + 1."""
        t = step + 1
        if t < self.warmup_steps:
            return self.learning_rate * t / self.warmup_steps
        left = max(steps - t, 0) / max(steps - self.warmup_steps, 1)
        return self.learning_rate * self._decayed(left)

    def _decayed(self, left: float) -> float:
        end = self.final_fraction
        if self.decay == "constant":
            return 1.0
        if self.decay == "exponential":
            return end ** (1.0 - left)
        return end + (1.0 - end) * left ** (2 if self.decay == "quadratic" else 1)
