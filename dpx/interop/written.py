"""Converts a run's weights to a checkpoint: whole ones, which `transformers` reads, or adapters in PEFT's layout.

PEFT adds lora_alpha / r x B A to the map of a module. GPT-2's query, key and value are one module: its adapter joins their adapters side by
side, so that its rank is the sum of their ranks, with zeros where a target's B has no outputs. A head that was trained with adapters is
saved beside them.

An exported classifier gets what the trained one leaves out: an identity before its output, and the units of a number. The classes of
transformers always have a dense map before the output of an encoder's classifier. A head that was trained without one
(`model.classifier=linear_tanh`, `linear_relu`) is exported with the identity there: what transformers computes is what was measured.

L: layers, p: inputs, d: outputs of a module, c: outputs of a target, r: rank.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpx.config.declared_init import FromCheckpoint, Init
from dpx.declaration import ConfigError, require
from dpx.files.weights import CONFIG, WEIGHTS, Leaves, called, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.models.checkpoint_shape import LAYOUTS, ROTARY, Rotary
from dpx.models.layouts import written_sizes
from dpx.models.lora import Target, targets_of
from dpx.models.shape import NEW_ROWS, AnyModel, Bert, Decoder
from dpx.models.trained import Adapters, Trained
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task, label_names
from dpx.task.task_protocol import Pooled

_HEADS: dict[type, str] = {
    MaskedLanguageModel: "ForMaskedLM",
    Classification: "ForSequenceClassification",
    Regression: "ForSequenceClassification",
    MultiLabel: "ForSequenceClassification",
    MultipleChoice: "ForMultipleChoice",
}
# What the class for labels computes its loss by; a pipeline chooses sigmoid, softmax or neither by it.
_PROBLEMS: dict[type, str] = {
    Classification: "single_label_classification",
    Regression: "regression",
    MultiLabel: "multi_label_classification",
}
_OF_LABELS = tuple(_PROBLEMS)
# The model's class without a head's ending, and endings by task.
_CLASSES: dict[str, tuple[str, Mapping[type, str]]] = {
    "bert": ("Bert", _HEADS),
    "roberta": ("Roberta", _HEADS),
    "distilbert": ("DistilBert", _HEADS),
    "gpt2": ("GPT2", {CausalLanguageModel: "LMHeadModel"} | dict.fromkeys(_OF_LABELS, "ForSequenceClassification")),
}
_OF_ROTARY: Mapping[type, str] = {CausalLanguageModel: "ForCausalLM"} | dict.fromkeys(_OF_LABELS, "ForSequenceClassification")
_CLASSES |= {model_type: (kind.CLASSES[model_type], _OF_ROTARY) for model_type, kind in ROTARY.items()}

_LABELS = {"vaultgemma": ("VaultGemma", None), "gemma3_text": ("Gemma3Text", "ForSequenceClassification")}


@dataclass(frozen=True)
class Written:
    """Holds a checkpoint to write.

    `architecture` names the class that computes the same function as the model; `base` is the model that adapters belong to.
    """

    family: str
    architecture: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    config_file: str = CONFIG
    weights_file: str = WEIGHTS
    base: str | None = None


def written(model: AnyModel, task: Task, leaves: Leaves, vocabulary_size: int, labels: Sequence[str], special: Any) -> Written:
    """Returns the checkpoint of a model with the parameters `leaves`; `special` has the ids of the marks.

    Raises `ConfigError` for a model or a head that no class of transformers has.
    """
    family = family_of(model, task)
    layout = LAYOUTS[family]
    parts = layout.parts(layout.prefix)
    unknown = sorted(path for path in leaves if path not in parts)
    require(not unknown, f"model={model.name}", f"{', '.join(unknown[:1])} does not exist in {family}", "Export a model of dpx")
    tensors = {name: values for path, leaf in leaves.items() for name, values in parts[path].theirs(np.asarray(leaf)).items()}
    if layout.bias is not None and layout.decoder.path in leaves:
        one, other = layout.bias
        tensors[other] = tensors[one].copy()
    architecture = architecture_of(model, task, family)
    assert isinstance(model, Bert | Decoder | Rotary)
    if isinstance(model, Rotary):
        sizes = model.to_config()
    elif isinstance(model, Decoder):
        activation = {"tanh": "gelu_new", "exact": "gelu"}[model.gelu]
        sizes = written_sizes(model, family) | {"n_inner": model.feed_forward, "activation_function": activation}
        sizes |= {"layer_norm_epsilon": model.layer_norm_eps}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    elif family == "distilbert":
        value = f"model.layer_norm_eps={model.layer_norm_eps}"
        require(model.layer_norm_eps == 1e-12, value, "DistilBERT supports only 1e-12", "Use model.layer_norm_eps=1e-12")
        sizes = written_sizes(model, family) | {"activation": "gelu", "sinusoidal_pos_embds": False}
        sizes |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), model.dropout)
    else:
        sizes = written_sizes(model, family) | {"max_position_embeddings": model.positions + model.position_offset}
        sizes |= {"type_vocab_size": model.segments, "layer_norm_eps": model.layer_norm_eps, "hidden_act": "gelu"}
        sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)

    config = {"architectures": [architecture], "model_type": family, "torch_dtype": "float32"}
    config |= sizes | {"vocab_size": vocabulary_size, "pad_token_id": special.pad_id}
    config |= {"tie_word_embeddings": model.tied, "initializer_range": model.initialiser_range}
    if isinstance(model, Decoder | Rotary):
        # The token that ends a text for `generate`.
        config |= {"bos_token_id": special.cls_id, "eos_token_id": special.sep_id}
    if family == "roberta":
        # It counts positions from the one after padding's id.
        is_padding, fix = special.pad_id == model.position_offset - 1, "Train with RoBERTa's own tokenizer, or model.position_offset=0"
        require(
            is_padding,
            f"model.position_offset={model.position_offset}",
            f"RoBERTa needs {special.pad_id + 1} with this id for padding",
            fix,
        )
    if isinstance(task, Pooled):
        config |= {"problem_type": _PROBLEMS[type(task)]} if type(task) in _PROBLEMS else {}
        # Transformers' classes of choices give one value a text and read no label; these names still state how many texts a row has.
        names = label_names(task, labels)
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    return Written(family, architecture, config, tensors)


def family_of(model: AnyModel, task: Task) -> str:
    """Returns the family (a key of `LAYOUTS`) of a model, by the function that it computes. Raises `ConfigError` if it belongs to no
    family."""
    if isinstance(model, Decoder):
        return "gpt2"
    if isinstance(model, Rotary):
        return model.family
    if not isinstance(model, Bert):
        raise ConfigError(f"model={model.name}", "does not belong to a model family of transformers", "Export a model of dpx")
    has_classifier = isinstance(task, Pooled)
    fix = "Train with model.pool=cls and the classifier of the model's own family"
    require(
        not has_classifier or model.pool == "cls",
        f"model.pool={model.pool}",
        "the classifiers of transformers do not pool by the mean",
        fix,
    )
    if model.position_offset:
        reason = f"no model of transformers combines it with model.position_offset={model.position_offset}"
        require(model.segments > 0, "model.segments=0", reason, "Use model.segments=1")
        # RobertaForMultipleChoice reads the encoder's pooler, as BERT's heads do.
        family, own = "roberta", "pooler" if isinstance(task, MultipleChoice) else "dense"
    elif model.segments:
        family, own = "bert", "pooler"
    else:
        family, own = "distilbert", "relu"
    reason = f"is not the classifier of {family}"
    require(not has_classifier or model.classifier == own, f"model.classifier={model.classifier}", reason, fix)
    return family


def architecture_of(model: AnyModel, task: Task, family: str) -> str:
    """Returns the class of transformers. Raises `ConfigError` if the family has no class for the task."""
    name, heads = _CLASSES[family]
    if isinstance(task, MaskedLanguageModel) and task.next_sentence:
        return "BertForPreTraining"
    head = heads.get(type(task))
    # The only classes of labels that transformers does not have, or names otherwise.
    if isinstance(task, _OF_LABELS) and family in _LABELS:
        name, head = _LABELS[family]
    if head is None:
        raise ConfigError(
            f"task={task.name} with model={model.name}",
            f"transformers has no class for this task with {name}",
            "Export a run of another task",
        )
    return name + head


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASK_TYPES: dict[type, str] = {CausalLanguageModel: "CAUSAL_LM"} | dict.fromkeys(_OF_LABELS, "SEQ_CLS")
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
    has_new = any(path in NEW_ROWS for path in leaves)
    require(not has_new, "model.new_tokens=mean", "PEFT adds adapters to a base model, and that has no rows for new tokens", _FIX)
    layout = LAYOUTS[family]
    beside = {path: leaf for path, leaf in leaves.items() if not path.startswith(_LORA)}
    trained = {path for path in beside if train.selection().picks(path)}
    has_own_module = not trained or isinstance(task, Pooled)
    require(
        has_own_module,
        f"train.head=true with task={task.name}",
        "PEFT saves whole modules, but this head shares its table with the embeddings",
        _FIX,
    )
    base = Checkpoint(init.path)
    # The base model still holds the frozen parameters, which are not written.
    untrained = {path: leaf for path, leaf in beside.items() if path not in trained}
    for path, values in base.leaves(base.select({path: leaf.shape for path, leaf in untrained.items()})).items():
        reason = f"contains other values of {path} than the values that the run began from"
        require(values.tobytes() == untrained[path].tobytes(), base.asked, reason, f"Restore it. {_FIX}")
    # A decoder's class for labels reads the last token that is not padding.
    is_decoders_classifier = family in ("gpt2", *ROTARY) and isinstance(task, _OF_LABELS)
    is_passed_over = is_decoders_classifier and last_mark is not None and base.config.get("pad_token_id") == last_mark
    reason = f"pads with {last_mark}, the token that ends a text, so the model would ignore the end of a text"
    require(not is_passed_over, base.asked, reason, _FIX)

    parts, layers = layout.parts(layout.prefix), nested(leaves)["layers"]
    # By the base model's name of each adapted module, its adapters; `{}` in the name is the layer's number.
    modules: dict[str, list[_Adapter]] = {}
    for adapter, target in targets_of(layers).items():
        if adapter in layers["lora"]:
            names = parts[f"layers/{target.weight}/kernel"].names
            is_alone = len(names) == target.parts
            own = Target(target.weight) if is_alone else target
            module = names[target.part if is_alone else 0].removesuffix(".weight")
            modules.setdefault(module, []).append((own, layers["lora"][adapter]))
    # PEFT saves the module that holds a trained parameter in the body, or the whole head.
    of_body = {part.path for part in layout.body}
    saved = {parts[path].names[0].rpartition(".")[0] if path in of_body else parts[path].names[0].partition(".")[0] for path in trained}
    name = name or called(init.path)
    config = _config(train, name, task, modules, saved, is_transposed=family == "gpt2")
    tensors = {name: values for path in trained for name, values in parts[path].theirs(beside[path]).items()}
    for module, adapters in modules.items():
        # The rank of a module is the sum of its adapters' ranks.
        a_Lrp = np.concatenate([p["a"].swapaxes(1, 2) for _, p in adapters], axis=1)
        b_Lrd = np.concatenate([np.asarray(target.placed(jnp.asarray(p["b"]))) for target, p in adapters], axis=1)
        for layer in range(len(a_Lrp)):
            tensors[f"{module.format(layer)}.lora_A.weight"] = a_Lrp[layer]
            tensors[f"{module.format(layer)}.lora_B.weight"] = b_Lrd[layer].T
    named = {_BASE + name: values for name, values in tensors.items()}
    return Written(family, architecture_of(model, task, family), config, named, ADAPTER_CONFIG, ADAPTER_WEIGHTS, base=name)


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


def _pattern(module: str) -> str:
    """Returns a regular expression for a module in every layer: PEFT reads a list of names as endings, and one name can end another."""
    return re.escape(module).replace(r"\{\}", r"\d+")


def in_units_of_target(task: Any, leaves: Leaves) -> Leaves:
    """Returns the parameters with the mean and the scale of a number in the last map, whose output is then the number itself.

    Raises `ConfigError` for a mean that a map without a bias cannot hold, a decoder's.
    """
    if not isinstance(task, Regression):
        return leaves
    place = next(f"{name}/" for name in ("classifier/out", "classifier") if f"{name}/kernel" in leaves)
    kernel, bias = leaves[f"{place}kernel"], leaves.get(f"{place}bias")
    reason = "the classifier of a decoder has no bias, which would hold the mean of the target"
    require(
        bias is not None or task.mean == 0,
        f"task.mean={task.mean}",
        reason,
        "Subtract the mean from the targets, and train with task.mean=0",
    )
    held = {} if bias is None else {f"{place}bias": np.asarray(bias * task.scale + task.mean, np.float32)}
    return leaves | held | {f"{place}kernel": np.asarray(kernel * task.scale, np.float32)}


def with_identity(model: AnyModel, task: Any, leaves: Leaves) -> tuple[AnyModel, Leaves]:
    """Returns the model and the parameters with the head of its own family, which computes the same function."""
    if not isinstance(model, Bert) or model.classifier not in ("linear_tanh", "linear_relu") or "classifier/kernel" not in leaves:
        return model, leaves
    fits = "relu" if not model.segments and not model.position_offset else "tanh"
    reason = f"transformers' classifier of this family has {fits} before its output"
    require(
        model.classifier == f"linear_{fits}", f"model.classifier={model.classifier}", reason, f"Train with model.classifier=linear_{fits}"
    )
    # RobertaForMultipleChoice reads the encoder's pooler, as BERT's heads do.
    is_pooler = fits == "tanh" and (not model.position_offset or isinstance(task, MultipleChoice))
    identity = {"kernel": np.eye(model.width, dtype=np.float32), "bias": np.zeros(model.width, np.float32)}
    if is_pooler:
        return dataclasses.replace(model, classifier="pooler"), leaves | {f"pooler/{name}": leaf for name, leaf in identity.items()}
    rest = {path: leaf for path, leaf in leaves.items() if not path.startswith("classifier/")}
    head = {f"classifier/out/{name}": leaves[f"classifier/{name}"] for name in ("kernel", "bias")}
    head |= {f"classifier/dense/{name}": leaf for name, leaf in identity.items()}
    return dataclasses.replace(model, classifier="relu" if fits == "relu" else "dense"), rest | head
