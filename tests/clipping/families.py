"""One small objective of every family of models and heads, and awkward rows for it."""

from typing import Any

import jax
import numpy as np

from dpx.models.shape import Bert, Decoder, Model
from dpx.task import causal_lm, classification, mlm
from dpx.task.declarations import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
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


def subject(family: str, **changes) -> mlm.Objective | causal_lm.Objective | classification.Objective:
    declared, options, task = FAMILIES[family]
    make = bert if declared is Bert else decoder
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
