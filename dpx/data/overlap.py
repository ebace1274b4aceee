"""Whether two prepared corpora share text. Says "no" only where nothing shows that they do.

Units of one name are the same text (a unit without a name is named by its content). Text that was cut or named otherwise is found by its
tokens: any run of `WINDOW` tokens within a segment that is in both. Passages that many documents quote count too: sharing is the safe
answer. Both must have one vocabulary, and rows of tokens.

Shape legend: N rows, T positions, W tokens of a window.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt64

from dpx.data.keyed import Split
from dpx.data.store import Store

WINDOW = 16
_TOKENS_AT_ONCE = 1 << 20
# Of larger corpora a share of the windows is compared, the same ones in both: chosen by what they hold.
_WINDOWS_MAX = 1 << 24
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def are_comparable(one: Store, other: Store) -> bool:
    """Whether rows of both are tokens of one vocabulary."""
    known = [store.manifest for store in (one, other)]
    return one.manifest.vocabulary_checksum == other.manifest.vocabulary_checksum and all("tokens" in each.schema for each in known)


def share_text(one: Store, other: Store, split: Split = "protected", other_split: Split = "protected") -> bool:
    """Whether a unit or a window of tokens is in `split` of one and in `other_split` of the other. Raises `ValueError` where they cannot be
    compared."""
    if not are_comparable(one, other):
        raise ValueError("only tokens of one vocabulary can be compared")
    if not set(one.unit_ids(split)).isdisjoint(other.unit_ids(other_split)):
        return True
    length = max(2, min(WINDOW, min(one.manifest.sequence_length, other.manifest.sequence_length) // 2))
    tokens = max(_tokens(one, split), _tokens(other, other_split))
    every = np.uint64(1 << max(0, (tokens // _WINDOWS_MAX).bit_length()))
    windows, others = _windows(one, split, length, every), _windows(other, other_split, length, every)
    return bool(np.intersect1d(windows, others, assume_unique=True).size)


def _tokens(store: Store, split: Split) -> int:
    return store.manifest.rows[split] * store.manifest.sequence_length


def _windows(store: Store, split: Split, length: int, every: np.uint64) -> UInt64[np.ndarray, " n"]:
    sampled = [part[part % every == 0] for part in _hashed(store, split, length)]
    return np.unique(np.concatenate(sampled)) if sampled else np.zeros(0, np.uint64)


def _hashed(store: Store, split: Split, length: int) -> Iterator[UInt64[np.ndarray, " n"]]:
    """A hash of every window of `length` tokens that holds text alone."""
    known = store.manifest
    marks = [known.pad_id, known.cls_id, known.sep_id]
    at_once = max(1, _TOKENS_AT_ONCE // known.sequence_length)
    for start in range(0, known.rows[split], at_once):
        tokens_NT = store.rows(split, np.arange(start, min(start + at_once, known.rows[split])))["tokens"]
        # Of several texts in a row each is a text.
        tokens_NT = tokens_NT.reshape(-1, tokens_NT.shape[-1])
        places = tokens_NT.shape[1] - length + 1
        hash_NW, is_text_NW = np.zeros((len(tokens_NT), places), np.uint64), np.ones((len(tokens_NT), places), bool)
        is_mark_NT, words_NT = np.isin(tokens_NT, marks), tokens_NT.astype(np.uint64) + np.uint64(1)
        for offset in range(length):
            hash_NW = hash_NW * _MULTIPLIER + words_NT[:, offset : offset + places]
            is_text_NW &= ~is_mark_NT[:, offset : offset + places]
        text = hash_NW[is_text_NW]
        yield (text ^ (text >> np.uint64(29))) * _MIX >> np.uint64(1)
