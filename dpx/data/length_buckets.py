"""Pads texts to a few fixed lengths, so that short texts cost less than long ones.

The lengths do not change which examples are drawn, nor how each is clipped. The microbatch of an example depends on the lengths of all
examples: exact sums do not change by that, and proofs that need more are refused with it (`dpx.mechanism.declared_mechanism`). The number
of examples in each bucket depends on private rows, so it is never written.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from dpx.declaration import require

LengthBuckets = Sequence[int] | Literal["auto"] | None
# The shortest length of `auto`: below it, matrix products are too small to be faster.
_SHORTEST = 16


def widths_of(declared: LengthBuckets, sequence_length: int) -> tuple[int, ...]:
    """Returns the ascending lengths, with `sequence_length` last.

    Without declared lengths it is the only one; `auto` gives powers of two from 16 up. Raises `ConfigError` for lengths that are not
    ascending, too short for a marked text, or longer than a row.
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
    """Returns each width that some of n examples need, the widest first, with the positions of these examples in the given order.

    `longest_n` is the number of tokens of each example's longest text, none above the last width.
    """
    bucket_n = np.searchsorted(np.asarray(widths), longest_n)
    for bucket in reversed(range(len(widths))):
        places = np.flatnonzero(bucket_n == bucket)
        if len(places):
            yield widths[bucket], places


def in_batches(longest_n: np.ndarray, widths: Sequence[int], size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Returns, for each width of `by_width`, batches of `size` positions with a mask of the padding.

    The last batch is filled up with its last position, so that every width has one compiled program.
    """
    for width, places in by_width(longest_n, widths):
        for start in range(0, len(places), size):
            numbers = np.arange(start, start + size)
            yield width, places[np.minimum(numbers, len(places) - 1)], numbers >= len(places)
