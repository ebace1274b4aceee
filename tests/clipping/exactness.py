"""The one comparison that every family, selection and method must pass: with float64 gradients of one example at a time."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.models import trainable
from dpx.models.lora import add_adapters
from dpx.models.model_protocol import COMPUTATION
from dpx.models.trained import BIAS, LAST_LAYER, LORA, LORA_FFA, Selection, either, matching, top
from dpx.task.declared_task import MultipleChoice
from tests.clipping.batches import QUICKLY, assert_trees_close, float64_gradients, parameters, squared_norm
from tests.clipping.families import DROPOUT_KEY, rows, subject

SELECTIONS = {
    "bias": BIAS,
    "last_layer": LAST_LAYER,
    "top": top(1),
    "lora": LORA,
    "lora_ffa": LORA_FFA,
    # Kernels whose inputs come through frozen gains, and the table of the decoder, but not the layers between.
    "kernels": matching("layers/qkv/kernel", "layers/up/kernel"),
    "positions": matching("embeddings/position"),
    "bias_and_top": either(BIAS, top(1)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, its parameters and a batch, with each example's float64 gradient by all parameters and its loss where they are asked for."""

    losses: Any
    params: Any
    batch: Any
    truth: Callable[[], tuple[list[Any], np.ndarray]]
    has_choices: bool

    @classmethod
    def build(cls, objective: Any, batch: Any, spread: float | None = None, with_adapters: bool = False, dropout: float = 0.0) -> "Case":
        """`spread` is the deviation of the parameters. Adapters do something: B is not zero, and `dropout` is that of their inputs."""
        has_choices = isinstance(objective.task, MultipleChoice)
        params = parameters(objective, spread=spread or (0.5 if has_choices else 0.3))
        if with_adapters:
            params = add_adapters(params, jax.random.key(3), rank=2, alpha=3.0, targets=("*",), dropout=dropout)
            drawn = np.random.default_rng(5)
            for adapter in params["layers"]["lora"].values():
                adapter["b"] = jnp.asarray(drawn.normal(0, 0.3, adapter["b"].shape), jnp.float32)

        def losses(params, batch):
            return objective.losses(params, batch, DROPOUT_KEY)

        return cls(losses, params, batch, cache(lambda: float64_gradients(losses, params, batch)), has_choices)

    def computed_by(self, objective: Any) -> "Case":
        """Returns the case with the loss of an objective that computes the same in another way."""
        return dataclasses.replace(self, losses=lambda params, batch: objective.losses(params, batch, DROPOUT_KEY))

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Loss, parameters and batch."""
        return self.losses, self.params, self.batch


@cache
def case(family: str, with_adapters: bool = False, adapter_dropout: float = 0.0, **changes: Any) -> Case:
    of = subject(family, **changes)
    plain = {name: value for name, value in changes.items() if name not in COMPUTATION}
    if plain != changes:
        # Against the gradients of the plain formula that keeps everything.
        return case(family, with_adapters, adapter_dropout, **plain).computed_by(of)
    return Case.build(of, rows(of), with_adapters=with_adapters, dropout=adapter_dropout)


def assert_exact(given: Case, selection: Selection | None = None, method: str = "book_keeping", **options: Any) -> None:
    """Squared norms, losses and the clipped sum of what is trained (`None`: everything); about half of the examples are clipped, and in a
    batch of more than two the third is padding.

    What all choices of an example share cancels in its gradient, so much that float32's own, by any method, may be off by more than
    1e-5: families of choices are clipped in float64 as well, and in float32, farther from initialisation, their sums must agree within 1e-5
    of the clipping norm. The keys' cotangents add up to zero by softmax's shift invariance: what is left of an adapter's gradient is
    rounding's, hence 1e-7 of it where only some parameters are trained.
    """
    split = (lambda tree: trainable.split(tree, selection)) if selection is not None else (lambda tree: (tree, None))
    gradients, losses_B = given.truth()
    gradients = [split(gradient)[0] for gradient in gradients]
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    limit = float(np.median(norms))
    is_padding_B = np.arange(len(norms)) == 2
    factors = np.where(is_padding_B, 0, limit / np.maximum(norms, limit))
    expected = jax.tree.map(lambda *leaves: sum(c * g for c, g in zip(factors, leaves, strict=True)), *gradients)

    def clipped(trained, frozen, batch, is_padding_B):
        weights = lambda norms_B: limit / jnp.maximum(norms_B, limit)  # noqa: E731
        more = {"weights": weights, "method": method, "checked": False} | options
        return dpx.clipped_sum(given.losses, trained, batch, frozen=frozen, is_padding_B=is_padding_B, **more)

    def assert_found(params: Any, relative: float, floor: float) -> None:
        trained, frozen = split(params)
        found = jax.jit(clipped, compiler_options=QUICKLY)(trained, frozen, given.batch, jnp.asarray(is_padding_B))
        assert jax.tree.structure(found.total) == jax.tree.structure(trained)
        np.testing.assert_allclose(np.square(found.norms_B), np.where(is_padding_B, 0, np.square(norms)), rtol=relative, atol=1e-12)
        np.testing.assert_allclose(found.losses_B[~is_padding_B], losses_B[~is_padding_B], rtol=relative)
        assert np.all(np.asarray(found.norms_B)[norms == 0] == 0)
        np.testing.assert_array_equal(found.is_counted_B, ~is_padding_B)
        assert_trees_close(found.total, expected, relative, floor)

    assert_found(given.params, 1e-5, 1e-5 * limit if given.has_choices else 1e-12 if selection is None else 1e-7 * limit)
    if given.has_choices:
        with jax.enable_x64(True):
            assert_found(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), given.params), 1e-6, 1e-12)
