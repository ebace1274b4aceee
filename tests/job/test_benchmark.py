"""Benchmark rows against known times, and real rounds on the smallest model in separate processes."""

import contextlib
import importlib
import importlib.util
import json
import time
from pathlib import Path

import pytest

from dpx import config, packages
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx_papers.benchmark.job import Benchmark, interleaved
from dpx_papers.benchmark.rows import matrix_rates, rows
from dpx_papers.benchmark.setting import Setting
from dpx_papers.benchmark.worker import Worker, worker

SMALL = ["model=micro", "model.layers=1", "data.vocabulary.size=64", "data.sequence_length=16"]
MICRO = [*SMALL, "task=mlm_nsp", "data.pairs=same_document", "job=benchmark"]


def fact(clipping, size, flops, **changes):
    fields = {"kind": "sum", "model": "m", "sequence_length": 16, "dtype": "float32", "mesh": "single", "clipping": clipping}
    none = {"per_logical_batch": 0, "in_loops": 0, "elements": 0}
    return fields | {"physical_batch": size, "devices": 1, "matmul_flops": flops, "model_flops": 9, "collectives": none} | changes


def update(is_private, mesh="single"):
    crossing = {"per_logical_batch": 3, "in_loops": 0, "elements": 70}
    return {"kind": "update", "mesh": mesh, "is_private": is_private, "collectives": crossing}


@contextlib.contextmanager
def in_this_process(module, setting):
    """Replaces `worker` where a separate process would only cost time."""
    programs = importlib.import_module(module).programs(setting)

    class Here(Worker):
        def __init__(self):
            self.facts = [program.facts for program in programs]

        def seconds(self, index):
            began = time.perf_counter()
            programs[index].call()
            return time.perf_counter() - began

    yield Here()


def test_ratios_are_medians_of_rounds_against_the_baselines_best_batch():
    facts = [fact("autodiff", 4, 10), fact("autodiff", 8, 10), fact("plain", 8, 10), fact("book_keeping", 8, 12)]
    # The machine is four times slower in the last round, for everyone.
    seconds = [[3.0, 3.0, 12.0], [2.0, 2.0, 8.0], [1.0, 1.0, 4.0], [1.0, 1.25, 5.0]]
    found = rows(facts, seconds, 8)
    assert [row["ratio_to_autodiff"] for row in found] == pytest.approx([2 / 3, 1.0, 2.0, 1.6])
    assert found[3]["ratio_to_plain"] == pytest.approx(0.8) and found[3]["ratio_to_plain_spread"] == pytest.approx([0.8, 1.0])
    assert found[3]["flops_ratio_to_plain"] == pytest.approx(1.2)
    assert found[3]["examples_per_s"] == pytest.approx(8 / 1.25)
    assert found[3]["model_flops_per_s"] == pytest.approx(9 * 8 / 1.25)
    assert found[3]["update_seconds"] is None and "kind" not in found[3] and found[3]["share_of_matrix_rate"] is None


def test_a_share_is_of_the_rate_that_plain_products_reached_in_the_same_rounds():
    facts = [{"kind": "rate", "dtype": "float32", "flops": 720, "mesh": "single"}, fact("plain", 8, 10, devices=2)]
    # 9 FLOPs an example, 8 examples in 0.5 s, beside two devices of 360 FLOP/s each.
    assert rows(facts, [[2.0, 4.0, 1.0], [0.5, 0.5, 0.5]], 8)[0]["share_of_matrix_rate"] == pytest.approx(9 * 8 / 0.5 / (2 * 360))
    assert matrix_rates(facts, [[2.0], [0.5]]) == {"float32": 360}


def test_a_time_limit_leaves_out_whole_batches_and_rounds_but_one(monkeypatch):
    monkeypatch.setattr("dpx_papers.benchmark.job.worker", in_this_process)

    class Slow(Worker):
        def __init__(self):
            self.facts = [{}, {}]

        def seconds(self, index):
            return 5.0

    subject = Slow()
    assert interleaved([subject], 4) == [[5.0] * 4] * 2
    assert interleaved([subject], 4, time.monotonic() + 1) == [[5.0]] * 2
    setting = ["benchmark.limit_s=1e-3", "benchmark.logical_batch=4", "benchmark.physical_batches=[2,4]", "benchmark.variants=[plain]"]
    experiment, benchmark = config.build(recipes.compose([*MICRO, *setting]))
    document = benchmark.document(experiment)
    assert document["rows"] == [] and document["rounds"] == 1 and document["matrix_rate"]["float32"] > 0
    assert [(row["physical_batch"], row["why"]) for row in document["left_out"]] == [
        (2, "the time limit was reached before compilation"),
        (4, "the time limit was reached before compilation"),
    ]


def test_a_row_is_held_against_baselines_of_its_own_dtype_and_mesh():
    facts = [
        fact("plain", 8, 10),
        fact("plain", 8, 10, dtype="bfloat16"),
        fact("plain", 8, 10, mesh="two"),
        fact("ghost", 8, 15, dtype="bfloat16"),
        fact("ghost", 8, 15, mesh="two"),
        update(True, "two"),
        fact("opacus_ew", 8, None, collectives=None),
    ]
    found = rows(facts, [[1.0], [2.0], [4.0], [4.0], [4.0], [0.5], [2.0]], 8)
    assert [row["ratio_to_plain"] for row in found] == pytest.approx([1.0, 1.0, 1.0, 0.5, 1.0, 0.5])
    assert found[4]["collectives"] == {"per_logical_batch": 3, "in_loops": 0, "elements": 70} and found[4]["update_seconds"] == 0.5
    assert found[5]["update_seconds"] is None and found[5]["flops_ratio_to_plain"] is None
    assert all(row["ratio_to_autodiff"] is None for row in found)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"variants": ["fast"]}, "job.variants=fast"),
        ({"dtypes": ["float16"]}, "job.dtypes=float16"),
        ({"physical_batches": [5]}, "job.physical_batches=5"),
        ({"peer_batches": [5]}, "job.peer_batches=5"),
        ({"variants": []}, r"job.variants=\[\]: the benchmark would measure nothing"),
        ({"physical_batches": []}, r"job.physical_batches=\[\]: the benchmark would measure nothing"),
        ({"logical_batch": 0}, "job.physical_batches=4: does not divide job.logical_batch=0"),
        ({"rounds": 0}, "job.rounds=0"),
        ({"limit_s": 0.0}, "job.limit_s=0.0"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Benchmark(**changes)


def test_a_batch_that_a_mesh_cannot_share_is_refused():
    experiment, _ = config.build(recipes.compose(MICRO))
    subject = Benchmark(meshes=["single", "cpu8"], logical_batch=8, physical_batches=[2])
    with pytest.raises(ConfigError, match="physical_batches=2 on mesh=cpu8"):
        list(subject.settings(experiment))


@pytest.mark.parametrize("mechanism", ["none", "discrete_gaussian", "banded"])
def test_what_has_no_independent_noise_is_refused(mechanism):
    experiment, _ = config.build(recipes.compose([*MICRO, f"mechanism={mechanism}"]))
    with pytest.raises(ConfigError, match=f"job=benchmark, mechanism={mechanism}"):
        list(Benchmark().settings(experiment))


def test_a_peer_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    experiment, _ = config.build(recipes.compose(MICRO))
    with pytest.raises(ConfigError, match=r"job.variants=opacus_ew: needs torch, which is not installed. Install the extra bench: "):
        list(Benchmark(variants=["plain", "opacus_ew"]).settings(experiment))


# Slow: a benchmark that is left out is named above.
@pytest.mark.slow
def test_an_optional_peer_that_is_not_installed_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    monkeypatch.setattr("dpx_papers.benchmark.job.worker", in_this_process)
    setting = ["benchmark.limit_s=1e-3", "benchmark.logical_batch=4", "benchmark.physical_batches=[4]", "benchmark.variants=[plain]"]
    experiment, benchmark = config.build(recipes.compose([*MICRO, *setting, "benchmark.optional_peers=[opacus_hooks]"]))
    late, absent = benchmark.document(experiment)["left_out"]
    assert late["clipping"] == "plain" and absent["clipping"] == "opacus_hooks" and absent["why"] == "needs torch, which is not installed"
    with pytest.raises(ConfigError, match=r"job.optional_peers=vmap: no such peer. Use jax_privacy, torch, "):
        Benchmark(optional_peers=["vmap"])


@pytest.mark.slow
def test_rounds_of_the_smallest_model_on_one_device_and_on_two(tmp_path: Path):
    """Every dtype and mesh by its own process; two simulated devices add up what they summed once."""
    settings = ["benchmark.variants=[plain,book_keeping]", "benchmark.logical_batch=4", "benchmark.physical_batches=[2]"]
    settings += ["benchmark.rounds=1", f"benchmark.output={tmp_path / 'copy.json'}"]
    experiment, benchmark = config.build(recipes.compose([*MICRO, *settings, "mesh=cpu8", "mesh.data=2", "mesh.simulated_devices=2"]))
    benchmark(experiment, RunFolder(tmp_path))
    document = json.loads((tmp_path / "private" / "benchmark.json").read_text())
    assert document == json.loads((tmp_path / "copy.json").read_text())
    plain, private = document["rows"]
    assert (plain["clipping"], private["clipping"], private["devices"]) == ("plain", "book_keeping", 2)
    assert private["collectives"]["per_logical_batch"] >= 1 and private["collectives"]["in_loops"] == 0
    assert private["is_exact"] is True and private["clipped_sum_error"] < 1e-5 and plain["is_exact"] is None
    assert private["ratio_to_plain"] > 0 and private["flops_ratio_to_plain"] > 1 and private["update_seconds"] > 0
    assert plain["ratio_to_plain"] == 1.0 and private["temporary_bytes"] > 0


@pytest.mark.slow
def test_a_step_on_labels_is_timed_on_random_rows(monkeypatch):
    """The task of Yin and Habernal's Figure 3, one example after the other included; each way against float64 gradients."""
    monkeypatch.setattr("dpx_papers.benchmark.job.worker", in_this_process)
    point = ["+experiment=legal_fig3_runtime", "mesh=single", *SMALL, "benchmark.logical_batch=4", "benchmark.rounds=1"]
    point += ["benchmark.physical_batches=[2]", "benchmark.variants=[book_keeping,loop]"]
    experiment, benchmark = config.build(recipes.compose(point))
    found = {row["clipping"]: row for row in benchmark.document(experiment)["rows"]}
    assert list(found) == ["book_keeping", "loop"] and all(row["is_exact"] for row in found.values())


def test_random_rows_are_refused_where_they_would_be_learnt_from(tmp_path: Path):
    experiment, train = config.build(recipes.compose(["task=classification", "data=random", "model=micro", "data.sequence_length=16"]))
    with pytest.raises(ConfigError, match="data.source.kind=random: random rows contain nothing that a model can learn"):
        train(experiment, RunFolder(tmp_path))
    with pytest.raises(ConfigError, match="data=embedded: its rows have no column label"):
        config.build(recipes.compose(["task=classification"]))


def test_what_fails_in_a_process_is_said_in_the_parent():
    experiment, _ = config.build(recipes.compose(MICRO))
    setting = Setting(experiment, ["nothing"], ["float32"], 4, [4])
    with pytest.raises(RuntimeError, match="a benchmark process failed"), worker("dpx_papers.benchmark.nothing", setting):
        pass


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="needs the extra bench")
@pytest.mark.filterwarnings("default")
def test_opacus_rows(tmp_path: Path):
    variants = "benchmark.variants=[torch,opacus_hooks,opacus_ew,opacus_ghost]"
    settings = [variants, "benchmark.logical_batch=4", "benchmark.physical_batches=[2]", "benchmark.rounds=1"]
    experiment, benchmark = config.build(recipes.compose([*MICRO, *settings]))
    found = {row["clipping"]: row for row in benchmark.document(experiment)["rows"]}
    assert [row["is_exact"] for row in found.values()] == [None, True, True, True]
    assert [row["is_tied"] for row in found.values()] == [True, True, True, False]


@pytest.mark.skipif(importlib.util.find_spec("jax_privacy") is None, reason="needs the extra bench")
@pytest.mark.filterwarnings("default")
def test_a_jax_privacy_row(tmp_path: Path):
    settings = ["benchmark.variants=[jax_privacy]", "benchmark.logical_batch=4", "benchmark.peer_batches=[1]", "benchmark.rounds=1"]
    experiment, benchmark = config.build(recipes.compose([*MICRO, *settings, "benchmark.physical_batches=[2]"]))
    (row,) = benchmark.document(experiment)["rows"]
    assert row["is_exact"] is True and row["physical_batch"] == 1
