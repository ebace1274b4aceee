"""The few fixed lengths that texts are padded to, so that short ones do not pay for long ones.

Which examples are drawn, and how each is clipped, does not depend on them. In which microbatch an example lies follows from the lengths of
all: exact sums do not change by that, and proofs that need more are refused beside it (`dpx.mechanism.places`). How many examples fall in
which bucket follows from private rows: it is written down nowhere.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from dpx.declaration import require

LengthBuckets = Sequence[int] | Literal["auto"] | None
# Of `auto`: below it a product is too small to gain by.
_SHORTEST = 16


def widths_of(declared: LengthBuckets, sequence_length: int) -> tuple[int, ...]:
    """Ascending lengths, `sequence_length` last; that alone where none are declared, powers of two from 16 up for `auto`.

    Raises `ConfigError` for lengths that are not ascending, too short for a marked text, or longer than a row.
    """
    if declared is None:
        return (sequence_length,)
    if declared == "auto":
        powers = (1 << power for power in range(_SHORTEST.bit_length() - 1, sequence_length.bit_length()))
        return (*(width for width in powers if width < sequence_length), sequence_length)
    value = f"length_buckets={list(declared)}"
    require(
        list(declared) == sorted(set(declared)),
        value,
        "the lengths are not in ascending order",
        "Give each length once, the shortest first",
    )
    require(min(declared, default=8) >= 8, value, "is too short for a text with its special tokens", "Use 8 or more")
    reason = f"no text is longer than data.sequence_length={sequence_length}"
    require(max(declared, default=8) <= sequence_length, value, reason, f"Use {sequence_length} or less")
    return (*(width for width in declared if width < sequence_length), sequence_length)


def by_width(longest_n: np.ndarray, widths: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Each width that some of n examples need, the widest first, with their places in the order given.

    `longest_n`: tokens of each example's longest text, none above the last width.
    """
    bucket_n = np.searchsorted(np.asarray(widths), longest_n)
    for bucket in reversed(range(len(widths))):
        places = np.flatnonzero(bucket_n == bucket)
        if len(places):
            yield widths[bucket], places


def in_batches(longest_n: np.ndarray, widths: Sequence[int], size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each width (`by_width`) batches of `size` places, with where they are padding: the last is filled up with its last place, so that
    every width has one compiled program."""
    for width, places in by_width(longest_n, widths):
        for start in range(0, len(places), size):
            numbers = np.arange(start, start + size)
            yield width, places[np.minimum(numbers, len(places) - 1)], numbers >= len(places)
