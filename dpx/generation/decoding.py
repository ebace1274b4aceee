"""Continues texts by a causal decoder, greedily, by drawing or by beams, with the keys and values of earlier tokens kept.

The prompts are read at once, then one token a step, in one compiled program for each shape of a batch. A text's completion does not
depend on the other texts of its batch, except for rounding.

B: prompts, K: beams, R: texts = B K, W: tokens of the longest prompt, N: new tokens, U: tokens kept = W + N, V: vocabulary, C: candidates.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.generation.settings import Settings
from dpx.models import attention
from dpx.models.modules import decoded
from dpx.models.networks import AnyDecoder, DecoderForCausalLM
from dpx.models.rotary_layers import capped

# The logarithm of a probability that no candidate has.
_NEVER = -1.0e9


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the next token is chosen, and when a completion ends: at a token of `ends`, after `max_new_tokens`, or where prompt and
    completion together have `max_length` tokens.

    With `beams` of 1 and `temperature` of 0 it is the most likely token, with a temperature above 0 a draw from the most likely tokens
    that together have at least the probability `top_p`, of logits divided by the temperature (Holtzman et al. 2020); before that, only
    the `top_k` most likely tokens stay, if it is not 0, and after it those with at least `min_p` times the probability of the most likely.
    `settings` change the logits before all this, in a beam search the logarithms of probabilities.
    """

    max_new_tokens: int
    ends: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    beams: int = 1
    top_k: int = 0
    min_p: float = 0.0
    settings: Settings = Settings()
    max_length: int | None = None

    def most(self, length_R: Array) -> Array:
        """Returns how many new tokens texts of `length_R` tokens may get."""
        most_R = jnp.full_like(length_R, self.max_new_tokens)
        return most_R if self.max_length is None else jnp.minimum(most_R, self.max_length - length_R)

    def changed(self, scores_RV: Array, prompts_RW: Array, length_R: Array, new_RN: Array, count: Array) -> Array:
        """Returns the scores of the next tokens by the settings."""
        return self.settings.changed(scores_RV, prompts_RW, length_R, new_RN, count, self.most(length_R), self.ends)


class Completions(NamedTuple):
    """Tokens [B,N] of which the first `count` [B] are the completion, its end included, the logarithm of its probability [B], and whether
    it has ended."""

    tokens: Array
    count: Array
    log_probability: Array
    is_ended: Array


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Completes batches of prompts by one model and one rule."""

    model: AnyDecoder
    vocabulary_size: int
    rule: Rule

    @partial(jax.jit, static_argnums=0)
    def complete(self, params: Any, tokens_BW: Array, length_B: Array, keys_B: Array) -> Completions:
        """Returns the completions of prompts, padded on the right; each draws with its own key."""
        by_rule = self._by_beams if self.rule.beams > 1 else self._one_by_one
        return by_rule(params, tokens_BW, length_B, keys_B)

    def read(self, params: Any, tokens_RS: Array, length_R: Array, kept: Any = None) -> tuple[Array, Any]:
        """Returns the logits [R,V] after each text's last token, and the keys and values of the tokens that were read.

        They are the whole texts or, with the keys and values of the tokens before in `kept`, the last token of each.
        """

        def after_last(h_RSH: Array, table: Any) -> Array:
            last_R = length_R - 1 if kept is None else jnp.zeros_like(length_R)
            last_R1H = jnp.take_along_axis(h_RSH, last_R[:, None, None], axis=1)
            return capped(decoded(last_R1H, table)[:, 0], getattr(self.model, "logit_cap", None))

        # The module's own attention takes windows, caps and kept keys; nothing is computed again, since nothing is differentiated.
        module = DecoderForCausalLM(dataclasses.replace(self.model, rematerialize="none", attention="explicit"), self.vocabulary_size)
        variables = {"params": params}
        if kept is not None:
            variables |= {attention.KEPT: {"layers": kept, "embeddings": {"place": length_R - 1}}}
        logits_RV, made = module.apply(variables, tokens_RS, length_R, None, after_last, mutable=[attention.MADE])
        return logits_RV, {name: one for name, (one,) in made[attention.MADE]["layers"].items()}

    def _start(self, params: Any, tokens_BW: Array, length_B: Array) -> tuple[Array, Any]:
        """Returns the logits after each prompt, and its keys and values with room for the new tokens."""
        logits_BV, made = self.read(params, tokens_BW, length_B)
        room = [(0, 0), (0, 0), (0, self.rule.max_new_tokens), (0, 0), (0, 0)]
        return logits_BV, jax.tree.map(lambda one: jnp.pad(one, room), made)

    def _step(self, params: Any, token_R: Array, length_R: Array, kept: Any) -> tuple[Array, Any]:
        """Returns the logits after each text, whose last token is `token_R`, and all its keys and values."""
        logits_RV, made = self.read(params, token_R[:, None], length_R, kept)
        at = jnp.arange(len(length_R)), length_R - 1
        return logits_RV, {name: one.at[:, *at].set(made[name][:, :, 0]) for name, one in kept.items()}

    def _one_by_one(self, params: Any, tokens_BW: Array, length_B: Array, keys_B: Array) -> Completions:
        """Takes one token of each prompt after another by the rule."""
        rule, whole = self.rule, jnp.zeros((len(length_B), self.rule.max_new_tokens), jnp.int32)
        most_B = rule.most(length_B)

        def chosen(count: Array, logits_BV: Array, done: Completions) -> Completions:
            scores_BV = rule.changed(logits_BV, tokens_BW, length_B, done.tokens, count)
            token_B = next_tokens(scores_BV, jax.vmap(partial(jax.random.fold_in, data=count))(keys_B), rule)
            own_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), token_B[:, None], axis=1)[:, 0]
            is_open = ~done.is_ended & (count < most_B)
            return Completions(
                done.tokens.at[:, count].set(jnp.where(is_open, token_B, 0)),
                done.count + is_open,
                done.log_probability + jnp.where(is_open, own_B, 0),
                done.is_ended | (is_open & is_one_of(token_B, rule.ends)),
            )

        def body(state):
            count, done, kept = state
            logits_BV, kept = self._step(params, done.tokens[:, count - 1], length_B + done.count, kept)
            return count + 1, chosen(count, logits_BV, done), kept

        logits_BV, kept = self._start(params, tokens_BW, length_B)
        nothing = Completions(whole, jnp.zeros_like(length_B), jnp.zeros(len(length_B), logits_BV.dtype), jnp.zeros(len(length_B), bool))
        begun = jnp.int32(1), chosen(jnp.int32(0), logits_BV, nothing), kept
        return jax.lax.while_loop(lambda state: (~state[1].is_ended & (state[0] < most_B)).any(), body, begun)[1]

    def _by_beams(self, params: Any, tokens_BW: Array, length_B: Array, keys_B: Array) -> Completions:
        """Searches by beams: the best of K completions by the mean logarithm of a token's probability, its end included.

        As in transformers with `length_penalty=1` and `early_stopping=False`: a prompt's search ends when K completions have ended and
        the best open beam, by its mean so far, is not above the worst of them.
        """
        del keys_B
        rule, K = self.rule, self.rule.beams
        texts, most_B = (jnp.repeat(tokens_BW, K, axis=0), jnp.repeat(length_B, K)), rule.most(length_B)
        beams = Beams.begun(len(length_B), K, rule.max_new_tokens)

        def chosen(count: Array, logits_RV: Array, beams: Beams, kept: Any) -> tuple[Beams, Any]:
            new_RN = beams.tokens.reshape(len(length_B) * K, -1)
            scores_RV = rule.changed(jax.nn.log_softmax(logits_RV), *texts, new_RN, count)
            beams, from_BK = beams.after(count, scores_RV.reshape(len(length_B), K, -1), count + 1 == most_B, rule.ends)
            rows_R = (from_BK + jnp.arange(len(length_B))[:, None] * K).reshape(-1)
            return beams, jax.tree.map(lambda one: one[:, rows_R], kept)

        def body(state):
            count, beams, kept = state
            token_R = beams.tokens[:, :, count - 1].reshape(-1)
            logits_RV, kept = self._step(params, token_R, jnp.repeat(length_B, K) + count, kept)
            return count + 1, *chosen(count, logits_RV, beams, kept)

        logits_BV, kept = self._start(params, tokens_BW, length_B)
        kept = jax.tree.map(lambda one: jnp.repeat(one, K, axis=1), kept)
        begun = jnp.int32(1), *chosen(jnp.int32(0), jnp.repeat(logits_BV, K, axis=0), beams, kept)
        beams = jax.lax.while_loop(lambda state: (state[0] < rule.max_new_tokens) & state[1].is_open.any(), body, begun)[1]
        tokens_BN, count_B = beams.ended_tokens[:, 0], beams.ended_count[:, 0]
        last_B = jnp.take_along_axis(tokens_BN, count_B[:, None] - 1, axis=1)[:, 0]
        return Completions(tokens_BN, count_B, beams.ended_score[:, 0] * count_B, is_one_of(last_B, rule.ends))


class Beams(NamedTuple):
    """The state of a beam search: K open beams, with the logarithms of their probabilities, and K completions that have ended, the best
    first, with their means; a completion that does not exist has the mean `_NEVER`."""

    tokens: Array
    score: Array
    ended_tokens: Array
    ended_score: Array
    ended_count: Array
    is_open: Array

    @classmethod
    def begun(cls, B: int, K: int, N: int) -> "Beams":
        """Returns the state before the first token, in which all beams but the first are empty."""
        tokens_BKN, never_BK = jnp.zeros((B, K, N), jnp.int32), jnp.full((B, K), _NEVER)
        return cls(tokens_BKN, never_BK.at[:, 0].set(0), tokens_BKN, never_BK, jnp.ones((B, K), jnp.int32), jnp.ones(B, bool))

    def after(self, count: Array, log_probability_BKV: Array, is_last_B: Array, ends: tuple[int, ...]) -> tuple["Beams", Array]:
        """Returns the state after `count + 1` tokens, the last where `is_last_B`, and the beam that each open beam continues, [B,K]."""
        B, K, V = log_probability_BKV.shape
        total_BF = (self.score[:, :, None] + log_probability_BKV).reshape(B, -1)
        # Each beam may end in each of the ends, so that at least K of these candidates stay open.
        score_BC, place_BC = jax.lax.top_k(total_BF, min((1 + len(ends)) * K, total_BF.shape[1]))
        beam_BC, token_BC = place_BC // V, place_BC % V
        tokens_BCN = _picked(self.tokens, beam_BC).at[:, :, count].set(token_BC)
        is_over_BC = is_one_of(token_BC, ends) | is_last_B[:, None]
        is_ending_BC = is_over_BC & (jnp.arange(score_BC.shape[1]) < K) & self.is_open[:, None]
        mean_BC = jnp.where(is_ending_BC, score_BC / (count + 1), _NEVER)
        all_tokens, all_counts = (
            jnp.concatenate(pair, axis=1)
            for pair in ((self.ended_tokens, tokens_BCN), (self.ended_count, jnp.full_like(token_BC, count + 1)))
        )
        ended_score, best_BK = jax.lax.top_k(jnp.concatenate([self.ended_score, mean_BC], axis=1), K)
        open_score, open_BK = jax.lax.top_k(jnp.where(is_over_BC, _NEVER, score_BC), K)
        is_open = self.is_open & (open_score[:, 0] / (count + 1) > ended_score[:, -1])
        ended = _picked(all_tokens, best_BK), ended_score, _picked(all_counts, best_BK), is_open
        return Beams(_picked(tokens_BCN, open_BK), open_score, *ended), _picked(beam_BC, open_BK)


def _picked(of_each: Array, place_BK: Array) -> Array:
    """Returns the entries at `place_BK` along the second axis."""
    return jax.vmap(lambda one, place: one[place])(of_each, place_BK)


def is_one_of(token: Array, ends: tuple[int, ...]) -> Array:
    """Returns whether each token is one of `ends`."""
    return jnp.isin(token, jnp.asarray(ends))


def next_tokens(logits_BV: Array, keys_B: Array, rule: Rule) -> Array:
    """Returns the most likely token of each row, or a draw with the row's key."""
    if rule.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    kept_BV = logits_BV / rule.temperature
    if rule.top_k:
        kept_BV = jnp.where(kept_BV < jax.lax.top_k(kept_BV, min(rule.top_k, kept_BV.shape[1]))[0][:, -1:], -jnp.inf, kept_BV)
    kept_BV = nucleus(kept_BV, rule.top_p)
    if rule.min_p:
        share_BV = jax.nn.softmax(kept_BV)
        kept_BV = jnp.where(share_BV < rule.min_p * share_BV.max(axis=1, keepdims=True), -jnp.inf, kept_BV)
    return jax.vmap(jax.random.categorical)(keys_B, kept_BV)


def nucleus(logits_BV: Array, top_p: float) -> Array:
    """Returns the logits, with -inf for all but the fewest most likely tokens whose probability together is at least `top_p`."""
    if top_p == 1:
        return logits_BV
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    share_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV), order_BV, axis=-1)
    is_in_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < top_p
    return jnp.where(jnp.take_along_axis(is_in_BV, jnp.argsort(order_BV, axis=-1), axis=-1), logits_BV, -jnp.inf)
