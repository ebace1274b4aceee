"""The Poisson draw is the one the accountant assumes, and costs what the batch costs."""

import time
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from dpx import sampler
from dpx.declaration import Refused
from dpx.randomness import RootSecret

SECRET = RootSecret.from_seed(1)


def generator_for(step):
    return lambda shard: SECRET.generator("sampling", step, shard)


def draws(size, q, steps):
    return [sampler.draw(sampler.Poisson(), size, q, generator_for(step)) for step in range(steps)]


def test_paper_scale_draw_costs_the_batch_and_not_the_corpus():
    tracemalloc.start()
    began = time.perf_counter()
    indices = sampler.draw(sampler.Poisson(), 346_000_000, 2_097_152 / 346e6, generator_for(0))
    took, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(len(indices) - 2_097_152) < 6 * np.sqrt(2_097_152)
    assert indices.dtype == np.int64 and indices[-1] < 346_000_000 and (np.diff(indices) > 0).all()
    assert took < 5 and peak < 4 * indices.nbytes


def test_counts_are_binomial():
    counts = [len(drawn) for drawn in draws(2_000, 0.05, 4_000)]
    low, high = stats.binom.ppf([1e-4, 1 - 1e-4], 2_000, 0.05).astype(int)
    edges = np.concatenate([[-1], np.arange(low + 10, high - 10, 4), [2_000]])
    expected = np.diff(stats.binom.cdf(edges, 2_000, 0.05)) * len(counts)
    observed = np.histogram(counts, bins=edges + 0.5)[0]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_every_record_is_equally_likely_and_pairs_are_independent():
    taken = np.zeros((20_000, 12), bool)
    for step, drawn in enumerate(draws(12, 0.3, 20_000)):
        taken[step, drawn] = True
    assert stats.chisquare(taken.sum(0)).pvalue > 1e-4
    assert abs(taken.mean() - 0.3) < 5 * np.sqrt(0.21 / taken.size)
    together = (taken.T.astype(float) @ taken)[np.triu_indices(12, 1)] / len(taken)
    assert np.abs(together - 0.09).max() < 5 * np.sqrt(0.09 * 0.91 / len(taken))


def test_steps_are_independent():
    first, second = draws(200_000, 0.1, 2)
    overlap = len(np.intersect1d(first, second))
    assert abs(overlap - 2_000) < 5 * np.sqrt(2_000)


def test_positions_are_uniform_across_shard_borders(monkeypatch):
    monkeypatch.setattr(sampler, "SHARD_RECORDS", 1_000)
    hits = np.concatenate(draws(10_500, 0.02, 400))
    assert stats.chisquare(np.histogram(hits, bins=np.arange(0, 10_501, 125))[0]).pvalue > 1e-4


def test_gaps_beyond_one_block_go_on(monkeypatch):
    # A first block that ends early must be followed by another, not by silence.
    short = np.random.default_rng(0)
    monkeypatch.setattr(sampler.np, "sqrt", lambda value: -value / 10)
    assert sampler._shard_hits(100_000, 0.5, short).max() > 99_000


@pytest.mark.parametrize("q", [1e-300, 1e-12])
def test_tiny_probabilities_draw_nothing(q):
    assert all(len(drawn) == 0 for drawn in draws(1_000_000, q, 50))


def test_edge_probabilities():
    assert np.array_equal(sampler.draw(sampler.Poisson(), 5, 1.0, generator_for(0)), np.arange(5))
    assert len(sampler.draw(sampler.Poisson(), 5, 0.0, generator_for(0))) == 0
    assert len(sampler.draw(sampler.Poisson(), 0, 0.5, generator_for(0))) == 0
    with pytest.raises(Refused, match="q=1.5"):
        sampler.draw(sampler.Poisson(), 5, 1.5, generator_for(0))


def test_a_draw_repeats_with_its_key_and_only_with_it():
    again = draws(10_000, 0.1, 2)
    assert np.array_equal(again[0], draws(10_000, 0.1, 1)[0]) and not np.array_equal(again[0], again[1])
