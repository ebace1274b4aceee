import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpx.data.pairs import one_cut, paired_rows, single_rows

DOCUMENTS = st.lists(st.integers(1, 40), min_size=0, max_size=30)
ROOM = 29


def numbered(lengths: list[int], start: int = 0) -> list[list[int]]:
    """Sentences whose tokens count upwards, so that what follows what can be read off."""
    ends = np.cumsum([start, *lengths])
    return [list(range(first, last)) for first, last in zip(ends[:-1], ends[1:], strict=True)]


def pair(lengths: list[int], seed: int, donor: list[list[int]] | None = None):
    return paired_rows(numbered(lengths), room=ROOM, short_sequence_rate=0.1, draws=random.Random(seed), donor=donor or ())


def is_run(tokens: list[int]) -> bool:
    return tokens == list(range(tokens[0], tokens[0] + len(tokens)))


@given(DOCUMENTS, st.integers(0, 100))
def test_a_pair_is_two_runs_of_the_document_that_do_not_overlap(lengths: list[int], seed: int):
    for row in pair(lengths, seed):
        assert row.first and row.second and len(row.first) + len(row.second) <= ROOM
        assert is_run(row.first) and is_run(row.second)
        assert not set(row.first) & set(row.second)
        assert not row.is_next or row.second[0] > row.first[-1]


@given(DOCUMENTS, st.integers(0, 100))
def test_the_true_second_segment_starts_within_the_chunk_and_the_false_one_does_not_follow(lengths: list[int], seed: int):
    starts = {sentence[0] for sentence in numbered(lengths)}
    for row in pair(lengths, seed):
        follows = row.second[0] == row.first[-1] + 1
        # A trimmed pair may lose tokens at the seam, but a false one never has the true start right behind its first segment.
        assert row.is_next or not (follows and row.second[0] in starts)


def test_half_of_the_pairs_are_false():
    rows = [row for seed in range(60) for row in pair([7] * 120, seed)]
    assert abs(np.mean([row.is_next for row in rows]) - 0.5) < 3 * 0.5 / np.sqrt(len(rows))
    assert abs(np.mean([len(row.first) + len(row.second) < ROOM - 7 for row in rows]) - 0.08) < 0.05


def test_a_document_with_no_elsewhere_swaps_its_segments():
    rows = [row for seed in range(40) for row in pair([6, 6], seed) if len(row.first) + len(row.second) == 12]
    assert {(row.is_next, row.first[0] < row.second[0]) for row in rows} == {(True, True), (False, False)}


def test_one_sentence_is_cut_in_two():
    rows = [row for seed in range(40) for row in pair([20], seed) if len(row.first) + len(row.second) == 20]
    assert rows and {row.is_next for row in rows} == {True, False}
    assert all((row.second[0] == row.first[-1] + 1) == row.is_next for row in rows)


@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [3]])
def test_too_little_text_gives_no_row(lengths: list[int]):
    assert pair(lengths, 0) == []


def test_a_donor_gives_the_false_segments():
    donor = numbered([5] * 20, start=1000)
    rows = [row for seed in range(20) for row in pair([6] * 40, seed, donor)]
    assert all(min(row.second) >= 1000 and max(row.first) < 1000 for row in rows if not row.is_next)
    assert all(max(row.second) < 1000 for row in rows if row.is_next)


def test_a_false_pair_gives_back_what_it_did_not_use():
    rows = [row for row in pair([6] * 200, 3) if len(row.first) + len(row.second) >= ROOM - 5]
    seen = sorted({token for row in rows for token in row.first})
    assert len(seen) > 0.5 * 1200 and len(rows) > 1200 / ROOM


@given(DOCUMENTS, st.integers(0, 100))
def test_the_tokens_that_no_row_holds_in_their_place_are_counted(lengths: list[int], seed: int):
    rows = pair(lengths, seed, numbered([5] * 20, start=1000_000))
    held = [token for row in rows for token in (*row.first, *row.second) if token < 1000_000]
    assert len(held) == len(set(held)) and (not rows or sum(row.cut for row in rows) == sum(lengths) - len(held))
    own = pair(lengths, seed)
    missing = sum(lengths) - len({token for row in own for token in (*row.first, *row.second)})
    assert not own or missing <= sum(row.cut for row in own) <= sum(lengths)
    single = single_rows(numbered(lengths), room=ROOM, short_sequence_rate=0.1, draws=random.Random(seed))
    assert not single or sum(row.cut for row in single) == sum(lengths) - sum(len(row.first) for row in single)


def test_single_segments_hold_every_token_once():
    rows = single_rows(numbered([11] * 30), room=ROOM, short_sequence_rate=0.1, draws=random.Random(0))
    assert [token for row in rows for token in row.first] == list(range(330))[: sum(len(row.first) for row in rows)]
    assert 330 - sum(len(row.first) for row in rows) < 4
    assert all(row.second == [] and not row.is_next and len(row.first) <= ROOM for row in rows)


@given(DOCUMENTS, st.integers(0, 100), st.booleans())
def test_one_cut_is_one_row_of_the_document_from_a_random_sentence(lengths: list[int], seed: int, is_paired: bool):
    sentences = numbered(lengths)
    cut = lambda: one_cut(sentences, room=ROOM, short_sequence_rate=0.1, draws=random.Random(seed), is_paired=is_paired)  # noqa: E731
    rows = cut()
    assert rows == cut() and len(rows) <= 1
    assert is_paired or len(rows) == (sum(lengths) >= 4)
    for row in rows:
        assert is_run(row.first) and bool(row.second) == is_paired
        assert not set(row.first) & set(row.second)


def test_cuts_begin_at_every_sentence():
    sentences = numbered([8] * 20)
    cuts = [one_cut(sentences, room=ROOM, short_sequence_rate=0.0, draws=random.Random(seed), is_paired=False) for seed in range(200)]
    assert {rows[0].first[0] for rows in cuts} == {sentence[0] for sentence in sentences}
