"""Two small VaultGemmas. Their weights follow from names and shapes by whole-number arithmetic, so only logits are kept.

`vaultgemma_logits.npz` holds what transformers made of them. To write it again, in an environment with the extra `parity`:

python -m tests.models.gemma_cases
"""

from pathlib import Path
from typing import Any

import numpy as np

from dpx.models.gemma import Gemma
from tests.interop.cases import inputs, values

LOGITS = Path(__file__).with_name("vaultgemma_logits.npz")
VOCABULARY = 64
SIZES: dict[str, Any] = {"layers": 2, "width": 16, "head_dim": 6, "feed_forward": 24, "positions": 16}
MODELS = {
    "multi_query": Gemma(name="multi_query", heads=4, key_value_heads=1, **SIZES),
    "grouped": Gemma(name="grouped", heads=4, key_value_heads=2, **SIZES),
}
# dpx's name of a layer's parameter: transformers'.
OF_LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "query/kernel": "self_attn.q_proj.weight",
    "key/kernel": "self_attn.k_proj.weight",
    "value/kernel": "self_attn.v_proj.weight",
    "attention_out/kernel": "self_attn.o_proj.weight",
    "feed_forward_norm/scale": "pre_feedforward_layernorm.weight",
    "gate/kernel": "mlp.gate_proj.weight",
    "up/kernel": "mlp.up_proj.weight",
    "down/kernel": "mlp.down_proj.weight",
}
OF_MODEL = {"embeddings/word": "model.embed_tokens.weight", "final_norm/scale": "model.norm.weight"}


def tokens() -> np.ndarray:
    """[3, 9], padded behind each text."""
    return inputs("gpt2")["tokens"]


def leaves(model: Gemma) -> dict[str, np.ndarray]:
    """Every parameter by dpx's path. Theirs stand output first, one layer at a time; a norm's scale is an offset from one in both."""
    found = {}
    for path, shape in model.parameter_shapes(VOCABULARY).items():
        if not path.startswith("layers/"):
            found[path] = values(OF_MODEL[path], shape)
            continue
        name = OF_LAYER[path.removeprefix("layers/")]
        found[path] = np.stack([values(f"model.layers.{layer}.{name}", shape[:0:-1]).T for layer in range(shape[0])])
    return found


def main() -> None:
    import torch
    from transformers import VaultGemmaConfig, VaultGemmaForCausalLM

    found = {}
    for name, model in MODELS.items():
        config = VaultGemmaConfig(
            vocab_size=VOCABULARY,
            hidden_size=model.width,
            intermediate_size=model.feed_forward,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.key_value_heads,
            head_dim=model.head_dim,
            query_pre_attn_scalar=model.head_dim,
            max_position_embeddings=model.positions,
            layer_types=["full_attention"] * model.layers,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        )
        theirs = VaultGemmaForCausalLM(config).eval()
        shapes = {key: tuple(leaf.shape) for key, leaf in theirs.state_dict().items() if key != "lm_head.weight"}
        loaded = theirs.load_state_dict({key: torch.tensor(values(key, shape)) for key, shape in shapes.items()}, strict=False)
        assert set(loaded.missing_keys) <= {"lm_head.weight"} and not loaded.unexpected_keys, loaded
        theirs.tie_weights()
        with torch.no_grad():
            found[name] = theirs(torch.tensor(tokens().astype(np.int64))).logits.numpy()
    np.savez(LOGITS, **found)


if __name__ == "__main__":
    main()
