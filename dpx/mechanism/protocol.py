"""Defines a mechanism: one declaration in one file (`dpx.mechanism.dp_sgd` is the simplest).

The step, the loop, calibration, the plan and the statement call these methods of the mechanism that a config names; none of them knows
which mechanisms exist. A new mechanism is such a file, a YAML that names its class, and a test. In the order in which a run calls them:

1. `check`, `needs_fixed_places`, `ledger_fields`, `event`: which other declarations its proof covers, and what a step enters in the ledger.
2. `require_library`, `load_strategy`, `initial_state`: what it needs before the first step.
3. `draw`, on the host, once a step: keys or numbers, a function of (root secret, step) alone.
4. `summand`, on the device, for each microbatch: what is added up for a clipped sum.
5. `noisy_sum`, on the device, once a step, after everything was added up over devices.
6. `extra_memory_bytes`, `noise_facts`, `floating_point`, `explanation`: what the plan and the statement report about it.

Declarations import no jax, so methods that work on arrays import it themselves and state shapes in their docstrings.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dpx.declaration import ConfigError
from dpx.mechanism.clip import Clip
from dpx.mechanism.telemetry import Telemetry
from dpx.privacy.declarations import Accountant, Privacy
from dpx.randomness import RootSecret
from dpx.sampler import Sampler

if TYPE_CHECKING:
    from dp_accounting import DpEvent


# The largest absolute value of a Gaussian draw (`dpx.mechanism.gaussian`), in deviations: sqrt(2 ln 2^64), rounded down.
REACH = 9.41


@runtime_checkable
class Declared(Protocol):
    """The declarations that one proof must cover together: the part of an experiment that a `check` may read."""

    @property
    def privacy(self) -> Privacy: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def clip(self) -> Clip: ...
    @property
    def telemetry(self) -> Telemetry: ...
    @property
    def accountant(self) -> Accountant: ...
    @property
    def widths(self) -> tuple[int, ...]: ...


class NoisySum(NamedTuple):
    """The result of `noisy_sum`. `total` and `noisy` are trees like the parameters, float32, in the gradient's units; `noise_squares` is
    the sum of squares of the noise, float32 []; `state` is the mechanism's state for the next step."""

    total: Any
    noisy: Any
    noise_squares: Any
    state: Any


class Mechanism:
    """The base of every mechanism. Its defaults hold for float32 noise that is independent from step to step; every private mechanism
    defines its own `ledger_fields`, `draw` and `noisy_sum`."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    is_private: ClassVar[bool] = True
    # Canaries and compiled dry runs assume this: every step's noise is Gaussian, real-valued and independent of the noise of other steps.
    is_independent_gaussian: ClassVar[bool] = False
    # Whether the proof needs all other examples to have the same places in both neighbours (device, microbatch, row): settings that would
    # move them are then refused (`dpx.mechanism.places`). True is needed for every inexact sum, such as one rounded for each microbatch.
    needs_fixed_places: ClassVar[bool] = False
    # The type in which clipped sums are added up.
    sum_dtype: ClassVar[str] = "float32"
    # The rounding that the proof does not cover.
    floating_point: ClassVar[str] = (
        "sums and noise are float32: the rounding of a sum depends on all its rows and their order, and the low-order bits of an output "
        "are not those of a real Gaussian"
    )

    def check(self, declared: Declared) -> None:
        """Raises `ConfigError` for declarations that the proof does not cover."""

    def ledger_fields(self) -> dict[str, Any]:
        """The mechanism's fields of a ledger entry (`dpx.privacy.ledger.LedgerEntry`): the distribution of its noise.

        Every private mechanism defines this itself, since a claim is not inherited: raises `ConfigError` if it does not.
        """
        reason = "does not say what a step of it costs: it has no ledger_fields"
        raise ConfigError(f"{type(self).__module__}.{type(self).__qualname__}", reason, "Give it ledger_fields() (dpx/docs/extending.md)")

    def event(self, noise_multiplier: float, adjacency: str) -> "DpEvent | None":
        """The dp-accounting event of one step in which every example takes part, between neighbours under `adjacency` that differ in one
        example, which moves the clipped sum by at most the clipping norm, or by twice that under `replace_one`.

        `None` for the distributions that `ledger_fields` can name. An event given here is composed unchanged and not checked: the claim
        then relies on the mechanism's package, which must vouch for it.
        """
        return None

    def require_library(self, private: Path) -> None:
        """Raises `ConfigError` if a library that `load_strategy` needs is missing: before any work, not after data was prepared."""

    def load_strategy(self, steps: int, private: Path) -> np.ndarray | None:
        """The strategy that is chosen once for the whole run and kept under `private`; `None` if there is nothing to choose."""
        return None

    def initial_state(self, params: Any) -> Any:
        """The mechanism's state before the first step, as a tree; `None` for noise without state. A new noise epoch starts at zeros."""
        return None

    def draw(
        self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: np.ndarray | None
    ) -> Any:
        """The host arrays from which `noisy_sum` makes a step's noise; only shapes and paths of `params` are read.

        `clipping_norm` is the declared one. Keys come from `secret` by (purpose, step, parameter path, slice).
        """
        raise NotImplementedError

    def summand(self, total: Any, clipping_norm: float) -> Any:
        """What is added up for one microbatch's clipped sum (a float32 tree): a tree of `sum_dtype`. Runs under jit."""
        return total

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        """The sum over all examples with its noise, under jit.

        `total` is a tree of `sum_dtype`, `drawn` what `draw` gave, `deviation` a float32 []: the noise multiplier times the norm of this
        step. `clipping_norm` is the declared one.
        """
        raise NotImplementedError

    def extra_memory_bytes(self, parameters: int) -> int:
        """Bytes that the mechanism holds while a step is finished, in addition to one noisy sum."""
        return 0

    def noise_facts(self, clipping_norm: float, count_parameters: Callable[[], int]) -> dict[str, Any]:
        """How the noise is drawn, how far it reaches, and what a grid adds to the sensitivity, relative to the clipping norm."""
        return {
            "grid_margin": 0.0,
            "generator": "threefry2x32 keys derived by keyed BLAKE2b from one root secret",
            "generator_strength_bits": 64,
            "noise_reach_in_deviations": REACH,
        }

    def explanation(self) -> list[str]:
        """What is particular about the noise, in sentences for a lay reader."""
        return []
