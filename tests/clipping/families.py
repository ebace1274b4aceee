"""One small objective of every family of models and heads, awkward rows for it, and the one comparison all of them must pass."""

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.models.shape import Bert, Decoder, Model
from dpx.task.declarations import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
from dpx.task.objective import Objective, objective
from tests.clipping.batches import (
    QUICKLY,
    SPECIAL,
    VOCABULARY,
    assert_trees_close,
    batch,
    bert,
    float64_gradients,
    parameters,
    squared_norm,
)

DROPOUT_KEY = jax.random.PRNGKey(7)
ROBERTA = {"segments": 1, "position_offset": 2, "layer_norm_eps": 1e-5, "classifier": "dense"}
MLM = MaskedLanguageModel(next_sentence=False, masked_slots=4)
CLASSES = Classification(classes=3)


def decoder(**changes) -> Decoder:
    return Decoder(**({"name": "test", "layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "positions": 32} | changes))


# name: (model's declaration, its task)
FAMILIES: dict[str, tuple[type[Model], dict, Task]] = {
    "bert": (Bert, {}, MaskedLanguageModel(next_sentence=True, masked_slots=4)),
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


def subject(family: str, **changes) -> Objective:
    declared, options, task = FAMILIES[family]
    make = bert if declared is Bert else decoder
    return objective(make(**(options | changes)), task, VOCABULARY, SPECIAL)


def rows(of: Objective, examples: int = 4, tokens: int = 12, seed: int = 1):
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


def assert_exact(of: Objective, batch, method: str = "book_keeping", spread: float | None = None, **options) -> None:
    """Squared norms, losses and the clipped sum against float64 gradients of one example at a time, some clipped and some not.

    What all choices of an example share cancels in its gradient, so much that float32's own, by any method, may be off by more than
    1e-5: families of choices are clipped in float64 as well, and in float32, farther from initialisation, their sums are held to 1e-5
    of the clipping norm.
    """
    has_choices = isinstance(of.task, MultipleChoice)
    spread = spread or (0.5 if has_choices else 0.3)

    def losses(params, batch):
        return of.losses(params, batch, DROPOUT_KEY)

    params = parameters(of, spread=spread)
    gradients, expected_losses = float64_gradients(losses, params, batch)
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    limit = float(np.median(norms))
    factors = limit / np.maximum(norms, limit)
    expected = jax.tree.map(lambda *leaves: sum(c * g for c, g in zip(factors, leaves, strict=True)), *gradients)

    def weights(norms_B):
        return limit / jnp.maximum(norms_B, limit)

    def assert_found(params, relative: float, floor: float) -> None:
        clipped = jax.jit(
            lambda params, batch: dpx.clipped_sum(losses, params, batch, weights=weights, method=method, checked=False, **options),
            compiler_options=QUICKLY,
        )
        found = clipped(params, batch)
        np.testing.assert_allclose(np.square(found.norms_B), np.square(norms), rtol=relative, atol=1e-12)
        np.testing.assert_allclose(found.losses_B, expected_losses, rtol=relative)
        assert_trees_close(found.total, expected, relative, floor)

    assert_found(params, 1e-5, 1e-5 * limit if has_choices else 1e-12)
    if has_choices:
        with jax.enable_x64(True):
            assert_found(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params), 1e-6, 1e-12)
