"""The exact sampler: its law by chi-square, at narrow and wide deviations, and the decisions that floats cannot make."""

from decimal import Decimal, getcontext
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from dpx.mechanism import discrete_gaussian as discrete_gaussian_module
from dpx.mechanism.discrete_gaussian import _below_exp, _exactly_below, _geometric, _uniform, discrete_gaussian
from dpx.randomness import BitStream, RootSecret

SECRET = RootSecret.from_seed(21)


class Given(BitStream):
    """A stream of words that are known."""

    def __init__(self, words: list[int]):
        super().__init__(b"")
        self.given = words

    def words(self, count: int) -> np.ndarray:
        return np.asarray(self.given[:count], np.uint64)


def law(deviation: float, largest: int) -> np.ndarray:
    k = np.arange(-largest, largest + 1)
    weights = np.exp(-np.square(k) / (2 * deviation**2))
    return weights / weights.sum()


@pytest.mark.parametrize("deviation", [Fraction(1, 3), Fraction(1), Fraction(7, 2), Fraction(40)])
def test_draws_follow_the_law(deviation):
    values = discrete_gaussian(SECRET.stream("law", str(deviation)), deviation, 100_000)
    largest = int(12 * deviation) + 2
    expected = law(float(deviation), largest) * len(values)
    counts = np.bincount(values + largest, minlength=2 * largest + 1)
    assert len(counts) == len(expected)
    many = expected >= 20
    observed, wanted = np.append(counts[many], counts[~many].sum()), np.append(expected[many], expected[~many].sum())
    keep = wanted > 0.5
    statistic = np.sum(np.square(observed - wanted)[keep] / wanted[keep])
    assert scipy.stats.chi2.sf(statistic, keep.sum() - 1) > 1e-5


def test_a_wide_one_looks_like_a_gaussian_of_its_deviation():
    deviation = Fraction(3 * 2**18, 7)
    values = discrete_gaussian(SECRET.stream("wide"), deviation, 100_000) / float(deviation)
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-4
    assert np.mean(values**2) == pytest.approx(1, abs=5 * np.sqrt(2 / 100_000))


def test_same_stream_same_draws():
    first, again, other = (discrete_gaussian(SECRET.stream("s", part), Fraction(9), 50) for part in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_words_beyond_the_last_whole_multiple_are_dropped():
    # 2^64 is three times 5 << 60 plus 1 << 60: keeping this remainder would make low values more likely.
    words = Given([0, 1, 2, (15 << 60) - 1, 15 << 60, (1 << 64) - 1])
    low, is_negative = _uniform(words, 5 << 59, 6)
    assert low.tolist() == [0, 0, 1, (5 << 59) - 1] and is_negative.tolist() == [False, True, False, True]
    # A power of two drops none.
    assert len(_uniform(words, 1 << 20, 6)[0]) == 6


def test_no_uniform_number_lies_above_exp_of_zero():
    assert _below_exp(Given(3 * [(1 << 64) - 1]), np.zeros(3), lambda at: Fraction(0)).all()


def test_the_geometric_part():
    values = _geometric(SECRET.stream("geometric"), 50_000)
    assert np.mean(values) == pytest.approx(1 / (np.e - 1), rel=0.03)


def test_decisions_too_close_for_floats_are_made_exactly(monkeypatch):
    # With a margin of one half nearly everything is decided by exact arithmetic, and decided the same way.
    exponents = np.linspace(0.01, 3, 300)
    clear = _below_exp(SECRET.stream("close"), exponents, lambda at: pytest.fail("floats decide this"))
    monkeypatch.setattr(discrete_gaussian_module, "MARGIN", 0.5)
    assert np.array_equal(clear, _below_exp(SECRET.stream("close"), exponents, lambda at: Fraction(float(exponents[at]))))


def test_a_tie_in_the_first_64_bits_draws_more():
    getcontext().prec = 60
    tie = int(Decimal(-1).exp() * 2**64)
    stream = SECRET.stream("tie")
    assert _exactly_below(stream, tie - 1, Fraction(1)) and not _exactly_below(stream, tie + 1, Fraction(1))
    rest = float(Decimal(-1).exp() * 2**64 - tie)
    decided = [_exactly_below(SECRET.stream("tie", number), tie, Fraction(1)) for number in range(400)]
    assert np.mean(decided) == pytest.approx(rest, abs=0.1)
