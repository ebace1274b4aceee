"""What generated mutants leave alone, the interval of their score, and tables in which nothing lives on unexplained."""

import itertools
from pathlib import Path

import pytest

from .mutants import ROOT
from .mutation_score import OVERTIME, ROOMS, SUMMARY, SURVIVED, interval, read, run_tests, summary
from .mutation_sites import is_within, spans_without_behaviour

SOURCE = """
import os as LEFT
Alias = LEFT | None
@LEFT(1)
def f(a: LEFT = kept, *, b: dict[LEFT, LEFT]) -> LEFT:
    c: LEFT = kept
    require(kept > 0, LEFT + 1, f"{LEFT}")
    if kept:
        raise ConfigError(LEFT, LEFT)
    assert kept, LEFT
    return kept | kept
class C:
    def __repr__(self): return LEFT
SIZE = kept | 1
"""


def test_annotations_messages_decorators_imports_and_representations_are_left_alone():
    spans = spans_without_behaviour(SOURCE)
    lines = SOURCE.splitlines()
    for word, expected in (("LEFT", True), ("kept", False)):
        places = [(row + 1, at) for row, line in enumerate(lines) for at in range(len(line)) if line.startswith(word, at)]
        assert len(places) > 5
        assert [lines[row - 1] for row, at in places if is_within((row, at), spans) != expected] == []


def test_the_interval_is_wilsons():
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(40, 40)[1] == pytest.approx(1) and interval(0, 40)[0] == pytest.approx(0)


@pytest.mark.parametrize("name", ROOMS)
def test_a_rooms_files_exist_and_no_mutant_of_it_lives_unexplained(name: str):
    room = ROOMS[name]
    named = [test.partition("::")[0] for test in (*room.tests, *room.without, *itertools.chain(*room.apart.values()))]
    assert all(list(ROOT.glob(pattern)) for pattern in (*room.sources, *named))
    living = [row.mutant for row in read(name) if row.now == SURVIVED and not row.equivalent_because]
    assert living == [], f"run python -m tests.audit.mutation_score {name} once a test tells them from the source"


def test_the_summary_is_of_the_tables():
    assert SUMMARY.read_text() == summary({name: read(name) for name in ROOMS})


def test_an_endless_mutant_meets_the_limit(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nwhile true; do :; done\n")
    program.chmod(0o700)
    outcome, seconds, _ = run_tests(tmp_path, [], str(program), limit_s=1)
    assert outcome == OVERTIME and seconds < 5
