"""Decoding with a cache computes what whole forward passes compute; draws stay in the nucleus, and beams find the best completion."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from dpx.clipping import ops
from dpx.generation.decoding import Decoding, Rule, nucleus
from dpx.models.rotary_layers import capped
from tests.clipping.batches import VOCABULARY, parameters
from tests.clipping.families import ROTARY, subject

FAMILIES = ["decoder", "decoder_untied", *(name for name in ROTARY if "classifier" not in name and "choices" not in name)]
QUICK = ("decoder", "gemma3")
LENGTHS = np.array([3, 9, 5], np.int32)
PROMPTS = np.where(np.arange(12) < LENGTHS[:, None], np.random.default_rng(2).integers(5, VOCABULARY, (3, 12)), 0).astype(np.int32)
TEXTS = [row[:length].tolist() for row, length in zip(PROMPTS, LENGTHS, strict=True)]
ALL = (0, 1, 2)
END, NEW = 7, 6
GREEDY = Rule(NEW, (END,))


class Completion(NamedTuple):
    tokens: list[int]
    log_probability: float
    is_ended: bool


class Model:
    """A small model of a family, and the logits of whole forward passes."""

    def __init__(self, family: str, dtype: str = "float32"):
        of: Any = subject(family, dtype=dtype)
        self.declared, self.params = of.model, jax.tree.map(lambda leaf: leaf.astype(dtype), parameters(of))
        cap = getattr(of.model, "logit_cap", None)
        self._whole = jax.jit(lambda *text: capped(of.module.apply({"params": self.params}, *text, None, ops.decode), cap))
        self._keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))(jnp.arange(3))

    def after(self, text: list[int]) -> np.ndarray:
        """The logits [V] after one text, of a forward pass over it alone."""
        padded = np.zeros((1, 18), np.int32)
        padded[0, : len(text)] = text
        return np.asarray(self._whole(padded, np.array([len(text)])))[0, len(text) - 1]

    def score(self, text: list[int], completion: list[int]) -> float:
        """The logarithm of a completion's probability."""
        return sum(log_softmax(self.after(text + completion[:count]))[token] for count, token in enumerate(completion))

    def complete(self, rule: Rule, rows: Sequence[int] = ALL) -> list[Completion]:
        """The completions of three prompts, by their numbers."""
        at = np.array(rows)
        done = Decoding(self.declared, VOCABULARY, rule).complete(self.params, PROMPTS[at], LENGTHS[at], self._keys[at])
        return [Completion(row[:n].tolist(), float(s), bool(e)) for row, n, s, e in zip(*map(np.asarray, done), strict=True)]


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model("llama")


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES])
def test_with_a_cache_each_token_has_the_logits_of_a_whole_pass(family: str):
    model = Model(family)
    decoding = Decoding(model.declared, VOCABULARY, GREEDY)
    step, texts = jax.jit(decoding._step), [list(text) for text in TEXTS]
    logits, kept = jax.jit(decoding._start)(model.params, PROMPTS, LENGTHS)
    for count in range(4):
        for row, text in enumerate(texts):
            np.testing.assert_allclose(logits[row], model.after(text), atol=2e-5)
            text.append(5 + (count + row) % 20)
        logits, kept = step(model.params, np.array([text[-1] for text in texts]), LENGTHS + count + 1, kept)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("decoder", "gemma2")]


@pytest.mark.parametrize("family", ["llama", *SLOW])
def test_greedy_takes_the_most_likely_token_of_a_whole_pass_whatever_the_batch(family: str, llama: Model):
    model = llama if family == "llama" else Model(family)
    found = model.complete(GREEDY)
    for text, one in zip(TEXTS, found, strict=True):
        likeliest = [int(np.argmax(model.after(text + one.tokens[:count]))) for count in range(len(one.tokens))]
        assert one.tokens == likeliest and one.is_ended == (likeliest[-1] == END) and END not in likeliest[:-1]
        assert one.is_ended or len(one.tokens) == NEW
        assert one.log_probability == pytest.approx(model.score(text, one.tokens), abs=1e-4)
    # In a batch with itself alone, so that only other texts and their padding are missing.
    for row in ALL:
        assert [one.tokens for one in model.complete(GREEDY, (row, row, row))] == [found[row].tokens] * 3


def test_the_cache_of_bfloat16_weights_is_of_bfloat16_and_logits_are_of_float32():
    model = Model("gemma3", "bfloat16")
    logits, kept = jax.eval_shape(Decoding(model.declared, VOCABULARY, GREEDY)._start, model.params, PROMPTS, LENGTHS)
    assert logits.dtype == jnp.float32 and {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_and_cache_complete_as_whole_passes_in_bfloat16_do(family: str):
    """Up to the rounding of a logit: bfloat16 has a spacing of 2^-6 between 2 and 4, and programs of two shapes round differently."""
    model = Model(family, "bfloat16")
    decoding = Decoding(model.declared, VOCABULARY, GREEDY)
    logits, kept = jax.jit(decoding._start)(model.params, PROMPTS, LENGTHS)
    assert logits.dtype == jnp.float32 and {leaf.dtype for leaf in jax.tree.leaves((model.params, kept))} == {jnp.dtype(jnp.bfloat16)}
    for text, one in zip(TEXTS, model.complete(GREEDY), strict=True):
        for count, token in enumerate(one.tokens):
            whole = model.after(text + one.tokens[:count])
            assert np.abs(whole).max() < 4 and whole[token] >= whole.max() - 2**-6
        assert one.is_ended == (one.tokens[-1] == END) and (one.is_ended or len(one.tokens) == NEW)
        assert one.log_probability == pytest.approx(model.score(text, one.tokens), abs=NEW * 2**-6)


def test_a_completion_ends_at_any_end(llama: Model):
    free = llama.complete(GREEDY)
    ends = (free[0].tokens[1], free[1].tokens[0], END)
    for whole, cut in zip(free, llama.complete(Rule(NEW, ends)), strict=True):
        places = [place for place, token in enumerate(whole.tokens) if token in ends]
        assert cut.is_ended == bool(places) and cut.tokens == (whole.tokens[: places[0] + 1] if places else whole.tokens)


def test_as_many_beams_as_there_are_tokens_find_the_best_of_all_completions(llama: Model):
    for text, found in zip(TEXTS, llama.complete(Rule(2, (END,), beams=VOCABULARY)), strict=True):
        first = log_softmax(llama.after(text))
        means: dict[tuple[int, ...], float] = {(END,): first[END]}
        for token in set(range(VOCABULARY)) - {END}:
            second = log_softmax(llama.after([*text, token]))
            means |= {(token, last): (first[token] + second[last]) / 2 for last in range(VOCABULARY)}
        best = max(means, key=means.__getitem__)
        assert tuple(found.tokens) == best and found.is_ended == (best[-1] == END)
        assert found.log_probability == pytest.approx(means[best] * len(best), abs=1e-4)


# Beams that find the best of all completions are above.
@pytest.mark.slow
def test_one_beam_is_greedy_and_four_find_what_is_at_least_as_likely(llama: Model):
    greedy, found = llama.complete(GREEDY), llama.complete(Rule(NEW, (END,), beams=4))
    for text, least, best in zip(TEXTS, greedy, found, strict=True):
        assert best.log_probability == pytest.approx(llama.score(text, best.tokens), abs=1e-4)
        assert best.log_probability / len(best.tokens) >= least.log_probability / len(least.tokens) - 1e-6
    one_beam = jax.jit(Decoding(llama.declared, VOCABULARY, GREEDY)._by_beams)(llama.params, PROMPTS, LENGTHS, llama._keys)
    for one, tokens, count in zip(greedy, one_beam.tokens, one_beam.count, strict=True):
        assert one.tokens == tokens[:count].tolist()


def test_the_nucleus_is_the_fewest_tokens_with_that_probability():
    logits = np.array([[3.0, 1.0, 2.0, 0.0, 2.5], [0.0, 0.0, 0.0, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    for shares, is_in in zip(softmax(logits, axis=1), np.isfinite(nucleus(jnp.asarray(logits), 0.7)), strict=True):
        inside = shares[is_in]
        assert inside.sum() >= 0.7 > inside.sum() - inside.min() and inside.min() >= shares[~is_in].max()


def test_nothing_is_drawn_outside_the_nucleus_and_a_prompt_draws_the_same_in_any_batch(llama: Model):
    rule = Rule(NEW, (END,), temperature=2.0, top_p=0.6)
    drawn = llama.complete(rule)
    for text, one in zip(TEXTS, drawn, strict=True):
        for count, token in enumerate(one.tokens):
            shares = softmax(llama.after(text + one.tokens[:count]) / 2.0)
            assert shares[shares > shares[token]].sum() < 0.6 + 1e-5
    assert [one.tokens for one in drawn] != [one.tokens for one in llama.complete(GREEDY)]
    assert [one.tokens for one in llama.complete(rule, (2, 2, 1))] == [drawn[row].tokens for row in (2, 2, 1)]
