"""Attacks the mechanism of a config with Dirac canaries alone, every one in every release, in a stated setting.

Everything between the per-example loss and the optimiser is the run's own code: clipping, accumulation, the reduction, the keys
and slices of the noise, the divisor. The released noisy sums are read where the optimiser receives them; the score of a canary is
the inner product of their total with its direction, the likelihood ratio of a Gaussian release.

Shape legend: M canaries.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import chi2

from dpx.audit.canaries import LENGTH, Audited, in_units
from dpx.audit.in_run import of_gradients
from dpx.config.experiment_parts import OneStep
from dpx.declaration import declaration, require
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.privacy import closed_form
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret
from dpx.training.step import Step, StepInputs, as_chunk, make_step

MICROBATCH = 500


@declaration
class Setting:
    """The setting of an attack: full participation over `steps` releases.

    Their noise is just what (`epsilon`, `delta`) needs by the closed form.
    """

    canaries: int = 20_000
    steps: int = 2
    epsilon: float = 2.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        require(
            self.canaries >= 2,
            f"canaries={self.canaries}",
            "there are too few canaries to guess for both outcomes of the coin",
            "Use 10000 or more",
        )
        require(self.steps > 0, f"steps={self.steps}", "nothing would be released", "Use 1 or more")
        require(self.epsilon > 0, f"epsilon={self.epsilon}", "epsilon must be positive", "Give a claim above 0")
        require(0 < self.delta < 1, f"delta={self.delta}", "delta is a probability above 0 and below 1", "Use 1e-5")

    @property
    def mu(self) -> float:
        """Returns the sensitivity of all releases together over the standard deviation of their noise."""
        return closed_form.mu(self.epsilon, self.delta)

    @property
    def noise_multiplier(self) -> float:
        """Returns the noise multiplier of each release."""
        return math.sqrt(self.steps) / self.mu

    def claim(self, delta: float) -> float:
        """Returns the epsilon that this noise gives at any delta."""
        return closed_form.epsilon(self.mu, delta)


@dataclasses.dataclass(frozen=True)
class Attack:
    """A compiled step for the canaries of `setting` under a declared clip and clipping method, on a mesh."""

    mechanism: Mechanism
    clipping_norm: float
    rows_per_example: int
    setting: Setting
    step: Step

    @classmethod
    def build(cls, declared: OneStep, mesh: Mesh, setting: Setting) -> "Attack":
        """Compiles the step; raises `ConfigError` for a mechanism without independent Gaussian noise."""
        require(
            declared.mechanism.is_private,
            "mechanism=none",
            "a run without noise makes no claim, so an audit has nothing to test",
            "Audit a private experiment",
        )
        require(
            declared.mechanism.is_independent_gaussian,
            f"mechanism={declared.mechanism.name}",
            "the canaries attack independent Gaussian noise",
            "Use mechanism=dp_sgd",
        )
        norm = declared.clip.clipping_norm
        objective = Audited(None, setting.canaries, LENGTH * norm, declared.task.counts)
        step = make_step(declared, objective, mesh.make(), MICROBATCH)
        return cls(declared.mechanism, norm, declared.privacy.rows_per_example, setting, step)

    def coins(self, secret: RootSecret) -> Bool[np.ndarray, " M"]:
        """Returns whether each canary takes part, by its own fair coin."""
        return secret.generator("audit_coins").integers(0, 2, self.setting.canaries).astype(bool)

    def scores(self, secret: RootSecret, is_in_M: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
        """Returns each canary's inner product with the mean of the released sums, in units of the clipping norm."""
        setting, expected = self.setting, np.float32(self.setting.canaries)
        norm = self.clipping_norm
        deviation = np.float32(setting.noise_multiplier * norm)
        state = self.step.init(np.asarray(secret.key("init")), None)
        for number in range(setting.steps):
            sums = self._sums(state, np.flatnonzero(is_in_M).astype(np.int32))
            drawn = self.mechanism.draw(secret, number, state.params, setting.noise_multiplier, norm, None)
            state, _ = self.step.finish(state, self.step.reduce(sums, ()), drawn, deviation, expected, np.float32(0))
        return of_gradients(state.params, setting.canaries) * setting.canaries / (setting.steps * norm)

    def _sums(self, state: Any, records: np.ndarray) -> Any:
        """Returns clipped sums of the canaries that take part."""
        step, sums, none = self.step, self.step.zero(), np.zeros(2, np.uint32)
        each = self.rows_per_example
        inputs = StepInputs(step.gather(state.params), none, none)
        for start in range(0, len(records), step.chunk * step.rows):
            rows = {name: records[start : start + step.chunk * step.rows] for name in ("record", "canary")}
            sums = step.accumulate(sums, as_chunk(rows if each == 1 else in_units(rows, each), step), inputs)
        return sums

    def noise_p_value(self, scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> float:
        """Returns the two-sided p-value of a chi-square test that the noise has the claimed variance.

        Too little and too much noise both show.
        """
        squares = float(np.sum(np.square(scores_M - is_in_M))) * self.setting.steps / self.setting.noise_multiplier**2
        return variance_p_value(squares, len(scores_M))


def variance_p_value(squares: float, count: int) -> float:
    """Returns the two-sided p-value of a sum of `count` squared standard normal draws."""
    return float(min(1.0, 2 * min(chi2.cdf(squares, count), chi2.sf(squares, count))))
