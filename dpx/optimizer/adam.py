"""DP-Adam's update as printed in Anil et al. 2021, Algorithm 1."""

import dataclasses
from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require


@declaration
class Adam:
    """theta <- theta - eta * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta), moments bias-corrected.

    `eps` is the paper's xi. `decay_mask="bert"` exempts LayerNorm parameters and biases as BERT's code does;
    `"none"` decays every parameter, as the formula is printed.
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
        """Does nothing: whatever could be wrong was refused when it was declared."""

    @property
    def knobs(self) -> dict[str, Any]:
        """Its name and its values, for a table of runs."""
        return {"optimizer": self.name} | dataclasses.asdict(self)
