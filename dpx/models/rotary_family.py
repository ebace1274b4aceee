"""Maps what the families of decoders with rotary positions have in common between dpx and `transformers`: values of `config.json`, names of
tensors.

Reads values of a checkpoint's `config.json`, and names the sizes that all families have.

Each problem is one line that names the file, the key and the value.
"""

import math
from collections.abc import Mapping
from typing import Any

from dpx.declaration import require
from dpx.models.layouts import Layout, Part, dense, table
from dpx.models.rotary import RotaryDecoder

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


def layer_types(model: RotaryDecoder) -> list[str]:
    """Returns the kind of each layer's attention as `full_every` reads it."""
    return ["sliding_attention" if (layer + 1) % model.full_every else "full_attention" for layer in range(model.layers)]
