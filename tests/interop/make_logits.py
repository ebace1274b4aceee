"""Writes `logits/`: what transformers computes of small checkpoints, in float64 and kept as float32, so that only the rounding of the code
under test is measured. Run once, in an environment with the extra `parity`:

python -m tests.interop.make_logits
"""

import json
from typing import Any

import numpy as np
import torch
import transformers

from tests.interop.cases import CLASSES, LOGITS, SHAPES, VOCABULARY, inputs, values


def config_of(model_type: str, shape: tuple[int, int, int, int], letter: str) -> dict:
    layers, width, heads, forward = shape
    if model_type not in ("bert", "roberta", "distilbert", "gpt2"):
        return rotary(model_type, shape, letter)
    if model_type == "gpt2":
        sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_inner": forward, "n_positions": 16}
        return sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if model_type == "distilbert":
        return {"n_layers": layers, "dim": width, "n_heads": heads, "hidden_dim": forward, "max_position_embeddings": 16}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": forward}
    roberta = {"type_vocab_size": 1, "max_position_embeddings": 18, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    return sizes | (roberta if model_type == "roberta" else {"max_position_embeddings": 16})


def rotary(model_type: str, shape: tuple[int, int, int, int], letter: str) -> dict:
    """Settings of a decoder with rotary positions; each is felt by nine tokens."""
    layers, width, heads, forward = shape
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": forward}
    sizes |= {"num_key_value_heads": heads // 2, "max_position_embeddings": 16, "pad_token_id": 0, "attn_implementation": "eager"}
    types = (["sliding_attention", "full_attention"] * layers)[:layers]
    gemma = {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 3, "layer_types": types}
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}
    scaled = {"rope_type": "llama3", "rope_theta": 5.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    scaled["original_max_position_embeddings"] = 8
    local = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}
    local["sliding_attention"] = {"rope_type": "default", "rope_theta": 7.0}
    return (
        sizes
        | {
            "llama": {"rope_parameters": scaled, "attention_bias": True} if letter == "a" else {"tie_word_embeddings": True},
            "mistral": {"sliding_window": 3 if letter == "a" else None, "head_dim": 6},
            # The third layer turns, the second does not.
            "smollm3": {"no_rope_layer_interval": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
            "olmo2": {"attention_bias": letter == "b", "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
            "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10.0}},
            "qwen3": {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": letter == "b"},
            "gemma2": gemma | caps,
            "gemma3_text": gemma | {"rope_parameters": local},
            "vaultgemma": gemma | (caps if letter == "a" else {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        }[model_type]
    )


HEADS = {
    "bert": {"body": "BertModel", "lm": "BertForPreTraining", "classes": "BertForSequenceClassification"},
    "roberta": {"lm": "RobertaForMaskedLM", "classes": "RobertaForSequenceClassification"},
    "distilbert": {"lm": "DistilBertForMaskedLM", "classes": "DistilBertForSequenceClassification"},
    "gpt2": {"body": "GPT2Model", "lm": "GPT2LMHeadModel", "classes": "GPT2ForSequenceClassification"},
}
ROTARY = {
    "llama": "Llama",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
}
HEADS |= {kind: {"lm": f"{name}ForCausalLM"} for kind, name in ROTARY.items()} | {"vaultgemma": {"lm": "VaultGemmaForCausalLM"}}
HEADS["llama"] |= {"classes": "LlamaForSequenceClassification"}
HEADS["olmo2"] |= {"classes": "Olmo2ForSequenceClassification"}


def computed(model, model_type: str) -> dict[str, Any]:
    """Hidden states at real tokens and logits."""
    given = inputs(model_type)
    place = np.arange(given["tokens"].shape[1])
    more = {}
    if model_type == "bert":
        is_second = (place >= given["segment_start"][:, None]) & (place < given["length"][:, None])
        more = {"token_type_ids": torch.tensor(is_second.astype(np.int64))}
    if model_type in ("bert", "roberta", "distilbert"):
        # A token of a decoder reads no padding, which is behind it, and in float64 a mask of a window has no number there.
        more["attention_mask"] = torch.tensor((place < given["length"][:, None]).astype(np.int64))
    with torch.no_grad():
        out = model(torch.tensor(given["tokens"].astype(np.int64)), output_hidden_states=True, **more)
    found = {"hidden": out.hidden_states[-1].numpy()}
    for name in ("logits", "prediction_logits", "seq_relationship_logits"):
        if name in out:
            found[name.replace("prediction_", "").replace("seq_relationship_logits", "next_sentence")] = getattr(out, name).numpy()
    return {name: leaf.astype(np.float32) for name, leaf in found.items()}


def main() -> None:
    LOGITS.mkdir(exist_ok=True)
    torch.set_default_dtype(torch.float64)
    for model_type, heads in HEADS.items():
        for letter, shape in SHAPES.items():
            for head, kind in heads.items():
                config = transformers.AutoConfig.for_model(
                    model_type, vocab_size=VOCABULARY, num_labels=CLASSES, **config_of(model_type, shape, letter)
                )
                model = getattr(transformers, kind)(config).double().eval()
                state = model.state_dict()
                tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
                kept = {name: tuple(leaf.shape) for name, leaf in state.items() if name not in tied and leaf.is_floating_point()}
                loaded = model.load_state_dict(
                    {name: torch.tensor(values(name, at), dtype=torch.float64) for name, at in kept.items()}, strict=False
                )
                assert not set(loaded.missing_keys) - tied and not loaded.unexpected_keys, loaded
                model.tie_weights()
                name = f"{model_type}_{head}_{letter}"
                asked = {"config": json.loads(config.to_json_string(use_diff=False)), "tensors": kept}
                asked["config"] |= {"architectures": [kind]}
                (LOGITS / f"{name}.json").write_text(json.dumps(asked, sort_keys=True) + "\n")
                np.savez(LOGITS / f"{name}.npz", **computed(model, model_type))
                print(name, {key: value.shape for key, value in computed(model, model_type).items()})


if __name__ == "__main__":
    main()
