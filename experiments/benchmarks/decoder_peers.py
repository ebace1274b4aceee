"""Times a private LoRA microbatch of a decoder's checkpoint beside Opacus and jax-privacy, on the same weights and rows.

    python experiments/benchmarks/decoder_peers.py <checkpoint> [examples] [tokens] [rounds]

Adapters of rank 8 are on every dense map of a frozen float32 base. Opacus runs transformers' model with the same adapters, loaded by PEFT
from what dpx exports. Programs take turns, and the second of two runs is timed; each line has the median over rounds of the ratio of its
seconds to those of dpx's private sum, the extremes, and the largest difference of its clipped sum to dpx's, relative to the largest number
of that tensor. Needs the extras `bench` and `parity`. Run nothing beside it.
"""

# The extras are not in the environment that is checked.
# pyright: reportMissingImports=false

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from dpx import config
from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.clipping.readers import merged
from dpx.config import recipes
from dpx.data.tokenizer import SpecialIds
from dpx.files.weights import nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapters
from dpx.task.objective import objective
from dpx.training import frozen
from dpx.training.microbatch import synthetic_rows

GIVEN = ["init=hf", "init.provenance=public", "data=e2e", "task=causal_lm", "model.dtype=float32"]
GIVEN += ["train=lora", "train.rank=8", "train.targets=['*']"]
CLIPPING_NORM = 0.5
# The names of PEFT's modules end so; a tensor of the default adapter has its name in between.
_FACTORS = (".lora_A.weight", ".lora_B.weight")

# A program computes one sum; the second function returns its result by the names of PEFT's tensors.
Way = tuple[Callable[[], Any], Callable[[], dict[str, np.ndarray]] | None]


class Subject:
    """A checkpoint with drawn adapters, and one batch of random rows."""

    def __init__(self, checkpoint: str, examples: int, tokens: int):
        overrides = [*GIVEN, f"init.path={checkpoint}", f"data.sequence_length={tokens}"]
        self.experiment, _ = config.build(recipes.compose(overrides))
        one, receiver = self.experiment, self.experiment.receiver
        self.objective: Any = objective(one.model, one.task, one.vocabulary_size, SpecialIds(*range(5)))
        source = Checkpoint(checkpoint)
        start = nested(source.leaves(source.select(receiver.shapes, receiver.model)))
        self.trained, self.base = frozen.draw(one.train, self.objective, jax.random.key(0), start)
        leaves: dict[str, Any] = dict(flatten_dict(self.trained, sep="/"))
        for number, path in enumerate(sorted(leaves)):
            # B starts at zero, where the gradient of A is zero too.
            leaves[path] = 0.02 * jax.random.normal(jax.random.key(number), leaves[path].shape)
        self.trained = unflatten_dict(leaves, sep="/")
        self.rows = synthetic_rows(one.task, examples, tokens, one.vocabulary_size)
        self.batch = jax.jit(self.objective.batch)(np.zeros(2, np.uint32), self.rows)

    def losses(self, params: Any, batch: Any) -> Any:
        return self.objective.losses(params, batch, None)

    def written(self, trained: Any) -> Any:
        """Returns `trained` in PEFT's layout."""
        leaves = flatten_dict(merged(trained, self.base), sep="/")
        one = self.experiment
        return adapters(one.init, one.train, one.model, one.task, {path: np.asarray(leaf) for path, leaf in leaves.items()})


def in_jax(subject: Subject, examples: int) -> dict[str, Way]:
    """Returns dpx's private and plain sums, and jax-privacy's at microbatches of one example and of all."""
    from jax_privacy.clipping import clipped_grad

    def private(params: Any, base: Any, batch: Any) -> Any:
        weights = lambda norms_B: jnp.minimum(1.0, CLIPPING_NORM / norms_B)  # noqa: E731
        return clipped_sum(subject.losses, params, batch, weights=weights, frozen=base, checked=False).total

    def plain(params: Any, base: Any, batch: Any) -> Any:
        return plain_sum(subject.losses, params, batch, frozen=base).total

    def theirs(size: int) -> Callable[..., Any]:
        def loss(params: Any, base: Any, alone: Any) -> Any:
            return subject.losses(merged(params, base), alone)[0][0]

        return clipped_grad(loss, l2_clip_norm=CLIPPING_NORM, batch_argnums=2, microbatch_size=size)

    given = subject.trained, subject.base, subject.batch

    def way(function: Callable[..., Any]) -> Way:
        compiled = jax.jit(function).lower(*given).compile()
        return (lambda: jax.block_until_ready(compiled(*given))), lambda: subject.written(compiled(*given)).tensors

    sizes = sorted({1, examples})
    return {"private": way(private), "plain": (way(plain)[0], None)} | {f"jax_privacy({size})": way(theirs(size)) for size in sizes}


def in_torch(subject: Subject, checkpoint: str) -> dict[str, Way]:
    """Returns torch's plain sum and Opacus' sums by hooks and by ghost clipping, each on a separate model."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    losses, written = torch_losses(subject), subject.written(subject.trained)
    bare, hooked, ghostly = (torch_model(checkpoint, written) for _ in range(3))
    hooks = GradSampleModule(hooked, batch_first=True, loss_reduction="sum")
    ghost = GradSampleModuleFastGradientClipping(ghostly, batch_first=True, loss_reduction="sum", max_grad_norm=CLIPPING_NORM)

    def plain() -> None:
        bare.zero_grad()
        losses(bare).sum().backward()

    def by_ghost(optimizer: Any) -> None:
        DPTensorFastGradientClipping(ghost, optimizer, losses(ghost), "sum").backward()

    return {
        "torch, plain": (plain, None),
        "opacus_hooks": by_opacus(hooked, DPOptimizer, lambda _: losses(hooks).sum().backward()),
        "opacus_ghost": by_opacus(ghostly, DPOptimizerFastGradientClipping, by_ghost),
    }


def torch_model(checkpoint: str, written: Any) -> Any:
    """Returns transformers' model of the checkpoint with the adapters that dpx has written."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(written.config))
        save_file({name: np.ascontiguousarray(value) for name, value in written.tensors.items()}, Path(folder) / ADAPTER_WEIGHTS)
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return PeftModel.from_pretrained(base, folder, is_trainable=True).train()


def torch_losses(subject: Subject) -> Callable[[Any], Any]:
    """Returns the function of a module that gives the losses [B] of the subject's rows."""
    import torch

    batch = {name: torch.tensor(np.asarray(value)) for name, value in subject.batch.items()}
    tokens_BT, label_BT, has_label_BT = batch["tokens"].long(), batch["labels"].long(), batch["has_label"]
    is_read_BT = torch.arange(tokens_BT.shape[1]) < batch["length"][:, None]

    def losses(module: Any) -> Any:
        logits_BTV = module(input_ids=tokens_BT, attention_mask=is_read_BT.long(), use_cache=False).logits
        nats_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), label_BT, reduction="none")
        return (nats_BT * has_label_BT).sum(1) / has_label_BT.sum(1)

    return losses


def by_opacus(module: Any, kind: Any, backward: Callable[[Any], None]) -> Way:
    """Returns the clipped sum of an Opacus optimiser of this `kind`; `backward` is given the optimiser."""
    import torch

    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    options = {"noise_multiplier": 0.0, "max_grad_norm": CLIPPING_NORM, "expected_batch_size": None, "loss_reduction": "sum"}
    optimizer = kind(torch.optim.SGD(trained.values(), lr=0.0), **options)

    def run() -> None:
        for parameter in trained.values():
            parameter.summed_grad = None
        optimizer.zero_grad()
        backward(optimizer)
        optimizer.signal_skip_step(True)
        optimizer.step()

    return run, lambda: {name.replace(".default", ""): parameter.summed_grad.detach().numpy() for name, parameter in trained.items()}


def main(checkpoint: str, examples: int, tokens: int, rounds: int) -> None:
    """Prints one line a program."""
    subject = Subject(checkpoint, examples, tokens)
    ways = in_jax(subject, examples) | in_torch(subject, checkpoint)
    own, error = ways["private"][1](), {}  # pyright: ignore[reportOptionalCall]
    factors = [name for name in own if name.endswith(_FACTORS)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (run, result) in ways.items():
            # The first run after another library's finds neither its memory nor its data.
            run()
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
            elif result:
                summed = result()
                error[name] = max(float(np.abs(summed[one] - own[one]).max() / np.abs(own[one]).max()) for one in factors)
    print(f"{len(os.sched_getaffinity(0))} cores, {examples} examples of {tokens} tokens, {rounds} rounds, {len(factors)} tensors")
    for name, of_rounds in seconds.items():
        ratios = [other / one for other, one in zip(of_rounds, seconds["private"], strict=True)]
        differs = f", differs by {error[name]:.0e}" if name in error else ""
        print(f"{name:>16}: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]{differs}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, [*sys.argv[2:], *("4", "96", "7")[len(sys.argv) - 2 :]]))
