"""Measures how much of one corpus's protected text is in another corpus: evidence against a user's assertion that they share nothing.

Equal text shows that two corpora share something. Its absence shows nothing, since text may be cut, spelt or labelled differently. So no
result makes a claim stronger. A row counts as found if one of its texts, whatever its length, is a text of the other corpus, or if a
sequence of `WINDOW` tokens is in both. Labels are not compared. Both corpora must have one vocabulary, and rows of tokens.

Shape legend: N rows, T positions, S texts between marks, W windows of a text.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int, UInt64

from dpx.data.store import Store
from dpx.data.unit_names import Split

WINDOW = 16
_TOKENS_AT_ONCE = 1 << 20
# For larger corpora only a share of all texts and windows is compared, the same ones in both: chosen by their content.
_HASHES_MAX = 1 << 24
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)

# What was counted, by the checksums of both stores: every point of a sweep asks for the same.
_counted: dict[tuple[str, str], dict[str, int]] = {}

# Numbers of rows, within a split, and the hash of one of their texts or windows.
Hashed = tuple[Int[np.ndarray, " n"], UInt64[np.ndarray, " n"]]


def are_comparable(one: Store, other: Store) -> bool:
    """Returns whether the rows of both stores are tokens of one vocabulary."""
    known = [store.manifest for store in (one, other)]
    return one.manifest.vocabulary_checksum == other.manifest.vocabulary_checksum and all("tokens" in each.schema for each in known)


def found_rows(own: Store, other: Store) -> dict[str, int]:
    """Counts the protected rows of `own` whose text is in each split of `other`, and under `any` in at least one split.

    Raises `ValueError` if they cannot be compared.
    """
    if not are_comparable(own, other):
        raise ValueError("only tokens of one vocabulary can be compared")
    asked = own.manifest.checksum, other.manifest.checksum
    if asked not in _counted:
        _counted[asked] = _count(own, other)
    return dict(_counted[asked])


def _count(own: Store, other: Store) -> dict[str, int]:
    """Returns the same, computed."""
    parts = [(own.manifest, "protected"), *((other.manifest, split) for split in other.manifest.splits)]
    tokens = max(known.rows[split] * known.sequence_length for known, split in parts)
    every = np.uint64(1 << max(0, (tokens // _HASHES_MAX).bit_length()))
    found: dict[str, Bool[np.ndarray, " N"]] = {}
    for split in other.manifest.splits:
        known = np.unique(np.concatenate([np.zeros(0, np.uint64), *(hash_n for _, hash_n in _hashed(other, split, every))]))
        found[split] = np.zeros(own.manifest.rows["protected"], bool)
        for row_n, hash_n in _hashed(own, "protected", every):
            found[split][row_n[np.isin(hash_n, known)]] = True
    everywhere = np.any(list(found.values()), axis=0)
    return {split: int(is_found_N.sum()) for split, is_found_N in found.items()} | {"any": int(everywhere.sum())}


def _hashed(store: Store, split: Split, every: np.uint64) -> Iterator[Hashed]:
    """Returns the hashes of all texts and windows of a split, a block of rows at a time; with `every`, only every `every`-th value."""
    known = store.manifest
    marks = [known.pad_id, known.cls_id, known.sep_id]
    at_once = max(1, _TOKENS_AT_ONCE // known.sequence_length)
    for start in range(0, known.rows[split], at_once):
        tokens_NT = store.rows(split, np.arange(start, min(start + at_once, known.rows[split])))["tokens"]
        # Each of several texts in a row is a text of this row.
        row_N = np.repeat(np.arange(start, start + len(tokens_NT)), int(np.prod(tokens_NT.shape[1:-1])))
        tokens_NT = tokens_NT.reshape(-1, tokens_NT.shape[-1])
        is_mark_NT, words_NT = np.isin(tokens_NT, marks), tokens_NT.astype(np.uint64) + np.uint64(1)
        for row_n, hash_n in (_texts(row_N, words_NT, is_mark_NT), _windows(row_N, words_NT, is_mark_NT)):
            kept_n = hash_n % every == 0
            yield row_n[kept_n], hash_n[kept_n]


def _texts(row_N: np.ndarray, words_NT: np.ndarray, is_mark_NT: np.ndarray) -> Hashed:
    """Returns a hash of every whole text between two marks, from its tokens and their positions."""
    count, positions = words_NT.shape
    last_mark_NT = np.maximum.accumulate(np.where(is_mark_NT, np.arange(positions), -1), axis=1)
    place_NT = (np.arange(positions) - last_mark_NT).astype(np.uint64)
    mixed_NT = np.where(is_mark_NT, np.uint64(0), _mixed((words_NT * _MULTIPLIER) ^ _mixed(place_NT * _MIX)))
    text_NT = np.cumsum(is_mark_NT, axis=1)
    hash_NS, is_text_NS = np.zeros((count, positions + 1), np.uint64), np.zeros((count, positions + 1), bool)
    rows_NT = np.broadcast_to(np.arange(count)[:, None], text_NT.shape)
    np.add.at(hash_NS, (rows_NT, text_NT), mixed_NT)
    is_text_NS[rows_NT[~is_mark_NT], text_NT[~is_mark_NT]] = True
    return np.broadcast_to(row_N[:, None], hash_NS.shape)[is_text_NS], _mixed(hash_NS[is_text_NS])


def _windows(row_N: np.ndarray, words_NT: np.ndarray, is_mark_NT: np.ndarray) -> Hashed:
    """Returns a hash of every sequence of `WINDOW` tokens that holds no mark."""
    places = max(0, words_NT.shape[1] - WINDOW + 1)
    hash_NW, is_text_NW = np.zeros((len(words_NT), places), np.uint64), np.ones((len(words_NT), places), bool)
    for offset in range(WINDOW if places else 0):
        hash_NW = hash_NW * _MULTIPLIER + words_NT[:, offset : offset + places]
        is_text_NW &= ~is_mark_NT[:, offset : offset + places]
    return np.broadcast_to(row_N[:, None], hash_NW.shape)[is_text_NW], _mixed(hash_NW[is_text_NW])


def _mixed(hashes: np.ndarray) -> np.ndarray:
    return (hashes ^ (hashes >> np.uint64(29))) * _MIX >> np.uint64(1)
