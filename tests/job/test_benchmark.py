"""Benchmark rows against known times, and one real round on the smallest model."""

from pathlib import Path

import pytest

from dpx import config, recipes
from dpx.declaration import Refused
from dpx.job.benchmark import Benchmark, rows
from dpx.run_folder import RunFolder


def program(clipping, size, flops):
    return {"clipping": clipping, "physical_batch": size, "matmul_flops": flops, "call": None}


def test_ratios_are_medians_of_rounds_against_the_baselines_best_batch():
    programs = [program("autodiff", 4, 10), program("autodiff", 8, 10), program("plain", 8, 10), program("book_keeping", 8, 12)]
    # The machine is four times slower in the last round, for everyone.
    seconds = [[3.0, 3.0, 12.0], [2.0, 2.0, 8.0], [1.0, 1.0, 4.0], [1.0, 1.25, 5.0]]
    found = rows(programs, seconds, 8)
    assert [row["ratio_to_autodiff"] for row in found] == pytest.approx([2 / 3, 1.0, 2.0, 1.6])
    assert found[3]["ratio_to_plain"] == pytest.approx(0.8) and found[3]["ratio_to_plain_spread"] == pytest.approx([0.8, 1.0])
    assert found[3]["flops_ratio_to_plain"] == pytest.approx(1.2)
    assert found[3]["examples_per_s"] == pytest.approx(8 / 1.25)
    assert "call" not in found[0]


@pytest.mark.parametrize(
    "changes, words",
    [({"variants": ["fast"]}, "job.variants=fast"), ({"physical_batches": [5]}, "job.physical_batches=5"), ({"rounds": 0}, "job.rounds=0")],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(Refused, match=words):
        Benchmark(**changes)


def test_one_round_of_the_smallest_model(tmp_path: Path):
    overrides = ["model=micro", "data.vocabulary.size=64", "data.sequence_length=16", "job=benchmark"]
    job = ["job.variants=[plain,book_keeping]", "job.logical_batch=4", "job.physical_batches=[2]", "job.rounds=1"]
    experiment, benchmark = config.build(recipes.compose(overrides + job))
    benchmark(experiment, RunFolder(tmp_path))
    assert (tmp_path / "private" / "benchmark.json").exists()
