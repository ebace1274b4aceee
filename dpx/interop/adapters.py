"""Writes a run's adapters in PEFT's layout: `adapter_config.json`, the adapters' tensors, and the tensors of a head trained with them.

PEFT adds lora_alpha / r x B A to the map of a module. GPT-2's query, key and value are one module: its adapter joins their adapters side by
side, so that its rank is the sum of their ranks, with zeros where a target's B has no outputs.

L: layers, p: inputs, d: outputs of a module, c: outputs of a target, r: rank.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpx.config.declared_init import FromCheckpoint, Init
from dpx.declaration import require
from dpx.files.checkpoint_folder import called
from dpx.files.weights import Leaves, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import Written, architecture_of, family_of
from dpx.models.checkpoint_shape import LAYOUTS, ROTARY
from dpx.models.layouts import Layout
from dpx.models.lora import Target, targets_of
from dpx.models.shape import AnyModel
from dpx.models.trained import Adapters, Trained
from dpx.task.declared_task import CausalLanguageModel, Classification, MultipleChoice, Task

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASK_TYPES: dict[type, str] = {Classification: "SEQ_CLS", CausalLanguageModel: "CAUSAL_LM"}
_LORA = "layers/lora/"
# The prefix of the base model's own name of each tensor.
_BASE = "base_model.model."
_FIX = "Export whole weights: job.format=hf"
_Adapter = tuple[Target, Mapping[str, np.ndarray]]


def adapters(
    init: Init, train: Trained, model: AnyModel, task: Task, leaves: Leaves, last_mark: int | None = None, name: str | None = None
) -> Written:
    """Returns the adapters among a run's released parameters `leaves`, not merged; `last_mark` is the id of the token that ends a text.

    `name` is the hub id of the base model; by default that of `init.path`, or the last name of its folder.

    Raises `ConfigError` for a run without adapters or without a named base model, if that model differs from the one that the run began
    from, and if its class would read another token.
    """
    require(isinstance(train, Adapters), f"train={train.kind}", "does not train adapters that PEFT can add to a base model", _FIX)
    require(isinstance(init, FromCheckpoint), f"init={init.kind}", "does not name a base model for the adapters", _FIX)
    assert isinstance(train, Adapters) and isinstance(init, FromCheckpoint)
    family = family_of(model, task)
    layout = LAYOUTS[family]
    beside = {path: leaf for path, leaf in leaves.items() if not path.startswith(_LORA)}
    trained = {path for path in beside if train.selection().picks(path)}
    has_own_module = not trained or isinstance(task, Classification | MultipleChoice)
    require(
        has_own_module,
        f"train.head=true with task={task.name}",
        "PEFT saves whole modules, but this head shares its table with the embeddings",
        _FIX,
    )
    base = Checkpoint(init.path)
    _require_same_base(base, beside, trained)
    _require_ends_are_read(base, family, task, last_mark)
    modules = _modules(layout, nested(leaves)["layers"])
    saved = {_module_of(layout, path) for path in trained}
    name = name or called(init.path)
    config = _config(train, name, task, modules, saved, is_transposed=family == "gpt2")
    parts = layout.parts(layout.prefix)
    tensors = {name: values for path in trained for name, values in parts[path].theirs(beside[path]).items()}
    for module, adapters in modules.items():
        tensors |= _tensors(module, adapters)
    named = {_BASE + name: values for name, values in tensors.items()}
    return Written(family, architecture_of(model, task, family), config, named, CONFIG, WEIGHTS, base=name)


def _require_ends_are_read(base: Checkpoint, family: str, task: Task, last_mark: int | None) -> None:
    """Raises `ConfigError` if the class of transformers would pass over the token that ends a text, `last_mark`."""
    # A decoder's class for labels reads the last token that is not padding.
    is_decoders_classifier = family in ("gpt2", *ROTARY) and isinstance(task, Classification)
    is_passed_over = is_decoders_classifier and last_mark is not None and base.config.get("pad_token_id") == last_mark
    reason = f"pads with {last_mark}, the token that ends a text, so the model would ignore the end of a text"
    require(not is_passed_over, base.asked, reason, _FIX)


def _config(
    train: Adapters, base: str, task: Task, modules: Mapping[str, list[_Adapter]], saved: set[str], *, is_transposed: bool
) -> dict[str, Any]:
    """Returns PEFT's `adapter_config.json`; `saved` names the modules that are saved whole, `is_transposed` tells GPT-2's dense maps."""
    ranks = {_pattern(module): len(adapters) for module, adapters in modules.items() if len(adapters) > 1}
    return {
        "peft_type": "LORA",
        "task_type": _TASK_TYPES.get(type(task)),
        "base_model_name_or_path": base,
        "r": train.rank,
        "lora_alpha": train.alpha,
        "lora_dropout": train.dropout,
        "rank_pattern": {module: count * train.rank for module, count in ranks.items()},
        "alpha_pattern": {module: count * train.alpha for module, count in ranks.items()},
        "target_modules": "|".join(map(_pattern, modules)),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "inference_mode": True,
    }


def _require_same_base(checkpoint: Checkpoint, leaves: Leaves, trained: set[str]) -> None:
    """Raises `ConfigError` unless the base model still holds the frozen parameters, which are not written."""
    untrained = {path: leaf for path, leaf in leaves.items() if path not in trained}
    parameters = checkpoint.select({path: leaf.shape for path, leaf in untrained.items()})
    for path, values in checkpoint.leaves(parameters).items():
        is_same = values.tobytes() == untrained[path].tobytes()
        require(
            is_same, checkpoint.asked, f"contains other values of {path} than the values that the run began from", f"Restore it. {_FIX}"
        )


def _modules(layout: Layout, layers: Mapping[str, Any]) -> dict[str, list[_Adapter]]:
    """Returns, by the base model's name of each adapted module, its adapters; `{}` in the name is the layer's number."""
    parts, by_module, lora = layout.parts(layout.prefix), {}, layers["lora"]
    for name, target in targets_of(layers).items():
        if name in lora:
            names = parts[f"layers/{target.weight}/kernel"].names
            is_alone = len(names) == target.parts
            own = Target(target.weight) if is_alone else target
            module = names[target.part if is_alone else 0].removesuffix(".weight")
            by_module.setdefault(module, []).append((own, lora[name]))
    return by_module


def _tensors(module: str, adapters: list[_Adapter]) -> dict[str, np.ndarray]:
    """Returns `lora_A` [r, p] and `lora_B` [d, r] of one module in each layer; r is the sum of its adapters' ranks."""
    a_Lrp = np.concatenate([p["a"].swapaxes(1, 2) for _, p in adapters], axis=1)
    b_Lrd = np.concatenate([np.asarray(target.placed(jnp.asarray(p["b"]))) for target, p in adapters], axis=1)
    tensors = {}
    for layer in range(len(a_Lrp)):
        tensors[f"{module.format(layer)}.lora_A.weight"] = a_Lrp[layer]
        tensors[f"{module.format(layer)}.lora_B.weight"] = b_Lrd[layer].T
    return tensors


def _pattern(module: str) -> str:
    """Returns a regular expression for a module in every layer: PEFT reads a list of names as endings, and one name can end another."""
    return re.escape(module).replace(r"\{\}", r"\d+")


def _module_of(layout: Layout, path: str) -> str:
    """Returns the module that PEFT saves for a trained parameter: the one that holds it in the body, or the whole head."""
    name = layout.parts(layout.prefix)[path].names[0]
    return name.rpartition(".")[0] if any(part.path == path for part in layout.body) else name.partition(".")[0]
