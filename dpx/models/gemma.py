"""Declares decoders of the Gemma family: Gemma 2, the text part of Gemma 3, and VaultGemma. No jax."""

import math
from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require
from dpx.models.layouts import Layout
from dpx.models.rotary import RotaryDecoder
from dpx.models.rotary_family import (
    Config,
    common_config,
    common_values,
    full_every,
    layer_types,
    layout,
    number,
    require_values,
    rotary_values,
    whole,
)

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
    def has_head_norms(self) -> bool:
        return self.family == "gemma3_text"

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
                "layer_types": layer_types(self),
            }
        )


def _cap(config: Config, key: str, where: str, usual: float | None) -> float | None:
    return None if config.get(key, usual) is None else number(config, key, where, usual or 0.0)
