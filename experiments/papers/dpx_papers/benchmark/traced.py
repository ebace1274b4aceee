"""Measures programs on shapes alone: products by tracing, temporaries by compiling; nothing is allocated or run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.mechanism.clip import Flat
from dpx.task import mlm
from dpx.task.declared_task import MaskedLanguageModel
from dpx_papers.benchmark.sums import variant_sum

KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Traced:
    """The shapes of parameters and of a masked batch of `examples`."""

    objective: Any
    params: Any
    batch: Any
    examples: int

    @classmethod
    def trace(cls, model: Any, length: int, vocabulary: int, examples: int) -> "Traced":
        """Returns the shapes for a model and `examples` rows of `length` tokens."""
        task = MaskedLanguageModel(next_sentence=False, max_masked_positions=length)
        objective = mlm.objective(model, task, vocabulary, mlm.Special(0, 1, 2, 3, 4))
        scalar = jax.ShapeDtypeStruct((examples,), jnp.int32)
        rows = {name: scalar for name in ("segment_start", "length", "is_next", "record")}
        rows["tokens"] = jax.ShapeDtypeStruct((examples, length), jnp.int32)
        return cls(objective, jax.eval_shape(objective.init, KEY), jax.eval_shape(objective.batch, KEY, rows), examples)

    @property
    def parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def flops(self, variant: str, **options: Any) -> int:
        """Returns the matrix-product FLOPs of one example."""
        return matmul_flops(self._sum(variant, **options), self.params, self.batch) // self.examples

    def temporary_bytes(self, variant: str, **options: Any) -> int:
        """Returns the bytes of the compiler's temporaries for the whole batch, on this machine's first device."""
        return temporary_bytes(self._sum(variant, **options), self.params, self.batch)

    def _sum(self, variant: str, **options: Any) -> Any:
        return variant_sum(self.objective, Flat(clipping_norm=1.0), variant, self.examples, **options)
