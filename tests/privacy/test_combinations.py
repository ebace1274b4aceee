"""Any combination of declarations gives a consistent statement or one line; none prints an epsilon its sampler does not support."""

import pytest

from dpx.privacy import events

from .combinations import SUPPORTED, choices, held_to


@pytest.mark.parametrize("seed", range(40))
def test_a_combination_is_consistent_or_refused(small, seed, tmp_path):
    held_to(small(), seed, tmp_path / "ledger")


@pytest.mark.soak
def test_five_hundred_combinations(small, tmp_path):
    stood = sum(held_to(small(), seed, tmp_path / f"ledger{seed}") for seed in range(500))
    print(f"{stood} statements, {500 - stood} refusals")
    assert 100 < stood < 500


def test_every_event_of_the_table_has_a_kind_the_ledger_can_write():
    kinds = {kind for kind, _, _ in events.TABLE}
    drawn = {sampler.name for sampler in choices(1000, 12)["sampler"]}
    # A cyclic draw is written as such and charged as the Poisson draws of a group; rows released one by one are written by their noise.
    assert kinds == drawn - {"cyclic_poisson"} | {"group", "gaussian", "slot_revealed"}


def test_the_table_allows_what_is_supported_and_nothing_else():
    allowed = {cell for cell, build in events.TABLE.items() if callable(build) and cell[0] not in ("gaussian", "group")}
    listed = {(kind, adjacency, name) for (kind, adjacency), names in SUPPORTED.items() for name in names if kind != "group"}
    assert allowed == listed
