"""Converts a model to a checkpoint that `transformers` reads: its class, its `config.json`, its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.declaration import ConfigError, require
from dpx.files.checkpoint_folder import CONFIG, WEIGHTS
from dpx.files.weights import Leaves
from dpx.models.checkpoint_shape import LAYOUTS, ROTARY, Rotary
from dpx.models.rotary_family import written_sizes
from dpx.models.shape import AnyModel, Bert, Decoder
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task, label_names

_HEADS: dict[type, str] = {
    MaskedLanguageModel: "ForMaskedLM",
    Classification: "ForSequenceClassification",
    MultipleChoice: "ForMultipleChoice",
}
# The model's class without a head's ending, and endings by task.
_CLASSES: dict[str, tuple[str, Mapping[type, str]]] = {
    "bert": ("Bert", _HEADS),
    "roberta": ("Roberta", _HEADS),
    "distilbert": ("DistilBert", _HEADS),
    "gpt2": ("GPT2", {CausalLanguageModel: "LMHeadModel", Classification: "ForSequenceClassification"}),
}
_OF_ROTARY: Mapping[type, str] = {CausalLanguageModel: "ForCausalLM", Classification: "ForSequenceClassification"}
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
    config = {"architectures": [architecture], "model_type": family, "torch_dtype": "float32"}
    config |= _sizes(model, family) | {"vocab_size": vocabulary_size, "pad_token_id": special.pad_id}
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
    if isinstance(task, Classification | MultipleChoice):
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
    has_classifier = isinstance(task, Classification | MultipleChoice)
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
    if isinstance(task, Classification) and family in _LABELS:
        name, head = _LABELS[family]
    if head is None:
        raise ConfigError(
            f"task={task.name} with model={model.name}",
            f"transformers has no class for this task with {name}",
            "Export a run of another task",
        )
    return name + head


def _sizes(model: Bert | Decoder | Rotary, family: str) -> dict[str, Any]:
    if isinstance(model, Rotary):
        return model.to_config()
    if isinstance(model, Decoder):
        activation = {"tanh": "gelu_new", "exact": "gelu"}[model.gelu]
        sizes = {"n_inner": model.feed_forward, "activation_function": activation, "layer_norm_epsilon": model.layer_norm_eps}
        return written_sizes(model, family) | sizes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    if family == "distilbert":
        require(
            model.layer_norm_eps == 1e-12,
            f"model.layer_norm_eps={model.layer_norm_eps}",
            "DistilBERT supports only 1e-12",
            "Use model.layer_norm_eps=1e-12",
        )
        sizes = written_sizes(model, family) | {"activation": "gelu", "sinusoidal_pos_embds": False}
        return sizes | dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), model.dropout)
    sizes = written_sizes(model, family) | {"max_position_embeddings": model.positions + model.position_offset}
    sizes |= {"type_vocab_size": model.segments, "layer_norm_eps": model.layer_norm_eps, "hidden_act": "gelu"}
    return sizes | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)
