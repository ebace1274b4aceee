"""Maps checkpoints in the layout of Hugging Face to dpx: tensors to parameters in both directions, and values of `config.json`.

The layouts of four families are here, and what the families of decoders with rotary positions share. Each problem of a config is one line
that names the file, the key and the value.

Here layers are stacked on a leading axis, a dense map is [inputs, outputs], and query, key and value are one map in these four families.
PyTorch's dense maps are [outputs, inputs]; GPT-2's are not.

L: layers, p: inputs, d: outputs of a dense map.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.declaration import require
from dpx.models.shape import RotaryDecoder


@dataclass(frozen=True)
class Part:
    """Describes one parameter: its `path` here, and the tensors that are joined along its outputs, `{}` being the layer's number."""

    path: str
    names: tuple[str, ...]
    is_transposed: bool = False

    @property
    def is_of_layers(self) -> bool:
        return "{}" in self.names[0]

    def tensors(self, layers: int) -> list[str]:
        """Returns the names of all tensors that the parameter is read from."""
        return [name.format(layer) for layer in range(layers) for name in self.names] if self.is_of_layers else list(self.names)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], layers: int) -> tuple[int, ...] | None:
        """Returns the parameter's shape in dpx, from the shapes of the tensors; `None` if they do not fit one another."""
        each_shape = [shapes[name][::-1] if self.is_transposed else shapes[name] for name in self.tensors(layers)]
        if len(set(each_shape)) != 1:
            return None
        joined = (*each_shape[0][:-1], sum(one[-1] for one in each_shape[: len(self.names)]))
        return (layers, *joined) if self.is_of_layers else joined

    def ours(self, read_tensor: Callable[[str], np.ndarray], layers: int) -> np.ndarray:
        """Returns the parameter, joined from the tensors that `read_tensor` returns."""
        place = lambda name: read_tensor(name).T if self.is_transposed else read_tensor(name)  # noqa: E731
        joined = lambda names: np.concatenate([place(name) for name in names], axis=-1)  # noqa: E731
        if not self.is_of_layers:
            return np.ascontiguousarray(joined(self.names))
        return np.stack([joined([name.format(layer) for name in self.names]) for layer in range(layers)])

    def theirs(self, leaf: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors of a parameter; `ours` returns the same bits."""
        layers = range(leaf.shape[0]) if self.is_of_layers else [None]
        tensors = {}
        for layer in layers:
            one = leaf if layer is None else leaf[layer]
            for name, values in zip(self.names, np.split(one, len(self.names), axis=-1), strict=True):
                tensors[name if layer is None else name.format(layer)] = np.ascontiguousarray(values.T if self.is_transposed else values)
        return tensors


def table(path: str, name: str) -> list[Part]:
    return [Part(path, (f"{name}.weight",))]


def norm(path: str, name: str) -> list[Part]:
    return [Part(f"{path}/scale", (f"{name}.weight",)), Part(f"{path}/bias", (f"{name}.bias",))]


def dense(path: str, *names: str, is_transposed: bool = True) -> list[Part]:
    kernel = Part(f"{path}/kernel", tuple(f"{name}.weight" for name in names), is_transposed)
    return [kernel, Part(f"{path}/bias", tuple(f"{name}.bias" for name in names))]


@dataclass(frozen=True)
class Layout:
    """Lists the tensors of one family. The names of `body` begin with `prefix` in a model with a head; the names of `heads` never do.

    `ignored` are ends of names that hold no parameter. `decoder` is the head's separate embedding table, if it is not tied. `bias` are two
    names of the head's bias: an untied head of transformers reads the second.
    """

    prefix: str
    body: tuple[Part, ...]
    heads: tuple[Part, ...]
    decoder: Part
    ignored: tuple[str, ...] = ()
    bias: tuple[str, str] | None = None

    def parts(self, prefix: str) -> dict[str, Part]:
        """Returns the body's names with `prefix`, by path."""
        body = [Part(one.path, tuple(prefix + name for name in one.names), one.is_transposed) for one in self.body]
        return {one.path: one for one in (*body, *self.heads, self.decoder)}


_BERT_EMBEDDINGS = [
    *table("embeddings/word", "embeddings.word_embeddings"),
    *table("embeddings/position", "embeddings.position_embeddings"),
    *norm("embeddings/norm", "embeddings.LayerNorm"),
]
_BERT_BODY = (
    *_BERT_EMBEDDINGS,
    *table("embeddings/segment", "embeddings.token_type_embeddings"),
    *dense("layers/qkv", *(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value"))),
    *dense("layers/attention_out", "encoder.layer.{}.attention.output.dense"),
    *norm("layers/attention_norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *dense("layers/up", "encoder.layer.{}.intermediate.dense"),
    *dense("layers/down", "encoder.layer.{}.output.dense"),
    *norm("layers/output_norm", "encoder.layer.{}.output.LayerNorm"),
    *dense("pooler", "pooler.dense"),
)
BERT = Layout(
    prefix="bert.",
    body=_BERT_BODY,
    heads=(
        *dense("mlm/transform", "cls.predictions.transform.dense"),
        *norm("mlm/norm", "cls.predictions.transform.LayerNorm"),
        Part("mlm/output_bias", ("cls.predictions.bias",)),
        *dense("next_sentence", "cls.seq_relationship"),
        *dense("classifier", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("cls.predictions.decoder.weight",)),
    ignored=("position_ids",),
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
ROBERTA = Layout(
    prefix="roberta.",
    body=_BERT_BODY,
    heads=(
        *dense("mlm/transform", "lm_head.dense"),
        *norm("mlm/norm", "lm_head.layer_norm"),
        Part("mlm/output_bias", ("lm_head.bias",)),
        *dense("classifier/dense", "classifier.dense"),
        *dense("classifier/out", "classifier.out_proj"),
        # The tensors of RobertaForMultipleChoice.
        *dense("classifier", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("lm_head.decoder.weight",)),
    ignored=("position_ids",),
    bias=("lm_head.bias", "lm_head.decoder.bias"),
)
DISTILBERT = Layout(
    prefix="distilbert.",
    body=(
        *_BERT_EMBEDDINGS,
        *dense("layers/qkv", *(f"transformer.layer.{{}}.attention.{name}_lin" for name in "qkv")),
        *dense("layers/attention_out", "transformer.layer.{}.attention.out_lin"),
        *norm("layers/attention_norm", "transformer.layer.{}.sa_layer_norm"),
        *dense("layers/up", "transformer.layer.{}.ffn.lin1"),
        *dense("layers/down", "transformer.layer.{}.ffn.lin2"),
        *norm("layers/output_norm", "transformer.layer.{}.output_layer_norm"),
    ),
    heads=(
        *dense("mlm/transform", "vocab_transform"),
        *norm("mlm/norm", "vocab_layer_norm"),
        Part("mlm/output_bias", ("vocab_projector.bias",)),
        *dense("classifier/dense", "pre_classifier"),
        *dense("classifier/out", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("vocab_projector.weight",)),
    ignored=("position_ids",),
)
GPT2 = Layout(
    prefix="transformer.",
    body=(
        *table("embeddings/word", "wte"),
        *table("embeddings/position", "wpe"),
        *norm("layers/attention_norm", "h.{}.ln_1"),
        *dense("layers/qkv", "h.{}.attn.c_attn", is_transposed=False),
        *dense("layers/attention_out", "h.{}.attn.c_proj", is_transposed=False),
        *norm("layers/feed_forward_norm", "h.{}.ln_2"),
        *dense("layers/up", "h.{}.mlp.c_fc", is_transposed=False),
        *dense("layers/down", "h.{}.mlp.c_proj", is_transposed=False),
        *norm("final_norm", "ln_f"),
    ),
    heads=(Part("classifier/kernel", ("score.weight",), is_transposed=True),),
    decoder=Part("decoder", ("lm_head.weight",)),
    ignored=(".attn.bias", ".attn.masked_bias"),
)


Config = Mapping[str, Any]
_FIX = "Correct the value, or copy the file again"
# The names that families give a model's sizes; other families have the usual names.
_USUAL = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
_USUAL |= {"feed_forward": "intermediate_size", "positions": "max_position_embeddings"}
_SIZES = {
    "distilbert": _USUAL | {"layers": "n_layers", "width": "dim", "heads": "n_heads", "feed_forward": "hidden_dim"},
    # Its `n_inner` may be null.
    "gpt2": {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "positions": "n_positions"},
}


def whole(config: Config, key: str, where: str, usual: int | None = None, least: int = 1) -> int:
    """Returns a size. Raises `KeyError` if it is missing and has no `usual` value, `ConfigError` if it is not a whole number or below
    `least`."""
    value = config[key] if usual is None else config.get(key, usual)
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(is_whole, where, f"has {key}={value!r}, which is not a whole number of {least} or more", _FIX)
    return value


def number(config: Config, key: str, where: str, usual: float) -> float:
    value = config.get(key, usual)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    require(is_number, where, f"has {key}={value!r}, which is not a number of 0 or more", _FIX)
    return float(value)


def flag(config: Config, key: str, where: str, usual: bool) -> bool:
    value = config.get(key, usual)
    require(isinstance(value, bool), where, f"has {key}={value!r}, which is neither true nor false", _FIX)
    return value


def require_values(config: Config, where: str, **expected: Any) -> None:
    """Raises `ConfigError` for a key that asks for another value than the only one that dpx computes; a missing key is accepted."""
    for key, value in expected.items():
        reason = f"has {key}={config.get(key)}, but dpx supports only {value}"
        require(config.get(key, value) in (value, None), where, reason, "Use another checkpoint")


def read_sizes(config: Config, where: str, *, tied: bool) -> dict[str, Any]:
    """Returns the fields that all models have; `tied` is the family's value if the config does not say."""
    family = config["model_type"]
    sizes = {name: whole(config, theirs, where) for name, theirs in _SIZES.get(family, _USUAL).items()}
    return {
        "name": f"{family}_{sizes['layers']}x{sizes['width']}",
        **sizes,
        "vocabulary_size": whole(config, "vocab_size", where),
        "initialiser_range": number(config, "initializer_range", where, 0.02),
        "tied": flag(config, "tie_word_embeddings", where, tied),
    }


def written_sizes(model: Any, family: str) -> dict[str, Any]:
    """Returns the sizes of `model` under the names of its family."""
    return {theirs: getattr(model, name) for name, theirs in _SIZES.get(family, _USUAL).items()}


_OTHER = "Use another checkpoint"
# transformers' name of each map and norm of a layer; the families name the norms of the halves.
_MAPS = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "attention_out": "self_attn.o_proj"}
_MAPS |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


def layout(**norms: str) -> Layout:
    """Returns the layout of a family; `norms` are transformers' names of a layer's norms, beside those of its heads."""
    of_layer = [part for name, theirs in _MAPS.items() for part in dense(f"layers/{name}", f"layers.{{}}.{theirs}")]
    of_layer += [Part(f"layers/{name}/scale", (f"layers.{{}}.{theirs}.weight",)) for name, theirs in (_HEAD_NORMS | norms).items()]
    return Layout(
        prefix="model.",
        body=(*table("embeddings/word", "embed_tokens"), *of_layer, Part("final_norm/scale", ("norm.weight",))),
        heads=(Part("classifier/kernel", ("score.weight",), is_transposed=True),),
        decoder=Part("decoder", ("lm_head.weight",)),
        ignored=("rotary_emb.inv_freq",),
    )


def common_values(config: Config, where: str, *, tied: bool, rotary_base: float = 10_000.0) -> dict[str, Any]:
    """Returns the fields that all families have; `tied` and `rotary_base` are the family's values if the config does not say.

    Raises `ConfigError` for what the config asks for and dpx does not compute.
    """
    require_values(config, where, add_cross_attention=False, is_decoder=False, mlp_bias=False, partial_rotary_factor=1.0)
    quantized = config.get("quantization_config")
    require(not quantized, where, "has a quantization_config: its tensors are not plain numbers", "Write it as float32 or bfloat16 first")
    eps = number(config, "rms_norm_eps", where, 1e-6)
    # A config says how positions turn in either form: `rope_parameters`, or `rope_theta` and `rope_scaling`.
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    rope = theta | dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return read_sizes(config, where, tied=tied) | {"rms_norm_eps": eps} | rotary_values(rope, where, rotary_base)


def rotary_values(rope: Config, where: str, base: float) -> dict[str, Any]:
    """Returns the fields of the rotary positions. Raises `ConfigError` naming a scaling that dpx does not compute."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    reason = f"scales rotary positions by rope_type={kind!r}, and dpx computes default, linear and llama3"
    require(kind in ("default", "linear", "llama3"), where, reason, _OTHER)
    require_values(rope, where, partial_rotary_factor=1.0)
    values: dict[str, Any] = {"rotary_base": number(rope, "rope_theta", where, base)}
    if kind != "default":
        values |= {"rotary_scaling": kind, "rotary_factor": float(_asked(rope, "factor"))}
    if kind == "llama3":
        values |= {"rotary_low_frequency": float(_asked(rope, "low_freq_factor"))}
        values |= {"rotary_high_frequency": float(_asked(rope, "high_freq_factor"))}
        values |= {"rotary_original_positions": whole(rope, "original_max_position_embeddings", where)}
    return values


def _asked(rope: Config, key: str) -> Any:
    if key not in rope:
        raise KeyError(f"{key} of rope_scaling")
    return rope[key]


def common_config(model: RotaryDecoder) -> dict[str, Any]:
    """Returns the values of `config.json` that all families have, in the form that every version of transformers reads."""
    scaling: dict[str, Any] | None = None
    if model.rotary_scaling != "none":
        scaling = {"rope_type": model.rotary_scaling, "factor": model.rotary_factor}
    if scaling is not None and model.rotary_scaling == "llama3":
        scaling |= {"low_freq_factor": model.rotary_low_frequency, "high_freq_factor": model.rotary_high_frequency}
        scaling |= {"original_max_position_embeddings": model.rotary_original_positions}
    return written_sizes(model, "") | {
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
    }


def unturned_every(config: Config, where: str) -> int | None:
    """Returns n if each n-th layer of a config, and no other, has no positions; `None` if all have."""
    layers, turned = config["num_hidden_layers"], config.get("no_rope_layers")
    if turned is None:
        return whole(config, "no_rope_layer_interval", where, 4)
    is_list = isinstance(turned, list) and len(turned) >= layers and all(one in (0, 1) for one in turned)
    require(is_list, where, f"has no_rope_layers={turned!r}, which is not 0 or 1 for each of its {layers} layers", _FIX)
    unturned = [number + 1 for number in range(layers) if not turned[number]]
    every = unturned[0] if unturned else layers + 1
    reason = "has no_rope_layers in which the layers without positions do not come at regular distances"
    require(unturned == list(range(every, layers + 1, every)), where, reason, _OTHER)
    return every if unturned else None


def full_every(config: Config, where: str, usual: int) -> int:
    """Returns n if each n-th layer of a config, and no other, has no window; `usual` if the config does not say."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        return whole(config, "sliding_window_pattern", where, whole(config, "_sliding_window_pattern", where, usual))
    reason = f"has layer_types={types!r}, which is not a kind for each of its {layers} layers"
    known = {"full_attention", "sliding_attention"}
    is_known = isinstance(types, list) and len(types) == layers and all(isinstance(one, str) and one in known for one in types)
    require(is_known, where, reason, _OTHER)
    is_full = [one == "full_attention" for one in types]
    every = is_full.index(True) + 1 if any(is_full) else layers + 1
    is_regular = is_full == [(layer + 1) % every == 0 for layer in range(layers)]
    require(is_regular, where, "has layer_types in which the layers without a window do not come at regular distances", _OTHER)
    return every
