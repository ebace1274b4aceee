"""Masks: which, how many, replaced by what, and a function of the record alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.models.dropout import record_keys
from dpx.task.declared_task import MaskedLanguageModel
from dpx.task.mlm import mask, ordinary_id, special_ids
from tests.clipping.batches import SPECIAL, objective

V, T = 60, 128
KEY = jax.random.PRNGKey(5)


def rows(examples: int, seed: int = 0):
    drawn = np.random.default_rng(seed)
    length = drawn.integers(3, T + 1, examples).astype(np.int32)
    token = np.where(np.arange(T) < length[:, None], drawn.integers(5, V, (examples, T)), SPECIAL.pad_id)
    token[:, 0] = SPECIAL.cls_id
    token[np.arange(examples), length - 1] = SPECIAL.sep_id
    return token.astype(np.int32), length


def masked(task, token_BT, length_B, record_B):
    draw = jax.jit(lambda keys, token, length: mask(task, SPECIAL, V, keys, token, length))
    return draw(record_keys(KEY, jnp.asarray(record_B)), jnp.asarray(token_BT), jnp.asarray(length_B))


def test_number_and_place_of_slots():
    task = MaskedLanguageModel(next_sentence=False)
    token_BT, length_B = rows(300)
    found = masked(task, token_BT, length_B, np.arange(300))
    wanted_B = np.minimum(np.clip(np.round(0.15 * length_B), 1, 20), length_B - 2)
    np.testing.assert_array_equal(found.has_label_BM.sum(1), wanted_B)
    for b in range(300):
        slots = np.asarray(found.masked_position_BM[b])[np.asarray(found.has_label_BM[b])]
        assert len(set(slots)) == len(slots) and slots.min() > 0 and slots.max() < length_B[b] - 1
        np.testing.assert_array_equal(np.asarray(found.label_BM[b])[: len(slots)], token_BT[b, slots])
        untouched = np.setdiff1d(np.arange(T), slots)
        np.testing.assert_array_equal(np.asarray(found.token_BT[b])[untouched], token_BT[b, untouched])


def test_replacements_are_80_10_10_and_never_special():
    token_BT, length_B = rows(4000)
    found = masked(MaskedLanguageModel(next_sentence=False), token_BT, length_B, np.arange(4000))
    has_label = np.asarray(found.has_label_BM)
    shown = np.take_along_axis(np.asarray(found.token_BT), np.asarray(found.masked_position_BM), 1)[has_label]
    label = np.asarray(found.label_BM)[has_label]
    total = len(shown)
    assert np.mean(shown == SPECIAL.mask_id) == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / total))
    kept = 0.1 + 0.1 / (V - 5)
    assert np.mean(shown == label) == pytest.approx(kept, abs=4 * np.sqrt(kept / total))
    replaced = shown[(shown != SPECIAL.mask_id) & (shown != label)]
    assert not np.isin(replaced, special_ids(SPECIAL)).any() and set(replaced) == set(range(5, V))


def test_always_mask_hides_every_slot():
    token_BT, length_B = rows(50)
    found = masked(MaskedLanguageModel(next_sentence=False, masking="always_mask"), token_BT, length_B, np.arange(50))
    shown = np.take_along_axis(np.asarray(found.token_BT), np.asarray(found.masked_position_BM), 1)[np.asarray(found.has_label_BM)]
    assert np.all(shown == SPECIAL.mask_id)


def test_slots_are_uniform_over_ordinary_positions():
    token_BT, length_B = rows(1)
    token_BT, length_B = np.repeat(token_BT, 3000, 0), np.repeat(np.array([20], np.int32), 3000)
    token_BT[:, 5:] = 7
    found = masked(MaskedLanguageModel(next_sentence=False), token_BT, length_B, np.arange(3000))
    counts = np.bincount(np.asarray(found.masked_position_BM)[np.asarray(found.has_label_BM)], minlength=T)
    assert counts[1:20].min() > 0.8 * counts[1:20].mean() and counts[20:].sum() == 0


def test_masks_do_not_depend_on_the_batch():
    batch_of = jax.jit(objective().batch)
    token_BT, length_B = rows(6)
    token_BT = np.minimum(token_BT, 49)
    whole = {"tokens": token_BT, "length": length_B, "segment_start": length_B, "is_next": np.zeros(6, np.int32)}
    whole["record"] = np.arange(6, dtype=np.int32)
    chosen = np.array([4, 1])
    together = batch_of(KEY, whole)
    apart = batch_of(KEY, {name: value[chosen] for name, value in whole.items()})
    for name in together:
        np.testing.assert_array_equal(np.asarray(together[name])[chosen], apart[name])
    other = batch_of(jax.random.PRNGKey(6), whole)
    assert not np.array_equal(together["masked_positions"], other["masked_positions"])


def test_rows_without_a_word_or_without_a_token_have_no_slot():
    token_BT = np.full((2, 8), SPECIAL.pad_id, np.int32)
    token_BT[0, :3] = [SPECIAL.cls_id, SPECIAL.unk_id, SPECIAL.sep_id]
    found = masked(MaskedLanguageModel(next_sentence=False), token_BT, np.array([3, 0], np.int32), np.arange(2))
    assert not np.asarray(found.has_label_BM).any()
    np.testing.assert_array_equal(found.token_BT, token_BT)


def test_ordinary_ids_skip_specials_and_miss_nothing():
    specials = (0, 3, 4, 9)
    ids = np.asarray(ordinary_id(jnp.arange(16), specials))
    np.testing.assert_array_equal(ids, np.setdiff1d(np.arange(20), specials))
