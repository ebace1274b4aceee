"""Declares the families of decoders with rotary positions: Llama (1 to 3, SmolLM 2 and 3, TinyLlama, Mistral), Qwen (2, 2.5, 3), OLMo 2 and
Gemma (2, the text part of 3, VaultGemma). No jax.

A class holds its fields, what it computes, its config in both directions, and the names of its norms in a checkpoint.
"""

import math
from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require
from dpx.models.layouts import (
    Config,
    Layout,
    common_config,
    common_values,
    flag,
    full_every,
    layout,
    number,
    require_values,
    rotary_values,
    unturned_every,
    whole,
)
from dpx.models.shape import RotaryDecoder


@declaration
class Llama(RotaryDecoder):
    """A decoder with a SiLU gate and no norms but those before each half (Llama: Touvron et al. 2023, arXiv 2302.13971).

    `family` is its type in `transformers`; Mistral (Jiang et al. 2023, arXiv 2310.06825) is such a decoder, of which every layer may have a
    `window`, and SmolLM 3 (Bakouch et al. 2025) one of which some layers know no positions (Yang et al. 2025, arXiv 2501.18795).

    Attributes:
        family: Type of the model in transformers, llama, mistral or smollm3.
        attention_bias: Whether the four maps of the attention have a bias.
        window: Number of tokens that a token sees, itself included; null for all before it.
        unturned_every: Each layer whose number divides by it has no positions; null for none.
    """

    CLASSES: ClassVar[dict[str, str]] = {"llama": "Llama", "mistral": "Mistral", "smollm3": "SmolLM3"}
    LAYOUT: ClassVar[Layout] = layout(attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm")

    family: Literal["llama", "mistral", "smollm3"] = "llama"
    attention_bias: bool = False
    window: int | None = None
    unturned_every: int | None = None

    @property
    def attention_biases(self) -> Literal["none", "all"]:
        return "all" if self.attention_bias else "none"

    @property
    def full_every(self) -> int:
        return self.layers + 1

    @staticmethod
    def of_config(config: Config, where: str) -> tuple[type["Llama"], dict[str, Any]]:
        """Returns the class and the values of its fields that a `config.json` declares."""
        require_values(config, where, hidden_act="silu")
        family = config["model_type"]
        is_smol = family == "smollm3"
        values = common_values(config, where, tied=is_smol, rotary_base=2_000_000.0 if is_smol else 10_000.0)
        values |= {"family": family, "key_value_heads": whole(config, "num_key_value_heads", where, 4 if is_smol else values["heads"])}
        values |= {"head_dim": whole({"head_dim": config.get("head_dim") or values["width"] // values["heads"]}, "head_dim", where)}
        if family == "mistral":
            require_values(config, where, attention_bias=False)
            window = config.get("sliding_window", 4096)
            return Llama, values | {"window": None if window is None else whole(config, "sliding_window", where, 4096)}
        if is_smol:
            require_values(config, where, use_sliding_window=False)
            values["unturned_every"] = unturned_every(config, where)
        else:
            require_values(config, where, sliding_window=None)
        return Llama, values | {"attention_bias": flag(config, "attention_bias", where, False)}

    def to_config(self) -> dict[str, Any]:
        """Returns the values of `config.json`."""
        of_family: dict[str, Any] = {"sliding_window": self.window} if self.family == "mistral" else {"attention_bias": self.attention_bias}
        if self.family == "smollm3":
            every = self.unturned_every or self.layers + 1
            of_family |= {"use_sliding_window": False, "no_rope_layers": [int((n + 1) % every != 0) for n in range(self.layers)]}
        return common_config(self) | {"hidden_act": "silu"} | of_family


@declaration
class Qwen(RotaryDecoder):
    """A decoder with a SiLU gate: with biases of query, key and value (Qwen 2: Yang et al. 2024, arXiv 2407.10671), or with a norm of each
    head's query and key (Qwen 3: Yang et al. 2025, arXiv 2505.09388).

    Attributes:
        family: Type of the model in transformers, qwen2 or qwen3.
        attention_bias: Whether the four maps of Qwen 3's attention have a bias; Qwen 2 always has it on three.
    """

    CLASSES: ClassVar[dict[str, str]] = {"qwen2": "Qwen2", "qwen3": "Qwen3"}
    LAYOUT: ClassVar[Layout] = layout(attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm")

    family: Literal["qwen2", "qwen3"]
    attention_bias: bool = False

    @property
    def attention_biases(self) -> Literal["none", "query_key_value", "all"]:
        return "query_key_value" if self.family == "qwen2" else "all" if self.attention_bias else "none"

    @property
    def query_key_norms(self) -> Literal["none", "head"]:
        return "head" if self.family == "qwen3" else "none"

    @staticmethod
    def of_config(config: Config, where: str) -> tuple[type["Qwen"], dict[str, Any]]:
        """Returns the class and the values of its fields that a `config.json` declares."""
        require_values(config, where, hidden_act="silu", use_sliding_window=False)
        values, family = common_values(config, where, tied=False), config["model_type"]
        values |= {"family": family, "key_value_heads": whole(config, "num_key_value_heads", where)}
        usual = values["width"] // values["heads"] if family == "qwen2" else 128
        values |= {"head_dim": whole({"head_dim": config.get("head_dim") or usual}, "head_dim", where)}
        return Qwen, values | ({"attention_bias": flag(config, "attention_bias", where, False)} if family == "qwen3" else {})

    def to_config(self) -> dict[str, Any]:
        """Returns the values of `config.json`."""
        return common_config(self) | {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": self.attention_bias}


@declaration
class Olmo(RotaryDecoder):
    """A decoder with a SiLU gate whose halves are normalised at their ends, not before, and whose queries and keys are normalised whole,
    over all heads (OLMo 2: OLMo Team 2024, arXiv 2501.00656).

    Attributes:
        family: Type of the model in transformers, olmo2.
        attention_bias: Whether the four maps of the attention have a bias.
    """

    CLASSES: ClassVar[dict[str, str]] = {"olmo2": "Olmo2"}
    LAYOUT: ClassVar[Layout] = layout(attention_post_norm="post_attention_layernorm", feed_forward_post_norm="post_feedforward_layernorm")
    has_pre_norms: ClassVar[bool] = False
    has_post_norms: ClassVar[bool] = True
    query_key_norms: ClassVar[Literal["whole"]] = "whole"

    family: Literal["olmo2"] = "olmo2"
    attention_bias: bool = False

    @property
    def attention_biases(self) -> Literal["none", "all"]:
        return "all" if self.attention_bias else "none"

    @staticmethod
    def of_config(config: Config, where: str) -> tuple[type["Olmo"], dict[str, Any]]:
        """Returns the class and the values of its fields that a `config.json` declares."""
        require_values(config, where, hidden_act="silu")
        values = common_values({"rms_norm_eps": 1e-5, **config}, where, tied=False)
        values |= {"key_value_heads": whole(config, "num_key_value_heads", where, values["heads"])}
        values |= {"head_dim": whole({"head_dim": config.get("head_dim") or values["width"] // values["heads"]}, "head_dim", where)}
        return Olmo, values | {"attention_bias": flag(config, "attention_bias", where, False)}

    def to_config(self) -> dict[str, Any]:
        """Returns the values of `config.json`."""
        return common_config(self) | {"hidden_act": "silu", "attention_bias": self.attention_bias}


# What a config means that does not say: (each n-th layer has no window, cap of scores, cap of logits, base of layers without a window).
_USUAL = {"vaultgemma": (2, 50.0, 30.0, 10_000.0), "gemma2": (2, 50.0, 30.0, 10_000.0), "gemma3_text": (6, None, None, 1_000_000.0)}


@declaration
class Gemma(RotaryDecoder):
    """A decoder with a GELU gate, and a word table that is multiplied by sqrt(width) where it is looked up and not where it decodes.

    `family="gemma2"` has further norms after each half (Gemma 2, arXiv 2408.00118), `"gemma3_text"` also norms of each head's query and key
    (Gemma 3, arXiv 2503.19786), `"vaultgemma"` neither (VaultGemma, arXiv 2510.15001). All but each `full_every`-th layer have a `window`,
    if one is given, and with it their own `window_rotary_base`. `attention_cap` and `logit_cap` take x to c tanh(x / c). Scores are divided
    by the root of `query_scalar`; null: of `head_dim`.

    Attributes:
        family: Type of the model in transformers, vaultgemma, gemma2 or gemma3_text.
        query_scalar: Scores are divided by its root; null takes head_dim.
        attention_cap: Bound that scores approach; null for none.
        logit_cap: Bound that logits approach; null for none.
        window: Number of tokens that a token sees, itself included, in layers with a window; null for all before it.
        full_every: Each layer whose number divides by it has no window.
        window_rotary_base: Base of the rotary positions' rates in layers with a window; null takes rotary_base.
    """

    CLASSES: ClassVar[dict[str, str]] = {"vaultgemma": "VaultGemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3"}
    LAYOUT: ClassVar[Layout] = layout(
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_post_norm="post_feedforward_layernorm",
    )
    activation: ClassVar[Literal["gelu_tanh"]] = "gelu_tanh"
    norm_offset: ClassVar[float] = 1.0

    family: Literal["vaultgemma", "gemma2", "gemma3_text"] = "vaultgemma"
    query_scalar: int | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    window: int | None = None
    full_every: int = 1
    window_rotary_base: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("query_scalar", "attention_cap", "logit_cap", "window_rotary_base"):
            value = getattr(self, name)
            require(value is None or value > 0, f"model.{name}={value}", "is not positive", "Use a positive number, or null")

    @property
    def has_post_norms(self) -> bool:
        return self.family != "vaultgemma"

    @property
    def query_key_norms(self) -> Literal["none", "head"]:
        return "head" if self.family == "gemma3_text" else "none"

    @property
    def query_scale(self) -> float:
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def embedding_factor(self) -> float:
        return math.sqrt(self.width)

    @staticmethod
    def of_config(config: Config, where: str) -> tuple[type["Gemma"], dict[str, Any]]:
        """Returns the class and the values of its fields that a `config.json` declares."""
        require_values(config, where, attention_bias=False, use_bidirectional_attention=False)
        require_values(config, where, hidden_activation="gelu_pytorch_tanh")
        family = config["model_type"]
        every, attention_cap, logit_cap, base = _USUAL[family]
        of_each = config.get("rope_parameters") if family == "gemma3_text" else None
        ropes = of_each if isinstance(of_each, dict) and "full_attention" in of_each else None
        plain = config if ropes is None else {**config, "rope_parameters": ropes["full_attention"]}
        values = common_values(plain, where, tied=True, rotary_base=base)
        values |= {"family": family, "key_value_heads": whole(config, "num_key_value_heads", where, 4)}
        values |= {"head_dim": whole(config, "head_dim", where, 256)}
        values |= {"query_scalar": whole(config, "query_pre_attn_scalar", where, 256)}
        values |= {"attention_cap": _cap(config, "attn_logit_softcapping", where, attention_cap)}
        values |= {"logit_cap": _cap(config, "final_logit_softcapping", where, logit_cap)}
        values |= {"full_every": full_every(config, where, every), "window": whole(config, "sliding_window", where, 4096)}
        if family == "gemma3_text":
            of_window = (ropes or {}).get("sliding_attention", {})
            local = rotary_values(of_window, where, number(config, "rope_local_base_freq", where, 10_000.0))
            reason = "scales the rotary positions of layers with a window"
            require("rotary_scaling" not in local, where, reason, "Use another checkpoint")
            values["window_rotary_base"] = local["rotary_base"]
        return Gemma, values

    def to_config(self) -> dict[str, Any]:
        """Returns the values of `config.json`."""
        of_window = {} if self.window_rotary_base is None else {"rope_local_base_freq": self.window_rotary_base}
        return (
            common_config(self)
            | of_window
            | {
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": self.query_scalar or self.head_dim,
                "attn_logit_softcapping": self.attention_cap,
                "final_logit_softcapping": self.logit_cap,
                "sliding_window": self.window or self.positions,
                "layer_types": ["sliding_attention" if (n + 1) % self.full_every else "full_attention" for n in range(self.layers)],
            }
        )


def _cap(config: Config, key: str, where: str, usual: float | None) -> float | None:
    return None if config.get(key, usual) is None else number(config, key, where, usual or 0.0)
