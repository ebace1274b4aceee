"""One small objective of every family of models and heads, and awkward rows for it."""

from typing import Any

import jax
import numpy as np

from dpx.models.families import Gemma, Llama, Olmo, Qwen
from dpx.models.shape import Bert, Decoder, Model
from dpx.task import causal_lm, classification, mlm
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
from dpx.task.objective import objective
from tests.clipping.batches import (
    SPECIAL,
    VOCABULARY,
    batch,
    bert,
)

DROPOUT_KEY = jax.random.PRNGKey(7)
ROBERTA = {"segments": 1, "position_offset": 2, "layer_norm_eps": 1e-5, "classifier": "dense"}
MLM = MaskedLanguageModel(next_sentence=False, max_masked_positions=4)
CLASSES = Classification(classes=3)


def decoder(**changes) -> Decoder:
    return Decoder(**({"name": "test", "layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "positions": 32} | changes))


# name: (model's declaration, its task)
FAMILIES: dict[str, tuple[type[Model], dict, Task]] = {
    "bert": (Bert, {}, MaskedLanguageModel(next_sentence=True, max_masked_positions=4)),
    "bert_untied": (Bert, {"tied": False}, MLM),
    "bert_without_segments": (Bert, {"segments": 0}, MLM),
    "roberta": (Bert, ROBERTA, MLM),
    "decoder": (Decoder, {}, CausalLanguageModel()),
    "decoder_untied": (Decoder, {"tied": False, "gelu": "exact"}, CausalLanguageModel()),
    "bert_classifier": (Bert, {}, CLASSES),
    "roberta_classifier": (Bert, ROBERTA, CLASSES),
    "distilbert_classifier": (Bert, {"segments": 0, "classifier": "relu"}, CLASSES),
    "mean_classifier": (Bert, {"pool": "mean", "classifier": "linear"}, CLASSES),
    "decoder_classifier": (Decoder, {}, CLASSES),
    "bert_choices": (Bert, {}, MultipleChoice(choices=3)),
    "roberta_choices": (Bert, ROBERTA, MultipleChoice(choices=3)),
    "mean_choices": (Bert, {"pool": "mean"}, MultipleChoice(choices=3)),
    "decoder_choices": (Decoder, {}, MultipleChoice(choices=3)),
}
# Decoders with rotary positions: caps, windows and scalings are so small that every text feels them.
_SIZES = {"name": "test", "layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "head_dim": 6, "feed_forward": 24, "positions": 32}
_CAPPED = {"attention_cap": 2.0, "logit_cap": 3.0, "window": 3, "full_every": 2, "query_scalar": 5}
_SCALED = {"rotary_scaling": "llama3", "rotary_base": 20.0, "rotary_factor": 4.0, "rotary_original_positions": 8}
ROTARY: dict[str, tuple[type[Model], dict, Task]] = {
    "llama": (Llama, {"tied": False, "attention_bias": True} | _SCALED, CausalLanguageModel()),
    "llama_tied": (Llama, {}, CausalLanguageModel()),
    "llama_classifier": (Llama, {}, CLASSES),
    "llama_choices": (Llama, {"key_value_heads": 1}, MultipleChoice(choices=3)),
    "mistral": (Llama, {"family": "mistral", "window": 3, "tied": False}, CausalLanguageModel()),
    "smollm3": (Llama, {"family": "smollm3", "unturned_every": 2}, CausalLanguageModel()),
    "olmo2": (Olmo, {"tied": False}, CausalLanguageModel()),
    "qwen2": (Qwen, {"family": "qwen2", "rotary_scaling": "linear", "rotary_factor": 2.0}, CausalLanguageModel()),
    "qwen3": (Qwen, {"family": "qwen3", "tied": False}, CausalLanguageModel()),
    "gemma2": (Gemma, {"family": "gemma2"} | _CAPPED, CausalLanguageModel()),
    "gemma3": (Gemma, {"family": "gemma3_text", "window_rotary_base": 9.0} | _CAPPED, CausalLanguageModel()),
    "gemma3_classifier": (Gemma, {"family": "gemma3_text"}, CLASSES),
    "vaultgemma": (Gemma, _CAPPED, CausalLanguageModel()),
}


def subject(family: str, **changes) -> mlm.Objective | causal_lm.Objective | classification.Objective:
    declared, options, task = (FAMILIES | ROTARY)[family]
    make = {Bert: bert, Decoder: decoder}.get(declared, lambda **given: declared(**(_SIZES | given)))
    of: Any = objective(make(**(options | changes)), task, VOCABULARY, SPECIAL)
    return of


def rows(of: Any, examples: int = 4, tokens: int = 12, seed: int = 1):
    """A batch of that objective: repeated tokens, labels that also occur in the input, padding, an example without any label."""
    if isinstance(of.task, MaskedLanguageModel):
        return batch(examples, tokens, min(4, tokens), seed)
    drawn = np.random.default_rng(seed)
    texts = (examples, of.task.choices) if isinstance(of.task, MultipleChoice) else (examples,)
    length = drawn.integers(max(3, tokens // 2), tokens + 1, texts)
    if isinstance(of.task, CausalLanguageModel) and examples > 1:
        length[0] = 1
    token = np.where(np.arange(tokens) < length[..., None], drawn.integers(5, 12, (*texts, tokens)), SPECIAL.pad_id)
    found = {"tokens": token, "length": length, "segment_start": np.minimum(length, drawn.integers(1, tokens + 1, texts))}
    found |= {"label": drawn.integers(0, 3, examples), "record": np.arange(100, 100 + examples)}
    return of.batch(np.zeros(2, np.uint32), {name: value.astype(np.int32) for name, value in found.items()})
