"""The Poisson draw is the one the accountant assumes, and costs what the batch costs."""

import importlib
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpx import sampler
from dpx.declaration import ConfigError
from dpx.privacy.segments import steps_per_epoch
from dpx.processes.place import Part
from dpx.randomness import RootSecret
from dpx.sampler import epochs

# `dpx.sampler.poisson` is the function of that name.
poisson: Any = importlib.import_module("dpx.sampler.poisson")

SECRET = RootSecret.from_seed(1)


def generator_for(*place):
    return SECRET.generator("sampling", *place)


def draws(size, q, steps, kind: sampler.Sampler = sampler.Poisson()):  # noqa: B008
    return [sampler.draw(kind, size, q, generator_for, step) for step in range(steps)]


def test_paper_scale_draw_costs_the_batch_and_not_the_corpus():
    tracemalloc.start()
    indices = sampler.draw(sampler.Poisson(), 346_000_000, 2_097_152 / 346e6, generator_for)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(len(indices) - 2_097_152) < 6 * np.sqrt(2_097_152)
    assert indices.dtype == np.int64 and indices[-1] < 346_000_000 and (np.diff(indices) > 0).all()
    assert peak < 4 * indices.nbytes


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
    monkeypatch.setattr(poisson, "shard_records", lambda size: 1_000)
    hits = np.concatenate(draws(10_500, 0.02, 400))
    assert stats.chisquare(np.histogram(hits, bins=np.arange(0, 10_501, 125))[0]).pvalue > 1e-4


def test_virtual_shards_draw_independently(monkeypatch):
    monkeypatch.setattr(poisson, "shard_records", lambda size: 1_000)
    drawn = sampler.draw(sampler.Poisson(), 8_000, 0.1, generator_for)
    shards = [set(drawn[drawn // 1_000 == shard] % 1_000) for shard in range(8)]
    # Two shards of 100 rows each have 10 in common by chance, not 100.
    assert all(len(a & b) < 35 for a, b in itertools.combinations(shards, 2)) and all(len(shard) > 50 for shard in shards)


def test_gaps_beyond_one_block_go_on(monkeypatch):
    # A first block that ends early must be followed by another, not by silence.
    short = np.random.default_rng(0)
    monkeypatch.setattr(poisson.np, "sqrt", lambda value: -value / 10)
    assert poisson._shard_hits(100_000, 0.5, short).max() > 99_000


@pytest.mark.parametrize("size", [1, 2, 999_999, 1_000_000])
@pytest.mark.parametrize("q", [1e-300, 1e-12])
def test_tiny_probabilities_draw_nothing(q, size):
    assert all(len(drawn) == 0 for drawn in draws(size, q, 5))


def test_edge_probabilities():
    assert np.array_equal(sampler.draw(sampler.Poisson(), 5, 1.0, generator_for), np.arange(5))
    assert len(sampler.draw(sampler.Poisson(), 5, 0.0, generator_for)) == 0
    assert len(sampler.draw(sampler.Poisson(), 0, 0.5, generator_for)) == 0
    with pytest.raises(ConfigError, match="q=1.5"):
        sampler.draw(sampler.Poisson(), 5, 1.5, generator_for)


def test_a_draw_repeats_with_its_key_and_only_with_it():
    again = draws(10_000, 0.1, 2)
    assert np.array_equal(again[0], draws(10_000, 0.1, 1)[0]) and not np.array_equal(again[0], again[1])


def test_a_truncated_draw_is_a_uniform_part_of_the_poisson_draw(monkeypatch):
    monkeypatch.setattr(sampler.TruncatedPoisson, "cap", lambda *_: 5)
    truncated = draws(20, 0.4, 4_000, sampler.TruncatedPoisson())
    assert max(map(len, truncated)) == 5 and all((np.diff(drawn) > 0).all() for drawn in truncated)
    assert all(set(part) <= set(whole) for part, whole in zip(truncated, draws(20, 0.4, 4_000), strict=True))
    assert stats.chisquare(np.bincount(np.concatenate(truncated), minlength=20)).pvalue > 1e-4


@pytest.mark.parametrize(("size", "q"), [(60_000, 512 / 60_000), (346_000_000, 65_536 / 346e6), (100, 1.0), (1000, 0.999)])
def test_the_cap_is_rarely_met_and_six_deviations_up(size, q):
    cap = sampler.TruncatedPoisson().cap(size, q)
    assert cap == size or (stats.binom.sf(cap, size, q) <= 1e-10 and cap >= size * q + 6 * np.sqrt(size * q * (1 - q)))


@pytest.mark.parametrize("q", [0.0, 0.3, 0.8, 1.0])
def test_a_fixed_size_draw_is_a_uniform_subset(q):
    drawn = draws(10, q, 2_000, sampler.FixedSize())
    assert {len(set(part)) for part in drawn} == {round(10 * q)}
    if 0 < q < 1:
        assert stats.chisquare(np.bincount(np.concatenate(drawn), minlength=10)).pvalue > 1e-4
        assert len({tuple(part) for part in drawn}) > 40


def test_a_large_fixed_size_draw_costs_the_batch():
    tracemalloc.start()
    (drawn,) = draws(346_000_000, 1e-3, 1, sampler.FixedSize())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drawn) == 346_000 and peak < 12 * drawn.nbytes


@pytest.mark.parametrize("kind", [sampler.Shuffled(), sampler.Deterministic(), sampler.BallsInBins()])
@pytest.mark.parametrize(("size", "batch"), [(100, 10), (103, 10), (7, 7), (5, 1), (1000, 999)])
def test_in_each_pass_every_row_takes_part_exactly_once(kind, size, batch):
    slots = steps_per_epoch(batch / size)
    assert slots == -(-size // batch)
    for number in range(3):
        steps = range(number * slots, (number + 1) * slots)
        rows = np.concatenate([sampler.draw(kind, size, batch / size, generator_for, step) for step in steps])
        assert np.array_equal(np.sort(rows), np.arange(size))


def test_passes_are_shuffled_anew_and_stored_order_is_kept():
    first, second = (sampler.draw(sampler.Shuffled(), 10_000, 0.1, generator_for, step) for step in (0, 10))
    assert 50 < len(np.intersect1d(first, second)) < 150
    assert np.array_equal(sampler.draw(sampler.Deterministic(), 100, 0.1, generator_for, 13), np.arange(30, 40))


def test_balls_fall_into_bins_of_binomial_sizes():
    sizes = [len(sampler.draw(sampler.BallsInBins(), 1_000, 0.1, generator_for, step)) for step in range(0, 5_000, 10)]
    assert abs(np.mean(sizes) - 100) < 5 * np.sqrt(90 / len(sizes)) and abs(np.var(sizes) / 90 - 1) < 0.35


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097])
def test_the_keyed_order_is_a_permutation(size):
    places = epochs.permuted(np.arange(size), size, generator_for("pass", 0))
    assert np.array_equal(np.sort(places), np.arange(size))


def test_few_rows_come_in_an_order_of_their_own_in_every_pass():
    orders = [
        [int(sampler.draw(sampler.Shuffled(), 4, 0.25, generator_for, 4 * number + slot)[0]) for slot in range(4)] for number in range(4)
    ]
    assert orders == [[0, 1, 2, 3], [0, 2, 3, 1], [3, 0, 1, 2], [2, 0, 1, 3]]


@pytest.mark.parametrize(("q", "steps"), [(1.0, 1), (1 / 3, 3), (64 / 640, 10), (1 / 49, 49), (2_097_152 / 346_000_000, 165)])
def test_passes_have_the_ceiling_of_one_over_q_steps(q, steps):
    assert steps_per_epoch(q) == steps


@pytest.mark.parametrize("slack", [1e-3, 1.1e-9, 0.0, -1e-10])
def test_a_slack_that_drops_rows_often_is_refused(slack):
    with pytest.raises(ConfigError, match="would drop rows too often"):
        sampler.TruncatedPoisson(slack=slack)


@pytest.mark.parametrize(("size", "q"), [(100, 0.01), (60_000, 512 / 60_000)])
def test_above_a_skewed_draw_the_slack_sets_the_cap(size, q):
    counts = np.arange(size)
    for kind in (sampler.TruncatedPoisson(), sampler.TruncatedPoisson(slack=1e-12), sampler.TruncatedPoisson(slack=1e-9)):
        smallest = counts[stats.binom.sf(counts, size, q) <= kind.slack][0]
        # One more than the smallest sound cap, whatever the last bits of the inverse.
        assert kind.cap(size, q) == smallest + 1
    assert sampler.TruncatedPoisson().slack == 1e-10


def test_where_most_rows_are_drawn_six_deviations_set_the_cap():
    assert sampler.TruncatedPoisson(slack=1e-9).cap(10_000, 0.9) == 9_000 + 6 * 30


def test_a_group_is_drawn_from_when_its_turn_comes():
    kind, size, counts = sampler.CyclicPoisson(cycle=4), 203, np.zeros(203)
    for step in range(1_200):
        drawn = sampler.draw(kind, size, 0.1, generator_for, step)
        assert (drawn % 4 == step % 4).all() and (np.diff(drawn) > 0).all() and (drawn < size).all()
        counts[drawn] += 1
    # Each of 300 turns takes a row with probability 0.4; the last group is a row shorter.
    assert np.abs(counts - 120).max() < 5.5 * np.sqrt(300 * 0.24) and abs(counts.mean() - 120) < 3
    # The rate of a group is a probability, however large the cycle.
    assert np.array_equal(sampler.draw(kind, size, 0.3, generator_for, 3), np.arange(3, size, 4))


def test_a_cycle_has_a_group_at_least():
    assert np.array_equal(sampler.draw(sampler.CyclicPoisson(cycle=1), 60, 0.1, generator_for, 13), draws(60, 0.1, 14)[13])
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match="at least one group"):
            sampler.CyclicPoisson(cycle=wrong)


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        (sampler.Poisson(), [1, 17, 27, 30, 47, 52]),
        (sampler.TruncatedPoisson(), [1, 17, 27, 30, 47, 52]),
        (sampler.FixedSize(), [2, 3, 5, 31, 40, 49]),
        (sampler.Shuffled(), [0, 2, 4, 22, 49, 54]),
        (sampler.Deterministic(), [18, 19, 20, 21, 22, 23]),
        (sampler.BallsInBins(), [2, 4, 5, 7, 12, 41, 53, 57]),
        (sampler.CyclicPoisson(cycle=4), [1, 5, 17, 21, 33, 37, 45]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_draws_are_the_same_on_every_platform(kind, drawn):
    assert sampler.draw(kind, 60, 0.1, generator_for, 13).tolist() == drawn


def test_a_draw_without_a_step_is_that_of_the_first():
    assert np.array_equal(sampler.draw(sampler.Poisson(), 60, 0.1, generator_for), draws(60, 0.1, 1)[0])


def test_half_of_the_rows_are_drawn_like_fewer():
    assert sampler.draw(sampler.FixedSize(), 10, 0.5, generator_for, 3).tolist() == [0, 1, 3, 7, 8]


SAMPLERS = (
    sampler.Poisson(),
    sampler.CyclicPoisson(cycle=3),
    sampler.TruncatedPoisson(slack=1e-10),
    sampler.FixedSize(),
    sampler.Shuffled(),
    sampler.BallsInBins(),
)


@pytest.mark.parametrize("declared", SAMPLERS, ids=lambda one: one.name)
@pytest.mark.parametrize(("size", "processes"), [(200_003, 1), (200_003, 2), (200_003, 5), (40, 4)])
def test_the_parts_of_several_processes_are_the_draw_of_one(declared, size, processes, monkeypatch):
    monkeypatch.setattr(poisson, "_LEAST_SHARDS", 2)
    whole = sampler.draw(declared, size, 0.05, generator_for, 3)
    parts = [sampler.draw(declared, size, 0.05, generator_for, 3, Part(index, processes)) for index in range(processes)]
    assert np.array_equal(np.concatenate(parts), whole) and len(whole)
    assert processes == 1 or max(map(len, parts)) < len(whole)


def test_a_process_draws_its_own_shards_alone(monkeypatch):
    asked = []

    def noted(step: int, shard: int) -> np.random.Generator:
        asked.append(shard)
        return generator_for(step, shard)

    size = 8 * 4 * poisson._LEAST_RECORDS
    drawn = [sampler.draw(sampler.Poisson(), size, 0.001, noted, 0, Part(index, 4)) for index in range(4)]
    assert asked == list(range(32)) and all(one.min() >= index * size // 4 for index, one in enumerate(drawn))


@pytest.mark.parametrize("size", [4096 * 512, 4_000_000, 16_777_216, 346_000_000])
def test_there_are_at_least_4096_shards_where_each_has_512_records(size):
    shards = -(-size // poisson.shard_records(size))
    assert 4096 <= shards < 4096 * 1.01 and poisson.shard_records(size) >= 512
