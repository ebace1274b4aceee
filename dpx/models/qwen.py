"""Declares decoders of the Qwen family: Qwen 2, 2.5 and 3, without a window. No jax."""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration
from dpx.models.layouts import Layout
from dpx.models.rotary import RotaryDecoder
from dpx.models.rotary_family import Config, common_config, common_values, flag, layout, require_values, whole


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
    def has_head_norms(self) -> bool:
        return self.family == "qwen3"

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
