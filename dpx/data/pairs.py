"""Cuts a document into rows: segment pairs as in BERT's pre-training data (Devlin et al. 2019, A.2).

BERT draws the false second segment from any document of the corpus. Here it comes from elsewhere in the same document, so the rows of a
document depend on that document and its draws alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

Tokens = list[int]
LEAST_TOKENS = 4  # a row with fewer words has nothing to predict from


@dataclass(frozen=True, slots=True)
class Row:
    """Holds token ids without marks; `second` is empty if rows hold one segment.

    `cut` is the number of tokens of the document beside it that no row holds in their place.
    """

    first: Tokens
    second: Tokens
    is_next: bool
    cut: int = 0


def single_rows(sentences: Sequence[Tokens], *, room: int, short_sequence_rate: float, draws: random.Random, copies: int = 0) -> list[Row]:
    """Returns windows of `room` tokens of the document, some of them shorter; no token is left out except a short rest at the end.

    Each is followed by so many `copies` of it.
    """
    tokens = list(chain(*sentences))
    rows = []
    start = 0
    while len(tokens) - start >= LEAST_TOKENS:
        target = _target(room, short_sequence_rate, draws)
        rows += [Row(tokens[start : start + target], [], False)] * (1 + copies)
        start += target
    return _with_rest(rows, max(0, len(tokens) - start))


def _with_rest(rows: list[Row], rest: int) -> list[Row]:
    """Returns the rows, the last with `rest` more tokens that were cut."""
    return [*rows[:-1], replace(rows[-1], cut=rows[-1].cut + rest)] if rows and rest else rows


def paired_rows(
    sentences: Sequence[Tokens],
    *,
    room: int,
    short_sequence_rate: float,
    draws: random.Random,
    donor: Sequence[Tokens] = (),
    copies: Sequence[random.Random] = (),
) -> list[Row]:
    """Returns pairs of segments with at most `room` tokens together, half of them false.

    The second segment of a false pair comes from `donor` if there is one, else from elsewhere in this document; if the document has no
    other part, the true pair is swapped. Sentences that a false pair did not use start the next row. A row is followed by one more of the
    same passage for each of `copies`, which pairs and trims it by its own draws.
    """
    sentences = _fitting(sentences, room)
    rows: list[Row] = []
    start, cut = 0, 0
    while start < len(sentences):
        target = _target(room, short_sequence_rate, draws)
        end, length = start, 0
        while end < len(sentences) and (end == start or length < target):
            length += len(sentences[end])
            end += 1
        began = start
        row, start, is_own = _pair(sentences, start, end, target, draws, donor)
        cut += sum(map(len, sentences[began:start]))
        if _is_whole(row):
            # A false second segment is text of another place, which has its own row.
            rows.append(replace(row, cut=cut - len(row.first) - (len(row.second) if is_own else 0)))
            cut = 0
            again = [_pair(sentences, began, end, target, own, donor)[0] for own in copies]
            rows += filter(_is_whole, again)
    return _with_rest(rows, cut)


def _is_whole(row: Row) -> bool:
    return bool(row.first and row.second) and len(row.first) + len(row.second) >= LEAST_TOKENS


def one_cut(
    sentences: Sequence[Tokens],
    *,
    room: int,
    short_sequence_rate: float,
    draws: random.Random,
    is_paired: bool,
    donor: Sequence[Tokens] = (),
) -> list[Row]:
    """One row that begins at a random sentence; at the first one if too little follows, and none if the document has too few tokens.

    A false pair's second segment comes from `donor` where one is given, else from before the row, or from where `paired_rows` takes it.
    """
    sentences = _fitting(sentences, room)
    for start in (_below(len(sentences), draws), 0):
        tail = sentences[start:]
        if not is_paired:
            rows = single_rows(tail, room=room, short_sequence_rate=short_sequence_rate, draws=draws)
        else:
            rows = paired_rows(tail, room=room, short_sequence_rate=short_sequence_rate, draws=draws, donor=donor or sentences[:start])
        if rows:
            return rows[:1]
    return []


def _pair(
    sentences: Sequence[Tokens], start: int, end: int, target: int, draws: random.Random, donor: Sequence[Tokens]
) -> tuple[Row, int, bool]:
    """Returns a row from sentences `start` to `end`, the sentence at which the next row starts, and whether both segments are of these."""
    if end - start == 1:
        whole = sentences[start]
        cut = _below(len(whole) - 1, draws) + 1
        first, true_second = whole[:cut], whole[cut:]
        middle, elsewhere = end, 0  # a false pair of whole sentences would reveal where it was cut, so these are only swapped
    else:
        middle = start + 1 + _below(end - start - 1, draws)
        first, true_second = list(chain(*sentences[start:middle])), list(chain(*sentences[middle:end]))
        elsewhere = start + len(sentences) - middle - 1  # sentences neither in the first segment nor truly next
    is_next = draws.random() < 0.5
    if is_next:
        return Row(*_trimmed(first, true_second, target, draws), True), end, True
    wanted = max(1, target - len(first))
    if donor:
        second = _collected(donor, _below(len(donor), draws), len(donor), wanted)
        return Row(*_trimmed(first, second, target, draws), False), middle, False
    if elsewhere:
        choice = _below(elsewhere, draws)
        second = _collected(sentences, choice, start, wanted) if choice < start else ()
        second = second or _collected(sentences, choice - start + middle + 1, len(sentences), wanted)
        return Row(*_trimmed(first, second, target, draws), False), middle, False
    return Row(*_trimmed(true_second, first, target, draws), False), end, True


def _collected(sentences: Sequence[Tokens], start: int, end: int, wanted: int) -> Tokens:
    tokens: Tokens = []
    while start < end and len(tokens) < wanted:
        tokens += sentences[start]
        start += 1
    return tokens


def _fitting(sentences: Sequence[Tokens], room: int) -> list[Tokens]:
    """Returns sentences that fit a row. A sentence longer than a row is cut into parts of half a row: trimming would lose text after the
    first row."""
    half = max(2, room // 2)
    fitting: list[Tokens] = []
    for sentence in sentences:
        if len(sentence) <= room:
            fitting.append(sentence)
        else:
            fitting += [sentence[start : start + half] for start in range(0, len(sentence), half)]
    return [sentence for sentence in fitting if sentence]


def _trimmed(first: Tokens, second: Tokens, room: int, draws: random.Random) -> tuple[Tokens, Tokens]:
    """Returns both segments cut to `room` tokens together, the longer one first; the cut is divided at random between front and back."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    longer, shorter = max(len(first), len(second)), min(len(first), len(second))
    from_longer = min(excess, longer - shorter)
    from_longer += (excess - from_longer + 1) // 2
    cuts = (from_longer, excess - from_longer) if len(first) >= len(second) else (excess - from_longer, from_longer)
    return _cut(first, cuts[0], draws), _cut(second, cuts[1], draws)


def _cut(tokens: Tokens, count: int, draws: random.Random) -> Tokens:
    front = _below(count + 1, draws)
    return tokens[front : len(tokens) - (count - front)]


def _target(room: int, short_sequence_rate: float, draws: random.Random) -> int:
    is_short = draws.random() < short_sequence_rate
    return LEAST_TOKENS + _below(room - LEAST_TOKENS + 1, draws) if is_short else room


def _below(count: int, draws: random.Random) -> int:
    """Returns a whole number in [0, count); 0 if `count` is 0."""
    return int(draws.random() * count)
