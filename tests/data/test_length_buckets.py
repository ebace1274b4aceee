"""The length that a text is padded to: each example once, in the narrowest bucket that fits; one width is as without buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpx.data.length_buckets import by_width, widths_of
from dpx.declaration import ConfigError


@pytest.mark.parametrize(
    ("declared", "widths"),
    [(None, (100,)), ("auto", (16, 32, 64, 100)), ([8, 30], (8, 30, 100)), ([30, 100], (30, 100)), ([], (100,))],
)
def test_the_longest_is_always_a_whole_row(declared, widths):
    assert widths_of(declared, 100) == widths


def test_powers_of_two_end_with_the_row_itself():
    assert widths_of("auto", 64) == (16, 32, 64) and widths_of("auto", 16) == (16,) and widths_of("auto", 10) == (10,)


@pytest.mark.parametrize(
    ("declared", "fix"), [([30, 8], "the shortest first"), ([8, 8], "once"), ([4, 8], "Use 8 or more"), ([8, 200], "Use 100 or less")]
)
def test_lengths_that_cannot_stand_are_refused(declared, fix):
    with pytest.raises(ConfigError, match=rf"^length_buckets=.*{fix}"):
        widths_of(declared, 100)


@given(st.lists(st.integers(1, 100), max_size=60), st.sampled_from([(100,), (8, 100), (8, 30, 64, 100)]))
def test_every_example_comes_once_in_the_narrowest_that_holds_it(longest, widths):
    found = list(by_width(np.array(longest, np.int64), widths))
    assert sorted(place for _, places in found for place in places) == list(range(len(longest)))
    assert [width for width, _ in found] == sorted({width for width, _ in found}, reverse=True)
    for width, places in found:
        narrower = max((one for one in widths if one < width), default=0)
        assert all(narrower < longest[place] <= width for place in places)
        assert list(places) == sorted(places)
