import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpx.data.unit_names import SPLITS, KeyedHash


def test_splits_have_the_declared_shares():
    keyed = KeyedHash("salt")
    splits = [keyed.split(f"unit {number}", public_fraction=0.1, heldout_fraction=0.2) for number in range(20_000)]
    shares = [splits.count(split) / len(splits) for split in SPLITS]
    np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=0.01)


def test_another_salt_splits_otherwise():
    def split(salt: str) -> list[str]:
        return [KeyedHash(salt).split(str(number), public_fraction=0.3, heldout_fraction=0.3) for number in range(100)]

    assert split("one") == split("one") != split("two")


def test_these_units_stay_in_their_splits():
    """A store prepared elsewhere, or by a later version, must hold out the same units."""
    keyed = KeyedHash("dpx")
    places = [round(keyed.fraction("split", unit), 6) for unit in ("a", "b", "c")]
    assert places == [0.613003, 0.793857, 0.018501]
    assert keyed.draws("rows", "a").random() == keyed.draws("rows", "a").random() != keyed.draws("rows", "b").random()


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
def test_parts_do_not_run_into_each_other(first: list[str], second: list[str]):
    keyed = KeyedHash("dpx")
    assert (keyed.number("p", *first) == keyed.number("p", *second)) == (first == second)
