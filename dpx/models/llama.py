"""Declares decoders of the Llama family: Llama 1 to 3, SmolLM2, TinyLlama, and Mistral with or without a window. No jax."""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration
from dpx.models.layouts import Layout
from dpx.models.rotary import RotaryDecoder
from dpx.models.rotary_family import Config, common_config, common_values, flag, layout, require_values, whole


@declaration
class Llama(RotaryDecoder):
    """A decoder with a SiLU gate and no norms but those before each half (Llama: Touvron et al. 2023, arXiv 2302.13971).

    `family` is its type in `transformers`; Mistral (Jiang et al. 2023, arXiv 2310.06825) is such a decoder, of which every layer may have a
    `window`.

    Attributes:
        family: Type of the model in transformers, llama or mistral.
        attention_bias: Whether the four maps of the attention have a bias.
        window: Number of tokens that a token sees, itself included; null for all before it.
    """

    CLASSES: ClassVar[dict[str, str]] = {"llama": "Llama", "mistral": "Mistral"}
    LAYOUT: ClassVar[Layout] = layout(attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm")

    family: Literal["llama", "mistral"] = "llama"
    attention_bias: bool = False
    window: int | None = None

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
        values, family = common_values(config, where, tied=False), config["model_type"]
        values |= {"family": family, "key_value_heads": whole(config, "num_key_value_heads", where, values["heads"])}
        values |= {"head_dim": whole({"head_dim": config.get("head_dim") or values["width"] // values["heads"]}, "head_dim", where)}
        if family == "mistral":
            require_values(config, where, attention_bias=False)
            window = config.get("sliding_window", 4096)
            return Llama, values | {"window": None if window is None else whole(config, "sliding_window", where, 4096)}
        require_values(config, where, sliding_window=None)
        return Llama, values | {"attention_bias": flag(config, "attention_bias", where, False)}

    def to_config(self) -> dict[str, Any]:
        """Returns the values of `config.json`."""
        of_family = {"sliding_window": self.window} if self.family == "mistral" else {"attention_bias": self.attention_bias}
        return common_config(self) | {"hidden_act": "silu"} | of_family
