"""Defines the interface of a mechanism, which is one declaration in one file (`dpx.mechanism.dp_sgd` is the simplest).

The step, the loop, calibration, the plan and the statement call these methods of the mechanism that a config names; none of them knows
which mechanisms exist. A new mechanism is such a file, a YAML that names its class, and a test. In the order in which a run calls them:

1. `require_fits`, `check`, `needs_fixed_places`, `ledger_fields`, `event`: which other declarations it works with and its proof covers, and
   what a step enters in the ledger.
2. `require_library`, `load_strategy`, `initial_state`: what it needs before the first step.
3. `draw`, on the host, once a step: keys or numbers, a function of (root secret, step) alone.
4. `summand`, on the device, for each microbatch: what is added up for a clipped sum.
5. `noisy_sum`, on the device, once a step, after everything was added up over devices.
6. `extra_memory_bytes`, `noise_facts`, `reasons_against`, `not_covered`, `floating_point`, `explanation`: what the plan and the statement
   report about it.

Two kinds do more, and a step asks which kind it has: `ForwardNoise` adds noise to each row's vector before the loss, and to no sum
(`dpx.mechanism.dp_fp`); a `Reparametrisation` lets the loss be differentiated by other arrays than the parameters (`dpx.mechanism.rgp`).

Declarations import no jax, so methods that work on arrays import it themselves and state shapes in their docstrings.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dpx.declaration import ConfigError, require
from dpx.mechanism.clip import Clip
from dpx.mechanism.telemetry import Telemetry
from dpx.models.model_protocol import Shapes
from dpx.models.trained import Trained
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.randomness import RootSecret
from dpx.sampler import Sampler

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# The largest absolute value that a Gaussian draw takes, in standard deviations: sqrt(2 ln 2^64), rounded down (`dpx.mechanism.noise`).
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
    @property
    def model(self) -> Any: ...
    @property
    def task(self) -> Any: ...
    @property
    def train(self) -> Trained: ...
    @property
    def noise(self) -> Any: ...


class NoisySum(NamedTuple):
    """The result of `Mechanism.noisy_sum`.

    Attributes:
        total: The sum without noise, float32, in the units of the gradient: a tree like the parameters, or like what replaces them.
        noisy: The sum with noise, as `total`.
        noise_squares: The sum of squares of the noise over all parameters, float32 [].
        state: The mechanism's state for the next step.
    """

    total: Any
    noisy: Any
    noise_squares: Any
    state: Any


class NoisyVectors(NamedTuple):
    """The result of `noisy_vectors`.

    The loss reads `noisy`, in the type of the given vectors. Noise was added to `clipped`, float32 [B, H]. `norms` float32 [B] are the
    norms before clipping, and `is_finite` bool [B] tells which rows had finite ones.
    """

    noisy: Any
    clipped: Any
    norms: Any
    is_finite: Any


class Reparametrised(NamedTuple):
    """The arrays by which the loss of a step is differentiated, if a mechanism replaces parameters by other arrays.

    Attributes:
        trained: The tree of arrays, float32, whose per-example gradients are clipped and summed.
        constants: The tree of all other arrays, float32, that the model needs in place of the trained parameters.
        metrics: Metrics by name, functions of the released parameters.
    """

    trained: Any
    constants: Any
    metrics: dict[str, Any]


class Mechanism:
    """The base class of mechanisms, which draw noise and add it to the clipped sum of a step.

    A private mechanism must define `ledger_fields`, `draw` and `noisy_sum`. The other methods have defaults that are right for float32
    noise which is independent from step to step.
    """

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    is_private: ClassVar[bool] = True
    # Canaries and compiled dry runs assume this: every step's noise is Gaussian, real-valued and independent of the noise of other steps.
    is_independent_gaussian: ClassVar[bool] = False
    # Whether the proof needs all other examples to have the same places in both neighbours (device, microbatch, row): settings that would
    # move them are then refused (`dpx.mechanism.declared_mechanism`). True is needed for every inexact sum, such as one rounded for each
    # microbatch.
    needs_fixed_places: ClassVar[bool] = False
    # Sentences that say what the noise does not protect.
    not_covered: ClassVar[tuple[str, ...]] = ()
    # The type in which clipped sums are added up.
    sum_dtype: ClassVar[str] = "float32"
    # The rounding that the proof does not cover.
    floating_point: ClassVar[str] = (
        "sums and noise are float32: the rounding of a sum depends on all its rows and their order, and the low-order bits of an output "
        "are not those of a real Gaussian"
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A class that still sets them would be taken for one that noises the sum.
        for flag, kind in (("is_forward", "ForwardNoise"), ("reparametrises", "Reparametrisation")):
            fix = f"Inherit dpx.mechanism.mechanism_protocol.{kind}"
            require(not hasattr(cls, flag), f"{cls.__module__}.{cls.__qualname__}", f"sets {flag}, which says nothing any more", fix)

    def require_fits(self, model: Any, task: Any, train: Any) -> None:
        """Refuses a model or a selection of parameters with which the mechanism cannot work; called as a config is built, without jax.

        Args:
            model: The declared model (`dpx.models.shape`, `dpx.models.model_protocol`).
            task: The declared task, which knows every parameter's path and shape for the model.
            train: Which parameters are trained (`dpx.models.trained`).

        Raises:
            ConfigError: If they do not fit.
        """

    def check(self, declared: Declared) -> None:
        """Refuses declarations that the mechanism's proof does not cover; called before anything is computed.

        Args:
            declared: Privacy, sampler, clip, telemetry, accountant and the lengths of rows.

        Raises:
            ConfigError: For a declaration that the proof does not cover.
        """

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the distribution of the noise, as the mechanism's fields of a ledger entry (`dpx.privacy.segments.LedgerEntry`).

        A mechanism of a package must define this itself, also if it inherits from one of dpx or defines `event`.

        Returns:
            A dict whose `noise` is `gaussian`, or another name that the table of events has (`dpx.privacy.events`); if the mechanism
            defines `event`, that is charged, and the name is for tables alone.

        Raises:
            ConfigError: If the class does not define it.
        """
        reason = "does not state the privacy cost of its steps: it does not define ledger_fields"
        raise ConfigError(f"{type(self).__module__}.{type(self).__qualname__}", reason, "Define ledger_fields() (dpx/docs/extending.md)")

    def event(self, noise_multiplier: float, adjacency: str) -> "DpEvent | None":
        """Returns the dp-accounting event of one step in which every example takes part.

        An event is composed unchanged and is not checked: the claim then trusts the mechanism's package.

        Args:
            noise_multiplier: The standard deviation of the noise divided by the clipping norm.
            adjacency: The neighbouring relation. Neighbours differ in one example, which moves the clipped sum by at most the clipping
                norm, or by twice the norm under "replace_one".

        Returns:
            The event, or `None` for noise that `ledger_fields` names.
        """
        return None

    @property
    def clips_gradients(self) -> bool:
        """Returns whether gradients of examples are clipped, so that noise can be added to their sum."""
        return self.is_private

    def reasons_against(self, train: Trained, parameters: Callable[[], Iterable[str]]) -> list[str]:
        """Returns the reasons why a run has no guarantee, whatever its noise: it trains parameters that the noise does not cover.

        `parameters()` returns all paths.
        """
        return []

    def require_library(self, private: Path) -> None:
        """Raises `ConfigError` if a library that `load_strategy` needs is missing. It is called before data is prepared."""

    def load_strategy(self, steps: int, private: Path) -> np.ndarray | None:
        """Returns the strategy that is chosen once for a run of `steps` steps and stored in `private`; `None` if it needs none."""
        return None

    def initial_state(self, params: Any) -> Any:
        """Returns the state before the first step, a tree of arrays; `None` for noise without state. A new noise epoch starts at zeros."""
        return None

    def draw(
        self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: np.ndarray | None
    ) -> Any:
        """Returns the arrays from which `noisy_sum` makes the noise of one step: keys, or numbers.

        Args:
            secret: The run's root secret. Keys are derived from it by (purpose, step, parameter path, slice).
            step: The number of the step, from 0.
            params: The trained parameters, or what replaces them; only their paths, shapes and layouts may be read.
            noise_multiplier: The standard deviation of the noise divided by the clipping norm.
            clipping_norm: The declared clipping norm.
            strategy: What `load_strategy` returned.

        Returns:
            A tree of NumPy arrays, or of arrays that are laid out like `params`, which depends on nothing but the arguments.
        """
        raise NotImplementedError

    def summand(self, total: Any, clipping_norm: float) -> Any:
        """Returns what is added up over microbatches, as a tree of `sum_dtype`. Runs under jit.

        `total` is the float32 clipped sum of one microbatch.
        """
        return total

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        """Adds the noise of one step to the sum over all its examples; runs under jit.

        Args:
            total: The sum of all summands, a tree of `sum_dtype`.
            drawn: What `draw` returned for the step.
            deviation: The standard deviation of the noise, float32 []: the noise multiplier times the clipping norm of this step.
            state: The state that the step before returned, or `initial_state`.
            clipping_norm: The declared clipping norm.

        Returns:
            The sum without and with noise, and the new state.
        """
        raise NotImplementedError

    def extra_memory_bytes(self, parameters: int, replaced: int) -> int:
        """Returns the bytes that the mechanism holds at the end of a step, in addition to one noisy sum.

        Args:
            parameters: The number of trained parameters.
            replaced: The number of trained parameters that it replaces by others for a step (`Reparametrisation`).
        """
        return 0

    def noise_facts(self, clipping_norm: float, count_parameters: Callable[[], int]) -> dict[str, Any]:
        """Returns what the statement says about the noise.

        It names the generator, how many deviations the noise reaches, and what a grid adds to the sensitivity, relative to the clipping
        norm.
        """
        return {
            "grid_margin": 0.0,
            "generator": "threefry2x32 keys derived by keyed BLAKE2b from one root secret",
            "generator_strength_bits": 64,
            "noise_reach_in_deviations": REACH,
        }

    def explanation(self) -> list[str]:
        """Returns sentences for `job=explain` about what is special in this noise, for a reader who is not an expert."""
        return []


class ForwardNoise(Mechanism):
    """The base class of mechanisms that add noise to each row's vector in the forward pass, before the loss, and to no sum of gradients.

    Gradients are neither clipped nor noised: `reasons_against` must name every trained parameter that the noise does not cover. A class
    defines `ledger_fields`, `row_keys` and `noisy_vectors`.
    """

    @property
    def clips_gradients(self) -> bool:
        return False

    @property
    def draws_per_step(self) -> int:
        """Returns the number M of independent draws in one step.

        Each draw takes an example with probability q / M, where q is the step's probability.
        """
        return 1

    def trained(self, train: Trained) -> Trained:
        """Returns the declaration of the parameters that are trained if `train` is declared."""
        return train

    def row_keys(self, secret: RootSecret, step: int, draw: int, rows: int) -> np.ndarray:
        """Returns the noise keys of the `rows` rows of draw number `draw` of a step, uint32 [rows, 2]."""
        raise NotImplementedError

    def noisy_vectors(self, vectors: Any, keys: Any, deviation: Any, limit: Any) -> NoisyVectors:
        """Returns each row's vector (float [B, H]), clipped to the norm `limit`, plus noise of standard deviation `deviation`.

        It runs under jit and is differentiated. `keys` are uint32 [B, 2]; `deviation` and `limit` float32 [].
        """
        raise NotImplementedError

    def draw(self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: Any) -> None:
        """Returns nothing, since no noise is added to the sum."""

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        """Returns the sum unchanged; its noise is in the rows from which it was computed."""
        import jax.numpy as jnp

        return NoisySum(total, total, jnp.float32(0), state)


class Reparametrisation(Mechanism):
    """The base class of mechanisms that let the loss of a step be differentiated by other arrays than the parameters."""

    def kept_from_start(self, params: Any) -> Any:
        """Returns what `reparametrised` needs of the parameters before the first step, a tree, or `None`.

        It is the same in all noise epochs, and a fork keeps its parent's.
        """
        return None

    def draw_first(self, secret: RootSecret, step: int, params: Any) -> Any:
        """Returns the host arrays for `reparametrised`, from keys by (purpose, step, path); only shapes and paths of `params` are read."""
        return None

    def reparametrised(self, params: Any, kept: Any, drawn: Any) -> Reparametrised:
        """Returns the arrays by which the loss is differentiated in one step. Runs under jit.

        It reads no row: the step is then an ordinary release, chosen adaptively from what was released before.

        Args:
            params: The trained parameters, as they were released.
            kept: What `kept_from_start` returned.
            drawn: What `draw_first` returned.
        """
        raise NotImplementedError

    def gradient_factor(self, path: str) -> float:
        """Returns the positive constant by which the gradient of the array at `path` is multiplied before the joint norm is taken."""
        return 1.0

    def rebuilt(self, noisy: Any, trained: Any) -> Any:
        """Returns the gradient as a tree like the parameters, from the noisy sum of a tree like `trained`. Runs under jit.

        Nothing else that depends on rows may enter it.
        """
        raise NotImplementedError

    def summed_shapes(self, shapes: Shapes) -> Shapes:
        """Returns path and shape of every array whose gradients are summed, from those of the trained parameters; computes nothing."""
        return shapes
