"""Reads the shape of a checkpoint's model from its `config.json`. No jax.

The families of decoders with rotary positions read their own (`families.py`); BERT, RoBERTa, DistilBERT and GPT-2 are read here.

`model=hf` declares that shape: it is written out into the config before anything is built, so a run's config holds it without the file.

The families of models are registered by the `model_type` of a checkpoint: the layout of its tensors, and who reads its config. A decoder
with rotary positions is registered by adding its class to `ROTARY`: it holds its fields, what it computes, its config in both directions,
and its layout.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpx.declaration import ConfigError, declaration, require
from dpx.files.weights import CONFIG, Tensors, config_of, folder_of
from dpx.models.families import Gemma, Llama, Olmo, Qwen
from dpx.models.layouts import BERT, DISTILBERT, GPT2, ROBERTA, Layout, number, read_sizes, require_values, whole
from dpx.models.model_protocol import COMPUTATION, Attention, Rematerialize
from dpx.models.shape import Bert, Decoder, Model, grown

Rotary = Llama | Qwen | Olmo | Gemma
ROTARY: dict[str, type[Rotary]] = {model_type: kind for kind in (Llama, Qwen, Olmo, Gemma) for model_type in kind.CLASSES}
LAYOUTS: dict[str, Layout] = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT, "gpt2": GPT2}
LAYOUTS |= {model_type: kind.LAYOUT for model_type, kind in ROTARY.items()}


_GELUS = {"gelu": "exact", "gelu_python": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}


@declaration
class OfCheckpoint:
    """Declares the model in the folder `path`, and what its config does not say.

    Attributes:
        path: Folder with the config.json of a checkpoint.
        dtype: Compute type; parameters, sums, norms and noise are always float32.
        dropout: Dropout rate in training.
        classifier: Head of a classifier; null takes the family's own, or where the head alone is trained (train=last_layer) and the
            checkpoint has none, the smallest that transformers loads: linear_tanh, of DistilBERT linear_relu.
        pool: What the classifier reads: the first token (cls), or the mean over the tokens.
        scan: Whether layers are a loop in the compiled program; false unrolls them.
        rematerialize: What the backward pass computes again: nothing, or the inside of each layer from its input, which alone is kept.
        attention: How attention is computed: dpx's own formula, or jax.nn.dot_product_attention with xla or cudnn.
        new_tokens: What the tokens of a tokenizer begin with for which the table has no row: the mean of its rows; null refuses them.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    dropout: float = 0.0
    classifier: Literal["pooler", "dense", "relu", "linear_tanh", "linear_relu", "linear"] | None = None
    pool: Literal["cls", "mean"] = "cls"
    scan: bool = True
    rematerialize: Rematerialize = "none"
    attention: Attention = "explicit"
    new_tokens: Literal["mean"] | None = None


TARGET = f"{OfCheckpoint.__module__}.{OfCheckpoint.__qualname__}"


def written_out(declared: OfCheckpoint, vocabulary: str | None = None, is_head_alone: bool = False) -> dict[str, Any]:
    """Returns the node of a config that declares the checkpoint's model by itself.

    `vocabulary` is the path of the tokenizer whose tokens may be new, by default the checkpoint's; `is_head_alone`: only the head is
    trained.
    """
    folder = folder_of(declared.path)
    config = as_stored(config_of(folder), folder)
    kind, values = declared_shape(config, str(folder / CONFIG))
    values |= {name: getattr(declared, name) for name in ("dtype", "scan", *COMPUTATION)}
    if declared.new_tokens is not None:
        # A config that adds no tokens is composed without a library of tokenizers.
        from dpx.data.prepare import vocabulary_place
        from dpx.data.tokenizer import token_count

        values |= grown(token_count(folder if vocabulary is None else vocabulary_place(vocabulary)), values["vocabulary_size"])
    if kind in (Bert, Decoder):
        values["dropout"] = declared.dropout
    else:
        reason = f"the family {config_of(folder)['model_type']} has no dropout"
        require(declared.dropout == 0.0, f"model.dropout={declared.dropout}", reason, "Use 0, or train.dropout for adapters")
    if kind is Bert:
        values["pool"] = declared.pool
        own = values["classifier"]
        smallest = "linear_relu" if own == "relu" else "linear_tanh"
        # A head that the checkpoint was trained with is trained further.
        is_smallest = is_head_alone and declared.pool == "cls" and not has_classifier(config)
        values["classifier"] = declared.classifier or (smallest if is_smallest else own)
    else:
        require(
            declared.pool == "cls" and declared.classifier is None,
            f"model.pool={declared.pool}, model.classifier={declared.classifier}",
            "a decoder's classifier reads the last token",
            "Leave model.pool and model.classifier as they are",
        )
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}


def model_of(config: Mapping[str, Any], where: str) -> Model:
    """Returns the model that a `config.json` declares."""
    kind, values = declared_shape(config, where)
    return kind(**values)


def as_stored(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the config of the checkpoint in `folder`, with an untied head if the config ties it and the weights hold another one.

    As in transformers, the file's values are kept. Raises `ConfigError` for a table or a head of another shape than the config says.
    """
    if not any(folder.glob("*.safetensors")):
        return config
    is_tied = model_of(config, str(folder / CONFIG)).tied
    layout, tensors = LAYOUTS[config["model_type"]], Tensors(folder)
    (head,), (word,) = layout.decoder.names, next(part.names for part in layout.body if part.path == "embeddings/word")
    table = next((name for name in (layout.prefix + word, word) if name in tensors.shapes), None)
    if table is not None:
        rows, said = tensors.shapes[table][0], config.get("vocab_size")
        reason = f"has vocab_size={said}, but the weights hold a table of {rows} rows ({table})"
        require(said in (None, rows), folder / CONFIG, reason, f"Set vocab_size to {rows} in it, or copy the checkpoint again")
    if head not in tensors.shapes or table is None or not is_tied:
        return config
    found, wanted = tensors.shapes[head], tensors.shapes[table]
    reason = f"ties the head to the table, but the weights hold {head} of shape {found} beside a table of shape {wanted}"
    fix = "Copy the checkpoint again, or set tie_word_embeddings to false in it if the head is meant"
    require(found == wanted, folder / CONFIG, reason, fix)
    values = dict(tensors.read([head, table]))
    return config if np.array_equal(values[head], values[table]) else config | {"tie_word_embeddings": False}


def declared_shape(config: Mapping[str, Any], where: str) -> tuple[type[Model], dict[str, Any]]:
    """Returns the class of the model that a `config.json` declares, and the values of its fields.

    Raises `ConfigError`, naming `where`, for a model that dpx does not have.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ConfigError(where, f"has model_type {family!r}, which dpx cannot read", f"Use one of {', '.join(sorted(_FAMILIES))}")
    try:
        return _FAMILIES[family](config, where)
    except KeyError as error:
        raise ConfigError(where, f"does not set {error.args[0]}", "Copy the file again") from None


def is_multiple_choice(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` describes a model that chooses among texts."""
    return _is_any(config, "ForMultipleChoice")


def has_classifier(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` describes a model with a classifier, of texts or of choices."""
    return _is_any(config, "ForSequenceClassification", "ForMultipleChoice")


def _is_any(config: Mapping[str, Any], *endings: str) -> bool:
    named = config.get("architectures")
    names = named if isinstance(named, list) else [named]
    return any(isinstance(name, str) and name.endswith(endings) for name in names)


def _gelu(config: Mapping[str, Any], key: str, where: str, allowed: tuple[str, ...], usual: str = "gelu") -> str:
    named = config.get(key, usual)
    kind = _GELUS.get(named) if isinstance(named, str) else None
    require(
        kind in allowed, where, f"has the activation {key}={named}, which dpx does not support for this model", "Use another checkpoint"
    )
    assert kind is not None
    return kind


def _encoder(config: Mapping[str, Any], where: str) -> tuple[type[Bert], dict[str, Any]]:
    family = config["model_type"]
    if family == "distilbert":
        _gelu(config, "activation", where, ("exact",))
        return Bert, read_sizes(config, where, tied=True) | {"segments": 0, "layer_norm_eps": 1e-12, "classifier": "relu"}
    require_values(config, where, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    _gelu(config, "hidden_act", where, ("exact",))
    segments, eps = whole(config, "type_vocab_size", where, 2, least=0), number(config, "layer_norm_eps", where, 1e-12)
    values = read_sizes(config, where, tied=True) | {"segments": segments, "layer_norm_eps": eps, "classifier": "pooler"}
    if family == "bert":
        return Bert, values
    # The first rows of RoBERTa's position table belong to padding; the first token's is the one after.
    offset = whole(config, "pad_token_id", where, 1, least=0) + 1
    whole(config, "max_position_embeddings", where, least=offset + 1)
    # Transformers' class for choices reads the encoder's pooler; the class for labels has its own dense map.
    classifier = "pooler" if is_multiple_choice(config) else "dense"
    return Bert, values | {"positions": values["positions"] - offset, "position_offset": offset, "classifier": classifier}


def _decoder(config: Mapping[str, Any], where: str) -> tuple[type[Decoder], dict[str, Any]]:
    require_values(config, where, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    values = read_sizes(config, where, tied=True)
    return Decoder, values | {
        "feed_forward": whole(config, "n_inner", where) if config.get("n_inner") else 4 * values["width"],
        "layer_norm_eps": number(config, "layer_norm_epsilon", where, 1e-5),
        "gelu": _gelu(config, "activation_function", where, ("exact", "tanh"), "gelu_new"),
    }


_FAMILIES: dict[str, Callable[[Mapping[str, Any], str], tuple[type[Model], dict[str, Any]]]] = {
    **dict.fromkeys(("bert", "roberta", "distilbert"), _encoder),
    "gpt2": _decoder,
    **{model_type: kind.of_config for model_type, kind in ROTARY.items()},
}
