"""Runs torch's plain step and Opacus's private ones on the model of torch_bert.py.

It measures the sums of one logical batch, without jax in this process.
"""

# torch and opacus are in the extra `bench`.
# pyright: reportMissingImports=false

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpx.declaration import ConfigError, require
from dpx.models.shape import AnyModel, Bert
from dpx.task.declared_task import MaskedLanguageModel, Task
from dpx.training.microbatch import synthetic_rows
from dpx_papers.benchmark.setting import Program, Setting, identity
from dpx_papers.benchmark.torch_bert import Rows, TorchBert, inputs, losses

# Opacus adds 1e-6 to a norm before it divides; a forgotten term is some per cent.
EXACT = 1e-4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_SMALL = {"layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "dropout": 0.0}

Sums = Callable[[list[Rows]], None]


def programs(setting: Setting) -> list[Program]:
    """Returns a sum for every (variant, physical batch)."""
    experiment = setting.experiment
    bert_of(experiment.model, experiment.task)
    require(
        tuple(setting.dtypes) == ("float32",),
        "dtypes",
        "the programs in torch compute in float32 only",
        "Use dtypes=[float32], or remove these variants",
    )
    torch.set_default_device(DEVICE)
    # Opacus's hooks sit on embeddings too, whose inputs are indices.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return [program for variant in setting.variants for program in _programs(setting, variant)]


def bert_of(model: AnyModel, task: Task) -> tuple[Bert, MaskedLanguageModel]:
    """Returns the model and the task, for which the peers are written; raises `ConfigError` for others."""
    if isinstance(model, Bert) and isinstance(task, MaskedLanguageModel):
        return model, task
    raise ConfigError(f"model={model.name}", "the programs in torch support BERT with masked words only", "Remove these variants")


def _programs(setting: Setting, variant: str) -> list[Program]:
    """Returns the programs of one variant at every physical batch; they share one model."""
    experiment = setting.experiment
    vocabulary, length = experiment.vocabulary_size, experiment.data.sequence_length
    model, task = bert_of(experiment.model, experiment.task)
    subject = Subject.make(variant, model, task, vocabulary, experiment.clip.clipping_norm)
    rows = masked_rows(task, setting.logical_batch, length, vocabulary)
    torch.set_float32_matmul_precision("highest")
    error = None if variant == "torch" else clipped_sum_error(model, task, variant)
    # While they are timed, products of float32 run as XLA runs them by default on the same device.
    torch.set_float32_matmul_precision("high")
    facts = {"kind": "sum", "framework": f"torch {torch.__version__}"}
    facts |= {"temporary_bytes": None, "matmul_flops": None, "collectives": None, "clipped_sum_error": error}
    facts |= {"is_exact": None if error is None else error <= EXACT, "is_tied": variant != "opacus_ghost"}

    def program(size: int) -> Program:
        parts = [{name: value[at : at + size] for name, value in rows.items()} for at in range(0, setting.logical_batch, size)]

        def call() -> None:
            subject.sum(parts)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()

        return Program(identity(setting, variant, "float32", size) | facts, call)

    return [program(size) for size in setting.physical_batches]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and the way in which a library sums its gradients over microbatches; `summed` gives the result under the model's names."""

    model: TorchBert
    sum: Sums
    is_private: bool

    @classmethod
    def make(cls, variant: str, model: Bert, task: MaskedLanguageModel, vocabulary: int, clipping_norm: float) -> "Subject":
        """Returns the model of `variant` with the sums of its library."""
        torch.manual_seed(0)
        # Ghost clipping refuses a weight that is used twice, so its row measures another model, which has a separate decoder.
        bare = TorchBert(model, vocabulary, task.next_sentence, is_tied=variant != "opacus_ghost")
        make = {"torch": _plain, "opacus_hooks": _per_example, "opacus_ew": _per_example, "opacus_ghost": _ghost}[variant]
        return cls(bare, make(bare, variant, clipping_norm), variant != "torch")

    def summed(self) -> dict[str, Tensor]:
        """Returns the summed gradients by the model's names."""
        kept = "summed_grad" if self.is_private else "grad"
        return {name: getattr(parameter, kept) for name, parameter in self.model.named_parameters()}


def _plain(model: TorchBert, variant: str, clipping_norm: float) -> Sums:
    del variant, clipping_norm

    def run(parts: list[Rows]) -> None:
        model.zero_grad()
        for rows in parts:
            losses(model(*inputs(rows, _dtype(model))), rows).sum().backward()

    return run


def _per_example(model: TorchBert, variant: str, clipping_norm: float) -> Sums:
    """Returns sums by per-example gradients in memory, from hooks or torch's expanded weights."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    kind = GradSampleModule if variant == "opacus_hooks" else GradSampleModuleExpandedWeights
    wrapped = kind(model, batch_first=True, loss_reduction="sum")
    optimizer = DPOptimizer(_idle(model), noise_multiplier=0.0, max_grad_norm=clipping_norm, expected_batch_size=None, loss_reduction="sum")

    def backward(rows: Rows) -> None:
        losses(wrapped(*inputs(rows, _dtype(model))), rows).sum().backward()

    return _accumulated(model, optimizer, backward)


def _ghost(model: TorchBert, variant: str, clipping_norm: float) -> Sums:
    """Returns sums by norms without gradients, then a second backward pass."""
    del variant
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, batch_first=True, loss_reduction="sum", max_grad_norm=clipping_norm)
    optimizer = DPOptimizerFastGradientClipping(
        _idle(model), noise_multiplier=0.0, max_grad_norm=clipping_norm, expected_batch_size=None, loss_reduction="sum"
    )

    def backward(rows: Rows) -> None:
        losses_B = losses(wrapped(*inputs(rows, _dtype(model))), rows)
        DPTensorFastGradientClipping(wrapped, optimizer, losses_B, "sum").backward()

    return _accumulated(model, optimizer, backward)


def _accumulated(model: TorchBert, optimizer: Any, backward: Callable[[Rows], None]) -> Sums:
    """Returns clipped sums of all microbatches, as Opacus adds them up if the optimiser is told to skip its step."""

    def run(parts: list[Rows]) -> None:
        for parameter in model.parameters():
            parameter.summed_grad = None  # pyright: ignore[reportAttributeAccessIssue]
        for rows in parts:
            optimizer.zero_grad()
            backward(rows)
            optimizer.signal_skip_step(True)
            optimizer.step()
        # The last microbatch's gradients would otherwise stay in memory while others are timed.
        optimizer.zero_grad()

    return run


def _idle(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _dtype(model: TorchBert) -> torch.dtype:
    return model.word.weight.dtype


def masked_rows(task: MaskedLanguageModel, examples: int, length: int, vocabulary: int) -> Rows:
    """Returns random rows of a masked batch; the labels are the tokens at the masked positions."""
    rows = synthetic_rows(task, examples, length, vocabulary)
    drawn = np.random.default_rng(1)
    order = np.argsort(drawn.random((examples, length)) + 2 * (np.arange(length) >= rows["length"][:, None]), axis=1)
    masked_positions = order[:, : task.masked_positions(length)]
    wanted = np.maximum(1, (task.masking_rate * rows["length"]).astype(int))
    rows |= {"masked_positions": masked_positions, "labels": np.take_along_axis(rows["tokens"], masked_positions, 1)}
    rows["has_label"] = np.arange(masked_positions.shape[1]) < wanted[:, None]
    return {name: torch.tensor(value) for name, value in rows.items()}


def clipped_sum_error(declared: Bert, task: MaskedLanguageModel, variant: str) -> float:
    """Returns the error as `dpx.training.exactness` does, for torch: a small model against float64 gradients, one example at a time."""
    model = dataclasses.replace(declared, **_SMALL)
    rows = masked_rows(task, 5, 12, 16)
    probe = Subject.make(variant, model, task, 16, 1.0).model
    values = {name: torch.randn(p.shape, generator=torch.Generator(DEVICE).manual_seed(2)) * 0.3 for name, p in probe.named_parameters()}
    model_f64 = TorchBert(model, 16, task.next_sentence, is_tied=variant != "opacus_ghost").double()
    _set(model_f64, values)
    gradients = []
    for b in range(5):
        alone = {name: value[b : b + 1] for name, value in rows.items()}
        model_f64.zero_grad()
        losses(model_f64(*inputs(alone, torch.float64)), alone).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model_f64.named_parameters() if p.grad is not None})
    norms = [torch.sqrt(torch.stack([leaf.square().sum() for leaf in one.values()]).sum()).item() for one in gradients]
    clipping_norm = 0.5 * min(norms)
    subject = Subject.make(variant, model, task, 16, clipping_norm)
    _set(subject.model, values)
    subject.sum([rows])
    summed = subject.summed()
    weights = [clipping_norm / norm for norm in norms]
    expected = {name: torch.stack([one[name] * w for one, w in zip(gradients, weights, strict=True)]).sum(0) for name in values}
    # The maximum of numpy keeps a NaN, wherever it stands.
    return float(np.max([float((summed[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in expected.items()]))


def _set(model: TorchBert, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
