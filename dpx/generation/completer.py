"""Completes prompts in batches of one size, in order, padded to a few lengths, so that few programs are compiled."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece

from dpx.data.length_buckets import widths_of
from dpx.declaration import require
from dpx.generation.decoding import Decoding, Rule
from dpx.generation.prompts import Prompt, Style
from dpx.generation.weights import Weights


def completed(
    weights: Weights, style: Style, rule: Rule, prompts: Sequence[Prompt], batch_size: int, seed: int, first: int
) -> Iterator[list[dict[str, Any]]]:
    """Yields the lines of one batch of prompts after another, from prompt `first` on.

    Batches begin at multiples of `batch_size`, wherever the first is, so that a restart computes the same. What is drawn for a prompt
    depends on `seed` and the prompt's row alone.
    """
    if first == len(prompts):
        return
    decoding, params = Decoding(weights.model, weights.vocabulary_size, rule), weights.load()
    tokenizer = weights.tokenizer.tokenizer
    widths, key = np.array(widths_of("auto", weights.model.positions)), jax.random.key(seed)
    keys_of = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
    for start in range(first // batch_size * batch_size, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        # The last batch is filled up with its last prompt.
        filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]
        length_B = np.array([len(one.ids) for one in filled], np.int32)
        tokens_BW = np.full((batch_size, widths[np.searchsorted(widths, length_B.max())]), weights.tokenizer.special.pad_id, np.int32)
        for row, one in zip(tokens_BW, filled, strict=True):
            row[: len(one.ids)] = one.ids
        keys_B = keys_of(key, np.array([one.row for one in filled], np.uint32))
        done = jax.device_get(decoding.complete(params, tokens_BW, length_B, keys_B))
        lines = []
        for prompt, ids, count, score, is_ended in zip(batch, *(one[: len(batch)] for one in done), strict=True):
            text = text_of(tokenizer, ids[: count - is_ended].tolist())
            is_number, fix = bool(np.isfinite(score)), "Use other weights, or train again at a lower learning rate"
            require(is_number, f"row {prompt.row}", "the model's probabilities are not numbers", fix)
            reason = "stop" if is_ended else "length"
            about = {"row": prompt.row, "prompt": prompt.text, "completion": style.completion(text), "finish_reason": reason}
            lines.append(about | {"tokens": int(count), "log_probability": round(float(score), 4)})
        yield lines[max(0, first - start) :]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of tokens that follow a prompt, without special tokens.

    Decoders write a piece inside a word with its mark (`##ing`) where no token is before it. Here the prompt is, so the mark is left out.
    """
    if not isinstance(tokenizer.model, WordPiece):
        return tokenizer.decode(ids, skip_special_tokens=True)
    if tokenizer.decoder is None:
        tokenizer.decoder = decoders.WordPiece(cleanup=False)  # type: ignore[assignment]
    return tokenizer.decode(ids, skip_special_tokens=True).removeprefix(tokenizer.model.continuing_subword_prefix)
