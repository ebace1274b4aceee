"""torch's sums for `speed.py`: plain, and Opacus's by hooks and by ghost clipping. No jax in this process."""

# pyright: reportMissingImports=false

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from dpx.training.microbatch import synthetic_rows
from dpx_papers.benchmark.setting import Program, Setting

Inputs = dict[str, torch.Tensor]


def programs(setting: Setting) -> list[Program]:
    """One batch's sum by each variant."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    experiment = setting.experiment
    rows = synthetic_rows(experiment.task, setting.logical_batch, experiment.data.sequence_length, experiment.vocabulary_size)
    tokens = torch.tensor(rows["tokens"]).long()
    places = torch.arange(tokens.shape[1])
    inputs = {
        "input_ids": tokens,
        "attention_mask": (places < torch.tensor(rows["length"])[:, None]).long(),
        "token_type_ids": torch.zeros_like(tokens),
        # Opacus takes the first axis of every input of a layer for that of examples.
        "position_ids": places.expand(tokens.shape).contiguous(),
    }
    labels = torch.tensor(rows["label"]).long()
    return [program(variant, setting, inputs, labels) for variant in setting.variants]


def model_of(setting: Setting) -> nn.Module:
    """The same shape with random weights; adapters as ours, of what the experiment names."""
    shape = setting.experiment.model
    config = BertConfig(
        vocab_size=setting.experiment.vocabulary_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    train = setting.experiment.train
    if not train.is_all:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=train.rank, lora_alpha=train.alpha, target_modules=list(train.targets), modules_to_save=["classifier"])
        model = get_peft_model(model, adapters)
    return model.train()


def program(variant: str, setting: Setting, inputs: Inputs, labels: torch.Tensor) -> Program:
    torch.manual_seed(0)
    way = {"torch": plain, "opacus_hooks": hooks, "opacus_ghost": ghost}[variant]
    return Program({"kind": "sum"}, way(model_of(setting), setting.experiment.clip.clipping_norm, inputs, labels))


def losses(model: Any, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")


def plain(model: nn.Module, clipping_norm: float, inputs: Inputs, labels: torch.Tensor) -> Callable[[], None]:
    del clipping_norm

    def call() -> None:
        model.zero_grad()
        losses(model, inputs, labels).sum().backward()

    return call


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([leaf for leaf in model.parameters() if leaf.requires_grad], lr=0.0)


def hooks(model: nn.Module, clipping_norm: float, inputs: Inputs, labels: torch.Tensor) -> Callable[[], None]:
    """Per-example gradients in memory."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum")
    optimizer = DPOptimizer(
        optimizer_of(model), noise_multiplier=0.0, max_grad_norm=clipping_norm, expected_batch_size=None, loss_reduction="sum"
    )

    def call() -> None:
        forget(model, optimizer)
        losses(wrapped, inputs, labels).sum().backward()
        optimizer.signal_skip_step(True)
        optimizer.step()

    return call


def ghost(model: nn.Module, clipping_norm: float, inputs: Inputs, labels: torch.Tensor) -> Callable[[], None]:
    """Norms without gradients, then a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, batch_first=True, loss_reduction="sum", max_grad_norm=clipping_norm)
    optimizer = DPOptimizerFastGradientClipping(
        optimizer_of(model), noise_multiplier=0.0, max_grad_norm=clipping_norm, expected_batch_size=None, loss_reduction="sum"
    )

    def call() -> None:
        forget(model, optimizer)
        DPTensorFastGradientClipping(wrapped, optimizer, losses(wrapped, inputs, labels), "sum").backward()
        optimizer.signal_skip_step(True)
        optimizer.step()

    return call


def forget(model: nn.Module, optimizer: Any) -> None:
    """What the call before has summed."""
    for leaf in model.parameters():
        leaf.summed_grad = None  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.zero_grad()
