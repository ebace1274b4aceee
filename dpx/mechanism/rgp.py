"""Declares `mechanism=rgp`, reparametrised gradient perturbation (Yu et al. 2021).

Clipping and noise act on low-rank carriers of every weight matrix.

In each step a weight matrix W [p, d] of the layers is replaced in the forward pass by A B + stop_gradient(W - A B), with A [p, r] and
B [r, d]. The gradients of A, of B and of all other trained parameters are clipped together, for each example, and summed, and Gaussian
noise is added once. The gradient of W is then computed from those of A and B (`dpx.mechanism.carriers.rebuilt`), for the optimiser.

What the proof covers. Within a step A and B are constants: a function of released parameters (W_t, and W_0, with which training began) and
of keys that no row enters. So the step is the Gaussian mechanism on a sum to which an example adds a vector of norm C at most, charged as
in `mechanism=dp_sgd`. Its query follows from earlier releases: that is adaptive composition, which every accountant here allows (Dwork and
Roth 2014, section 3.5; for Renyi accounting Mironov 2017, proposition 1). The update is a function of the noisy sum, A and B, so it is
post-processing. The proof fails if anything that depends on rows without noise enters A, B or the rebuilt gradient, such as a power
iteration on gradients. Carriers drawn for each microbatch would give sums of different gradients. Both are refused.

The paper decomposes what training has added to W so far, since it lies in the directions of the next gradients; its code for language
models decomposes W itself. `decomposes` chooses. Each matrix of a stack is one matrix of the model, `qkv` included, as in that code.

Source: Yu, Zhang, Chen, Yin and Liu, Large Scale Private Learning via Low-rank Reparametrization, ICML 2021 (PMLR 139:12208-12218,
arXiv 2106.09352). Its code is `language/bert` of github.com/dayu11/Differentially-Private-Deep-Learning, read at commit 73555c8: one round
of the power method, L before R, as here; the head's gradients divided by 10 before the norm, as here; its last term of the rebuilt gradient
has the other sign (`dpx.mechanism.carriers.rebuilt`).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from dpx.declaration import ConfigError, declaration, require
from dpx.mechanism.dp_sgd import GaussianSum
from dpx.mechanism.mechanism_protocol import Reparametrisation, Reparametrised
from dpx.models.model_protocol import ExampleModel, Shapes
from dpx.models.shape import RotaryDecoder
from dpx.randomness import RootSecret

# Parameters below the head, and those of an audit's canaries, by the first name of their paths; all others are the head.
BELOW_THE_HEAD = ("embeddings", "layers", "layers_below", "canaries")
DECOMPOSED = ("update", "weight")
MOST_ITERATIONS = 32
# Squares of gradients a thousand times as large, or as small, still count beside the others in a float32 norm.
HEAD_FACTORS = (1e-3, 1e3)


@declaration
class Rgp(GaussianSum, Reparametrisation):
    """Adds Gaussian noise to the clipped gradients of low-rank carriers for every trained weight matrix of the layers.

    The method is that of Yu et al. 2021.

    Attributes:
        rank: Rank of the carriers.
        decomposes: Matrix whose directions the carriers follow: update (W_t - W_0, or W_0 before the first step) or weight (W_t).
        power_iterations: Rounds of the power method that finds them, once a step.
        head_factor: Factor of the head's gradients before the joint norm.
        restores_head: Whether the head's sum is divided by that factor after the noise.
        carriers_per: How often the carriers are found; step is the only value that dpx supports.
    """

    rank: int = 1
    decomposes: str = "update"
    power_iterations: int = 1
    head_factor: float = 0.1
    restores_head: bool = False
    # How often carriers are drawn: any other value is refused.
    carriers_per: str = "step"
    name: Literal["rgp"] = "rgp"
    is_independent_gaussian: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"mechanism.rank={self.rank}", "a carrier needs a rank of at least 1", "Use 1 or more")
        require(
            self.decomposes in DECOMPOSED,
            f"mechanism.decomposes={self.decomposes}",
            "carriers that follow anything but released parameters, such as gradients, depend on rows without noise",
            "Use update or weight",
        )
        require(
            self.carriers_per == "step",
            f"mechanism.carriers_per={self.carriers_per}",
            "clipped sums in different carriers cannot be added up, and one noisy sum a step is what is charged",
            "Use step",
        )
        value = f"mechanism.power_iterations={self.power_iterations}"
        reason = "the columns of a Gaussian start are not orthonormal, as the rebuilt gradient needs them"
        require(self.power_iterations >= 1, value, reason, "Use 1 or more")
        reason = "every round is part of the compiled program of a step, and the directions no longer change"
        require(self.power_iterations <= MOST_ITERATIONS, value, reason, f"Use {MOST_ITERATIONS} or fewer")
        value = f"mechanism.head_factor={self.head_factor}"
        require(self.head_factor > 0, value, "the head would not be trained", "Use 0.1, or 1")
        least, most = HEAD_FACTORS
        reason = "beside the carriers' gradients the head's, or these beside it, would be lost in float32"
        require(least <= self.head_factor <= most, value, reason, f"Use {least:g} to {most:g}")

    def require_fits(self, model: Any, task: Any, train: Any) -> None:
        if isinstance(model, ExampleModel | RotaryDecoder):
            reason = "carriers replace the dense maps of a BERT's or a GPT-2's layers, and this model has others"
            raise ConfigError(f"mechanism=rgp, model={model.name}", reason, "Use a model of conf/model such as base, or mechanism=dp_sgd")
        kind = f"mechanism=rgp, train={train.kind}"
        is_adapted = hasattr(train, "targets")
        require(not is_adapted, kind, "adapters are low-rank already: their own gradients are clipped", "Use train=all or mechanism=dp_sgd")
        # The vocabulary decides neither the matrices of the layers nor the paths of the head.
        shapes = {path: shape for path, shape in task.parameter_shapes(model, 2).items() if train.selection().picks(path)}
        kernels = {path: shape for path, shape in shapes.items() if _is_kernel(path)}
        require(bool(kernels), kind, "trains no weight matrix of a layer, so there is nothing to write by carriers", "Use train=all")
        is_head_trained = any(self._is_head(path) for path in shapes)
        require(is_head_trained, kind, "freezes the head, which is not trained for the task yet", "Train it too")
        path, shape = min(kernels.items(), key=lambda item: min(item[1][-2:]))
        least = min(shape[-2:])
        reason = f"is above what a matrix {tuple(shape[-2:])} has ({path})"
        require(self.rank <= least, f"mechanism.rank={self.rank}", reason, f"Use a rank of at most {least}")

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the fields of Gaussian noise.

        Within a step the carriers are constants, and the joint norm of what an example adds is at most the clipping norm.
        """
        return {"noise": "gaussian"}

    def kept_from_start(self, params: Any) -> Any:
        """Returns the weight matrices W_0, a tree of these alone, if their update is decomposed."""
        if self.decomposes != "update":
            return None
        return {"layers": {path.split("/")[1]: {"kernel": kernel_Lpd} for path, kernel_Lpd in self._kernels(params).items()}}

    def draw_first(self, secret: RootSecret, step: int, params: Any) -> Any:
        """Returns a key for the power method's start of each stack of weight matrices, uint32 [2], by its path."""
        return {path: secret.key("carriers", step, path) for path in self._kernels(params)}

    def reparametrised(self, params: Any, kept: Any, drawn: Any) -> Reparametrised:
        from dpx.mechanism import carriers

        found, metrics, start = {}, {}, self._kernels(kept) if kept else {}
        for path, kernel_Lpd in self._kernels(params).items():
            matrix_Lpd = carriers.historical_update(kernel_Lpd, start[path]) if start else kernel_Lpd
            found[path] = carriers.decomposed(matrix_Lpd, drawn[path], self.rank, self.power_iterations)
            metrics[f"carriers/captured/{path}"] = carriers.captured(matrix_Lpd, *found[path])
        return Reparametrised(*carriers.split(params, found), metrics)

    def gradient_factor(self, path: str) -> float:
        return self.head_factor if self._is_head(path) else 1.0

    def rebuilt(self, noisy: Any, trained: Any) -> Any:
        import jax

        from dpx.mechanism import carriers
        from dpx.randomness import path_name

        if self.restores_head:
            noisy = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf / self.gradient_factor(path_name(path)), noisy)
        return carriers.rebuilt(noisy, trained)

    def summed_shapes(self, shapes: Shapes) -> Shapes:
        summed = {path: shape for path, shape in shapes.items() if not _is_kernel(path)}
        for path, (layers, inputs, outputs) in ((path, shape) for path, shape in shapes.items() if _is_kernel(path)):
            name = path.split("/")[1]
            summed |= {f"layers/lora/{name}/a": (layers, inputs, self.rank), f"layers/lora/{name}/b": (layers, self.rank, outputs)}
        return summed

    def extra_memory_bytes(self, parameters: int, replaced: int) -> int:
        """Returns the bytes of what the mechanism keeps of the weight matrices, in float32.

        It keeps the rest of each matrix beside its carriers, and the matrices with which training began.
        """
        return 4 * (2 if self.decomposes == "update" else 1) * replaced

    def noise_facts(self, clipping_norm: float, count_parameters: Callable[[], int]) -> dict[str, Any]:
        own = ("rank", "decomposes", "power_iterations", "head_factor", "restores_head")
        return super().noise_facts(clipping_norm, count_parameters) | {"carriers": {name: getattr(self, name) for name in own}}

    def explanation(self) -> list[str]:
        followed = "what training has added to it so far" if self.decomposes == "update" else "the matrix itself"
        return [
            f"Not the gradient of a weight matrix is clipped and noised but those of two factors of rank {self.rank}, drawn once a step to",
            f"follow {followed}; the matrix moves only in their directions. The head's gradients count {self.head_factor:g} of their size.",
        ]

    def _is_head(self, path: str) -> bool:
        return path.split("/")[0] not in BELOW_THE_HEAD

    def _kernels(self, params: Any) -> dict[str, Any]:
        """Returns the trained stacks of weight matrices, by path."""
        layers = params.get("layers", {}).items()
        return {f"layers/{name}/kernel": leaves["kernel"] for name, leaves in layers if name != "lora" and "kernel" in leaves}


def _is_kernel(path: str) -> bool:
    return path.startswith("layers/") and path.endswith("/kernel")
