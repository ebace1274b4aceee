"""The decoder against a forward pass written out in NumPy, and that no token sees a later one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx.task import objective as dispatch
from dpx.task.declared_task import CausalLanguageModel, MaskedLanguageModel
from tests.clipping.batches import SPECIAL, bert, parameters
from tests.clipping.families import decoder, rows, subject


def normed(x_TH, p):
    centred = x_TH - x_TH.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def dense(x_TH, p):
    return x_TH @ p["kernel"] + p["bias"]


def attended(x_TH, p, heads: int):
    T, H = x_TH.shape
    q, k, v = (part.reshape(T, heads, H // heads).swapaxes(0, 1) for part in np.split(dense(x_TH, p["qkv"]), 3, axis=1))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(H // heads)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = (weights / weights.sum(-1, keepdims=True)) @ v
    return dense(context.swapaxes(0, 1).reshape(T, H), p["attention_out"])


def logits_of_one(params, token_T, heads: int = 2):
    """GPT-2 (Radford et al. 2019), float64, one sequence without padding."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x_TH = p["embeddings"]["word"][token_T] + p["embeddings"]["position"][: len(token_T)]
    for layer in range(2):
        q = jax.tree.map(lambda leaf, at=layer: leaf[at], p["layers"])
        x_TH = x_TH + attended(normed(x_TH, q["attention_norm"]), q, heads)
        u = dense(normed(x_TH, q["feed_forward_norm"]), q["up"])
        x_TH = x_TH + dense(0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))), q["down"])
    return normed(x_TH, p["final_norm"]) @ p["embeddings"]["word"].T


@pytest.fixture(scope="module")
def case():
    of = subject("decoder")
    return of, parameters(of), rows(of)


def test_losses_are_those_of_a_forward_pass_written_out(case):
    of, params, batch = case
    losses_B, counts = jax.jit(of.losses)(params, batch)
    for b, length in enumerate(np.asarray(batch["length"])):
        token_T = np.asarray(batch["tokens"])[b, :length]
        logits = logits_of_one(params, token_T)[:-1]
        picked = logits[np.arange(length - 1), token_T[1:]]
        # Of a row with a second segment, the tokens of that segment alone.
        is_label = np.asarray(batch["has_label"])[b, : length - 1]
        nats = (np.log(np.exp(logits).sum(-1)) - picked)[is_label]
        np.testing.assert_allclose(losses_B[b], nats.mean() if len(nats) else 0, rtol=1e-5)
        np.testing.assert_allclose(counts["next_token_nats"][b], nats.sum(), rtol=1e-5)
        assert int(counts["next_token_correct"][b]) == np.sum((logits.argmax(-1) == token_T[1:])[is_label])
        assert int(counts["next_token_predicted"][b]) == len(nats) and (length < 2 or is_label[-1])


def test_no_token_sees_a_later_one(case):
    of, params, batch = case
    logits = jax.jit(lambda tokens: of.module.apply({"params": params}, tokens, jnp.full(4, 12)))
    changed = batch["tokens"].at[:, 7].set(33)
    before, after = logits(batch["tokens"]), logits(changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(np.asarray(before[:, 7:]) != np.asarray(after[:, 7:]), axis=-1))


def test_halves_start_smaller_in_a_deep_stack():
    params = jax.jit(subject("decoder", layers=8, width=32).init)(jax.random.PRNGKey(0))["layers"]
    ratio = np.std(params["down"]["kernel"]) / np.std(params["up"]["kernel"])
    assert ratio == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    "model, task, words",
    [
        (bert(), CausalLanguageModel(), "model=test: an encoder can read the token that it should predict"),
        (decoder(), MaskedLanguageModel(next_sentence=False), "model=test: a causal decoder cannot read words after the masked word"),
    ],
)
def test_a_model_that_does_not_fit_its_task_is_refused(model, task, words):
    with pytest.raises(ConfigError, match=words):
        dispatch.objective(model, task, 50, SPECIAL)
