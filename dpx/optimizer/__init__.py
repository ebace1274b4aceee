"""Optimisers, which update the parameters by a noisy gradient: Adam as Anil et al. 2021 print it, and any of optax, by its name.

Declarations import no jax.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require


@declaration
class Adam:
    """Adam with decoupled weight decay (Anil et al. 2021, Algorithm 1).

    Each step is theta <- theta - eta * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta), with bias-corrected moments.

    Attributes:
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Constant in the divisor, the paper's xi.
        weight_decay: Factor of the decoupled weight decay.
        decay_mask: bert exempts LayerNorm parameters and biases, as BERT's code does; none decays every parameter, as the formula is
            printed.
    """

    name: ClassVar[str] = "adam"

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay_mask: Literal["bert", "none"] = "bert"

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name}={value}", "is not a decay rate", "Use 0 <= value < 1")
        require(self.eps > 0, f"optimizer.eps={self.eps}", "the divisor could be zero", "Use a small positive value")
        require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay}", "decay cannot be negative", "Use 0 or more")

    def require_usable(self) -> None:
        """Does nothing, because invalid values were refused when the optimiser was declared."""

    @property
    def knobs(self) -> dict[str, Any]:
        """Returns its name and its values, for a table of runs."""
        return {"optimizer": self.name} | dataclasses.asdict(self)


@declaration
class Optax:
    """The optimiser that a function of `optax` or `optax.contrib` makes.

    Its update gets the noisy gradient, its own state and the parameters. The learning rate is not among its arguments, since `lr_schedule`
    gives it at each step. A mask (`mask`, `weight_decay_mask`) may be `bert`: all parameters but biases and LayerNorm's.

    Attributes:
        name: Name of the function.
        arguments: Arguments of that function; one that is left out has optax's default.
    """

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.name.isidentifier(), f"optimizer.name={self.name}", "not a name of a function", "Write a name of optax, such as lion")
        require(
            "learning_rate" not in self.arguments,
            "optimizer.arguments.learning_rate",
            "lr_schedule gives the learning rate of each step",
            "Set lr_schedule.learning_rate",
        )

    def require_usable(self) -> None:
        """Raises `ConfigError` if optax has no such optimiser or arguments, or if its update needs more than it is given.

        This imports jax, so the number of simulated devices must be set before; it allocates no array.
        """
        from dpx.optimizer.from_optax import transformation

        transformation(self.name, self.arguments)

    @property
    def knobs(self) -> dict[str, Any]:
        """Returns its name and its declared arguments, for a table of runs."""
        return {"optimizer": self.name} | self.arguments


Optimizer = Adam | Optax
