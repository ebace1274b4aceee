"""What a private LoRA microbatch of SmolLM2-135M costs beside a plain one: matrix-product FLOPs and temporaries, without a clock.

    python experiments/benchmarks/lora_products.py [examples] [further overrides ...]

The products are counted in the traced program, the temporaries by the compiler for this machine's CPU; nothing runs and no weights are
made. `plain` runs the same blocks as the private step, `autodiff` is `jax.grad` of the modules. The base is frozen, and adapters are on
every dense map.
"""

import sys
from typing import Any

import jax
import numpy as np

from dpx import config
from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.config import recipes
from dpx.cost.traced import matmul_flops
from dpx.data.tokenizer import SpecialIds
from dpx.task.objective import objective
from dpx.training import frozen
from dpx.training.microbatch import synthetic_rows

GIVEN = ["model=smollm2_135m", "task=causal_lm", "data.vocabulary.size=49152", "train=lora", "train.rank=8", "train.targets=['*']"]
GIVEN += ["data.sequence_length=128"]


def main(examples: int, overrides: list[str]) -> None:
    """Prints FLOPs, bytes and both ratios to the plain step of each way to sum a microbatch of `examples` examples."""
    experiment, _ = config.build(recipes.compose([*GIVEN, *overrides]))
    subject: Any = objective(experiment.model, experiment.task, experiment.vocabulary_size, SpecialIds(*range(5)))
    rows = synthetic_rows(experiment.task, examples, experiment.data.sequence_length, experiment.vocabulary_size)
    key, weights = np.zeros(2, np.uint32), experiment.clip.weights(experiment.clip.clipping_norm)
    given = (*frozen.shapes(experiment.train, subject), jax.eval_shape(subject.batch, key, rows))

    def losses(params: Any, batch: Any) -> Any:
        return subject.losses(params, batch, key)

    ways = {
        "plain": lambda params, rest, batch: plain_sum(losses, params, batch, frozen=rest).total,
        "autodiff": lambda params, rest, batch: plain_sum(losses, params, batch, frozen=rest, fused=False).total,
        "book_keeping": lambda params, rest, batch: clipped_sum(losses, params, batch, weights=weights, frozen=rest, checked=False).total,
    }
    counted = {}
    for name, way in ways.items():
        compiled = jax.jit(way).lower(*given).compile()
        counted[name] = matmul_flops(way, *given), compiled.memory_analysis().temp_size_in_bytes
        ratios = [own / plain for own, plain in zip(counted[name], counted["plain"], strict=True)]
        print(
            f"{name:>13}: {counted[name][0]:.4e} FLOPs ({ratios[0]:.4f}), {counted[name][1] / 2**20:,.0f} MiB ({ratios[1]:.4f})", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4, sys.argv[2:])
