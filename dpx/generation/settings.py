"""Reads how a checkpoint's own files change the next token, and changes logits so, as `generate` of transformers does.

R: texts, W: tokens of the longest prompt, N: new tokens, U: tokens of a whole text = W + N, V: vocabulary, S: sequences of one length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dpx.declaration import require
from dpx.files.run_folder import read_json
from dpx.files.weights import CONFIG, GENERATION

# What draws read, and how they are asked for; greedy completions do not depend on it.
_OF_DRAWS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "top_h": None}
_OF_DRAWS |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_IN_WORDS = "top_k, top_p and min_p"
# What would change completions in transformers and is refused here, with the values that change nothing.
_OTHERS = {"encoder_repetition_penalty": 1.0, "guidance_scale": 1, "exponential_decay_length_penalty": None, "num_beam_groups": 1}
_OTHERS |= {"diversity_penalty": 0.0, "penalty_alpha": 0.0, "watermarking_config": None, "stop_strings": None, "constraints": None}
_OTHERS |= {"force_words_ids": None, "dola_layers": None, "prompt_lookup_num_tokens": None, "assistant_early_exit": None}
_OTHERS |= {"encoder_no_repeat_ngram_size": 0, "token_healing": False}
_OF_BEAMS = {"length_penalty": 1.0, "early_stopping": False, "renormalize_logits": False}
_Sequences = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True)
class Settings:
    """What changes the logits of the next token, in the order in which transformers applies it; by default nothing does.

    `bias` and `banned` are of the last token of a sequence of tokens, where the text ends in those before it.
    """

    bias: _Sequences = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    banned: _Sequences = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    def changed(
        self, logits_RV: Array, prompts_RW: Array, length_R: Array, new_RN: Array, count: Array, most_R: Array, ends: tuple[int, ...]
    ) -> Array:
        """Returns the logits after prompts of `length_R` tokens and `count` new ones of at most `most_R`; -inf for a token that must not be
        next."""
        if self == Settings():
            return logits_RV
        # The tokens of each text one after another; what is behind them has no meaning.
        rows_R1, places_RN = jnp.arange(len(length_R))[:, None], length_R[:, None] + jnp.arange(new_RN.shape[1])
        tokens_RU = jnp.pad(prompts_RW, ((0, 0), (0, new_RN.shape[1]))).at[rows_R1, places_RN].set(new_RN)
        total_R = length_R + count
        scores_RV = _biased(logits_RV, tokens_RU, total_R, self.bias)
        if self.repetition_penalty != 1:
            by_penalty_RV = jnp.where(scores_RV < 0, scores_RV * self.repetition_penalty, scores_RV / self.repetition_penalty)
            is_read_RU = jnp.arange(tokens_RU.shape[1]) < total_R[:, None]
            scores_RV = jnp.where(_marked(scores_RV, tokens_RU, is_read_RU), by_penalty_RV, scores_RV)
        if self.no_repeat_ngram_size:
            scores_RV = jnp.where(self._repeats(scores_RV, tokens_RU, total_R), -jnp.inf, scores_RV)
        scores_RV = _biased(scores_RV, tokens_RU, total_R, self.banned)
        is_short_R = (total_R < self.min_length) | (count < self.min_new_tokens)
        scores_RV = jnp.where(is_short_R[:, None] & _is_in(scores_RV, ends), -jnp.inf, scores_RV)
        if self.forced_bos_token_id:
            only_V = jnp.where(_is_in(scores_RV, self.forced_bos_token_id), 0.0, -jnp.inf)
            scores_RV = jnp.where(total_R[:, None] == 1, only_V, scores_RV)
        if self.forced_eos_token_id:
            only_V = jnp.where(_is_in(scores_RV, self.forced_eos_token_id), 0.0, -jnp.inf)
            scores_RV = jnp.where((count == most_R - 1)[:, None], only_V, scores_RV)
        scores_RV = jnp.where(_is_in(scores_RV, self.suppress_tokens), -jnp.inf, scores_RV)
        # A first token that is forced comes before the beginning.
        begins_R = count == jnp.where(length_R == 1, 1, 0) if self.forced_bos_token_id else jnp.broadcast_to(count == 0, length_R.shape)
        return jnp.where(begins_R[:, None] & _is_in(scores_RV, self.begin_suppress_tokens), -jnp.inf, scores_RV)

    def _repeats(self, scores_RV: Array, tokens_RU: Array, total_R: Array) -> Array:
        """Returns the tokens [R,V] with which the text would end in tokens that it has already, `no_repeat_ngram_size` of them."""
        size, windows = self.no_repeat_ngram_size, tokens_RU.shape[1] - self.no_repeat_ngram_size + 1
        if windows < 1:
            return jnp.zeros(scores_RV.shape, bool)
        is_same = jnp.arange(windows) + size <= total_R[:, None]
        for place in range(size - 1):
            last_R1 = jnp.take_along_axis(tokens_RU, jnp.maximum(total_R[:, None] - size + 1 + place, 0), axis=1)
            is_same &= tokens_RU[:, place : place + windows] == last_R1
        return _marked(scores_RV, tokens_RU[:, size - 1 :], is_same)


@dataclass(frozen=True)
class OfCheckpoint:
    """What the files of a checkpoint say of completions.

    `max_length` is of prompt and completion together, where `max_new_tokens` is not said. `settings` are applied to each completion,
    `beams` where nothing is drawn, `of_draws` (`top_k`, `top_p`, `min_p`) where something is.
    `lines` say so. `refused` names what dpx does not do, `refused_in_beams` also what it does not do in a beam search.
    """

    settings: Settings = Settings()
    beams: int = 1
    of_draws: Mapping[str, int | float] | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    lines: tuple[str, ...] = ()
    file: Path | None = None
    refused: tuple[str, ...] = ()
    refused_in_beams: tuple[str, ...] = ()

    def require_done(self, beams: int) -> None:
        """Raises `ConfigError` for settings that would change completions and that dpx does not have."""
        left = (*self.refused, *(self.refused_in_beams if beams > 1 else ()))
        reason = f"asks for {', '.join(left)}, which dpx does not do: transformers would complete in another way"
        require(not left, self.file, reason, "Remove it there, or complete with transformers")

    def facts(self) -> dict[str, Any]:
        """Returns the settings that are not at their defaults, by name."""
        return {name: value for name, value in vars(self.settings).items() if value != getattr(Settings(), name)}


def of_folder(folder: Path | None) -> OfCheckpoint:
    """Reads `generation_config.json`, or `config.json` without it, as transformers does. Raises `ConfigError` for a value that has no
    meaning."""
    file = next((place for name in (GENERATION, CONFIG) if folder is not None and (place := folder / name).is_file()), None)
    if file is None:
        return OfCheckpoint()
    told = {name: value for name, value in read_json(file, "Copy the file again").items() if value is not None}

    def number(name: str, usual: int | float, least: int | float, is_whole: bool = False) -> Any:
        value = told.get(name, usual)
        is_right = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool) and least <= value < math.inf
        require(is_right, file, f"has {name}={value}, which has no meaning", "Correct it, or remove it")
        return value

    whole = partial(number, is_whole=True)

    def tokens(name: str) -> tuple[int, ...]:
        value = told.get(name, [])
        ids = [value] if isinstance(value, int) else value
        _require_ids(file, name, ids)
        return tuple(ids)

    settings = Settings(
        bias=_sequences(file, "sequence_bias", told.get("sequence_bias")),
        repetition_penalty=number("repetition_penalty", 1.0, 1e-9),
        no_repeat_ngram_size=whole("no_repeat_ngram_size", 0, 0),
        banned=_sequences(file, "bad_words_ids", told.get("bad_words_ids")),
        min_length=0 if "min_new_tokens" in told else whole("min_length", 0, 0),
        min_new_tokens=whole("min_new_tokens", 0, 0),
        forced_bos_token_id=tokens("forced_bos_token_id"),
        forced_eos_token_id=tokens("forced_eos_token_id"),
        suppress_tokens=tokens("suppress_tokens"),
        begin_suppress_tokens=tokens("begin_suppress_tokens"),
    )
    of_draws = {
        "top_k": whole("top_k", 0, 0),
        "top_p": number("top_p", 1.0, 1e-9),
        "min_p": number("min_p", 0.0, 0.0),
    }
    most, longest = (whole(name, 1, 1) if name in told else None for name in ("max_new_tokens", "max_length"))
    longest = longest if most is None else None
    found = OfCheckpoint(settings, whole("num_beams", 1, 1), of_draws, most, longest, file=file)
    applied = [*found.facts(), *(["num_beams"] if found.beams > 1 else [])]
    applied += [name for name in ("max_new_tokens", "max_length") if getattr(found, name)]
    names = {"bias": "sequence_bias", "banned": "bad_words_ids"}
    lines = [f"{file.name}: applied {', '.join(names.get(name, name) for name in applied)}"] if applied else []
    # Names what differs from the value that changes nothing.
    differ = lambda usual: sorted(name for name in usual if name in told and told[name] not in (usual[name], False, 0))  # noqa: E731
    if left := differ(_OF_DRAWS):
        lines.append(
            f"{file.name}: says how to draw ({', '.join(left)}); dpx draws if generate.temperature is above 0, then by its {_IN_WORDS}"
        )
    return replace(found, lines=tuple(lines), refused=tuple(differ(_OTHERS)), refused_in_beams=tuple(differ(_OF_BEAMS)))


def without_ends(banned: _Sequences, ends: Sequence[int]) -> _Sequences:
    """Returns banned sequences without the tokens that end a text, as transformers does."""
    return tuple(one for one in banned if one[0] not in {(end,) for end in ends})


def _sequences(file: Path, name: str, value: Any) -> _Sequences:
    """Returns sequences of tokens with their biases: lists of ids, which are banned, or pairs of ids and a bias."""
    pairs = [] if value is None else value
    if name == "bad_words_ids" and isinstance(pairs, list):
        pairs = [[ids, -math.inf] for ids in pairs]
    is_listed = isinstance(pairs, list) and all(isinstance(one, list) and len(one) == 2 for one in pairs)
    require(is_listed, file, f"has {name}, which is not a list of sequences of token ids", "Correct it, or remove it")
    for ids, bias in pairs:
        _require_ids(file, name, ids)
        is_bias = len(ids) > 0 and isinstance(bias, int | float) and not math.isnan(bias)
        require(is_bias, file, f"has {name} with {ids}, {bias}", "Correct it, or remove it")
    return tuple((tuple(ids), float(bias)) for ids, bias in pairs)


def _require_ids(file: Path, name: str, ids: Any) -> None:
    are_ids = isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids)
    require(are_ids, file, f"has {name}={str(ids)[:60]}, which are not token ids", "Correct it, or remove it")


def _marked(scores_RV: Array, tokens: Array, is_so: Array) -> Array:
    """Returns which tokens [R,V] each row of `tokens` has where `is_so`."""
    rows_R1, none = jnp.arange(len(tokens))[:, None], scores_RV.shape[1]
    return jnp.zeros(scores_RV.shape, bool).at[rows_R1, jnp.where(is_so, tokens, none)].set(True, mode="drop")


def _is_in(scores_RV: Array, ids: tuple[int, ...]) -> Array:
    return jnp.isin(jnp.arange(scores_RV.shape[1]), jnp.asarray(ids, jnp.int32))


def _biased(scores_RV: Array, tokens_RU: Array, total_R: Array, sequences: _Sequences) -> Array:
    """Adds to the score of each sequence's last token its bias, where the text ends in the tokens before it."""
    for size in sorted({len(ids) for ids, _ in sequences}):
        of_size = [(ids, bias) for ids, bias in sequences if len(ids) == size]
        is_here_RS = jnp.broadcast_to(total_R[:, None] >= size - 1, (len(total_R), len(of_size)))
        for place in range(size - 1):
            at_R1 = jnp.maximum(total_R[:, None] - (size - 1) + place, 0)
            is_here_RS &= jnp.take_along_axis(tokens_RU, at_R1, axis=1) == jnp.array([ids[place] for ids, _ in of_size])
        bias_RS = jnp.where(is_here_RS, jnp.array([bias for _, bias in of_size]), 0.0)
        last_S = jnp.array([ids[-1] for ids, _ in of_size])
        scores_RV = scores_RV.at[:, last_S].add(bias_RS.astype(scores_RV.dtype))
    return scores_RV
