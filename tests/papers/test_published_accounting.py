"""Accounting analyses at small settings: their shape, and the published or computed values where these are cheap."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import dpx.privacy
from dpx import config
from dpx.config import recipes
from dpx.cost.designs import excess_by_profiles
from dpx.job.report import Analyse
from dpx.privacy import closed_form, solve
from dpx.privacy.accounting import compose
from dpx.privacy.events import Release
from dpx.sampler import batch_schedule
from dpx_papers.du2021.prop1_noise_dimension import dpfp_prop1_noise_dimension
from dpx_papers.du2021.prop3_noise_ratio import dpfp_prop3_noise_ratio
from dpx_papers.du2021.table2_accounting import Cell, dpfp_table2_accounting
from dpx_papers.mckenna2025 import diminishing_batch
from dpx_papers.mckenna2025.calibration_profiles import EPSILONS, deltas, mckenna_calibration_profiles
from dpx_papers.mckenna2025.fig4_vector_fields import mckenna_fig4_vector_fields
from tests.planned import plan
from tests.report.made import rows_by_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "privacy" / "reference.json").read_text())}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_CACHE", str(tmp_path))


def rows(table):
    return table.as_json()["rows"]


def declared(name):
    """The analysis of a recipe, at full scale."""
    job = config.build(recipes.compose([f"+experiment={name}"]))[1]
    assert isinstance(job, Analyse)
    return job.analysis


def small_corpus(full, **changed):
    """The rows of the small corpus, without those of the large one."""
    return rows_by_table(dataclasses.replace(full, batch_sizes=[], computed_noise_multipliers=[], **changed))["small_corpus"]


def test_the_literal_schedule_visits_what_was_computed():
    case = CASES["anil-schedule-literal-examples"]
    expected, fixed, steps = case["expected"], case["inputs"]["fixed_batch_size"], case["inputs"]["steps"]
    sizes = [batch for batch, _ in case["inputs"]["batch_sizes"]]
    found = batch_schedule.stages(batch_schedule.Staged(sizes=sizes, stage_steps=1875), steps)
    total = sum(batch * count for batch, count in found)
    assert found == tuple(map(tuple, case["inputs"]["batch_sizes"])) and total == expected["total_examples"]
    assert 1 - total / (fixed * steps) == pytest.approx(expected["saving_vs_fixed"], rel=1e-9)


def test_legal_noise_and_the_order_grid():
    full = declared("legal_accounting")
    *small_sizes, inferred = full.small_sizes
    (at_half,) = small_corpus(full, published={"0.5": 3.726}, small_sizes=[inferred])
    assert at_half["rdp_old_orders"] == pytest.approx(3.726, rel=1e-3) and at_half["pld"] == pytest.approx(2.02, rel=0.01)
    # N is not printed; at the share of bytes that the small corpus has, epsilon is near to the printed one.
    for size, delta in small_sizes:
        assert 4.0e6 <= size <= 4.4e6 and delta == pytest.approx(1 / (1.1 * size), rel=1e-4)
        claim: dict[str, Any] = {"noise_multiplier": 0.5, "delta": delta, "accountant": "rdp", "orders": full.orders}
        assert dpx.privacy.epsilon([(256 / size, full.small_steps)], **claim) == pytest.approx(3.76, abs=0.01)


def test_an_epsilon_that_limits_nothing_is_reported_as_infinite():
    full = declared("legal_accounting")
    size, delta = full.small_sizes[-1]
    runs = [(full.small_batch_size / size, full.small_steps)]
    claim: dict[str, Any] = {"noise_multiplier": 0.1, "delta": delta}
    old, new = (dpx.privacy.epsilon(runs, accountant="rdp", orders=orders, **claim) for orders in (full.orders, None))
    assert old == pytest.approx(4e5, rel=0.1) and new < 2_000
    first, second = small_corpus(full, small_sizes=[[2_000_000, 4.5e-7]], small_steps=20)
    assert second["reported"] == "infinite" and float(first["reported"]) < full.most


def test_legal_noise_multipliers_are_the_known_ones_but_for_the_largest_batch():
    full = declared("legal_accounting")
    for batch, known in zip(full.batch_sizes, full.computed_noise_multipliers, strict=True):
        steps = full.epochs * (full.size // batch)
        claim: dict[str, Any] = {"epsilon": full.epsilon, "delta": full.delta, "accountant": "rdp", "orders": full.orders}
        sigma = solve.noise_multiplier([(batch / full.size, steps)], **claim)
        if batch == 1_048_576:
            # The known value is of another number of steps than five times the whole batches that fit.
            assert steps == 125 and sigma == pytest.approx(0.9870, abs=1e-4) and known == 0.9971
        else:
            assert sigma == pytest.approx(known, rel=5e-3)


@pytest.mark.parametrize(("adjacency", "epsilon"), [("zero_out", 17.1), ("replace_one", 41.5)])
def test_epsilon_of_the_shuffled_epochs_that_ran(adjacency, epsilon):
    """Five passes at the headline's noise; what the paper states is not a bound for them."""
    run = ["+experiment=legal_clip_sweep", "batch_schedule.size=524288", "noise.noise_multiplier=0.8510", f"privacy.adjacency={adjacency}"]
    found = plan(config.build(recipes.compose([*run, "sampler=shuffled", "sampler.assumed=poisson"]))[0])
    assert found["guarantee"] == "dp" and found["epsilon"]["pld"] == pytest.approx(epsilon, abs=0.05)
    assumed = {one["name"]: one for one in found["unsupported"]}["epsilon/rdp/poisson"]
    assert assumed["value"] == pytest.approx(5, abs=0.05) and "shuffled ran" in assumed["reason"]


def test_what_the_paper_had_otherwise_leaves_no_guarantee():
    for changed, why in (("data.pairs=cross_document", "pairs: "), ("data.vocabulary.fit_on=protected", "vocabulary: ")):
        found = plan(config.build(recipes.compose(["+experiment=legal_fig1b_snr_lr", changed]))[0])
        assert found["guarantee"] == "none" and found["epsilon"] == {} and found["reasons"][0].startswith(why)


@pytest.mark.slow
def test_the_epsilon_rows_are_of_li_and_not_of_dpfp():
    cell = Cell(task="sst2", size=67349, li_batch_size=1000, li_epochs=3, epsilon_rdp=3.0, published_clt=1.73, published_pld=2.41)
    of_li, tried, own, judged = dpfp_table2_accounting(cells=[cell], micro_batches=32, batch_size=32, epochs=3, tried=[[2000, 3]])()
    (li,) = rows(of_li)
    # The one cell whose printed limit, 1.73, nothing reproduces; its composed value does.
    assert li["clt"] == pytest.approx(1.535, rel=2e-3) and li["pld"] == pytest.approx(2.41, rel=0.005)
    larger, of_the_limit = rows(tried)
    assert larger["clt"] == pytest.approx(1.725, rel=2e-3) and larger["pld_difference"] > 0.03
    assert of_the_limit["sigma"] == pytest.approx(0.778, rel=1e-3) and of_the_limit["pld"] == pytest.approx(2.82, rel=2e-3)
    (found,) = rows(own)
    assert found["sigma"] == 0.346 and found["epsilon"] == pytest.approx(67.7, rel=2e-3)
    assert found["unsupported_pld"] == pytest.approx(5.9, rel=5e-3) and found["unsupported_pld"] < found["unsupported_rdp"]
    assert found["delta_at_claim"] > 0.8
    assert [row["state"] for row in rows(judged)] == ["fail", "pass", "fail"]


def test_proposition_1_counts_coordinates():
    analysis = dpfp_prop1_noise_dimension(
        dimensions={"m": [4, 100]}, forward_noise_multiplier=0.5, gradient_noise_multiplier=1.0, batch_size=10
    )
    (row,) = rows(analysis()[0])
    assert (row["d_over_k"], row["forward_norm"], row["mean_gradient_norm"]) == (25.0, 1.0, 1.0)


def test_proposition_3_holds_only_for_small_epsilon():
    analysis = dpfp_prop3_noise_ratio(
        size=67349, epochs=3, batch_sizes=[32], micro_batches=[1, 32], epsilons=[0.001, 0.02, 1.73], pld_epsilons=[]
    )
    found = {(row["epsilon_clt"], row["micro_batches"]): row["power_ratio"] for row in rows_by_table(analysis)["power_by_equation_11"]}
    assert found[(0.02, 32)] == pytest.approx(0.047, abs=5e-4) and found[(1.73, 32)] == pytest.approx(0.59, abs=5e-3)
    assert 1 / 32 < found[(0.001, 32)] < found[(0.02, 32)] and found[(1.73, 1)] == 1.0


def test_what_holds_of_dp_fp_needs_as_much_noise_at_any_number_of_micro_batches():
    fields: dict[str, Any] = {"size": 67349, "epochs": 3, "batch_sizes": [32], "epsilons": [], "pld_epsilons": []}
    analysis = dpfp_prop3_noise_ratio(micro_batches=[1, 32], epsilons_by_uses=[1.73, 67.7], **fields)
    found = {(row["epsilon"], row["micro_batches"]): row for row in rows_by_table(analysis)["power_by_uses"]}
    assert found[(67.7, 32)]["sigma"] == pytest.approx(0.346, rel=2e-3)
    assert all(0.99 < found[(epsilon, 32)]["power_ratio"] < 1.02 for epsilon in (1.73, 67.7))


@pytest.mark.slow
def test_arrows_lie_between_nothing_and_a_doubling():
    analysis = mckenna_fig4_vector_fields(
        steps=16000,
        delta=1e-8,
        sizes=[10_000_000],
        batch_sizes=[65536],
        epsilons=[4],
        fixed_size=10_000_000,
        fixed_batch_size=65536,
        fixed_epsilon=4.0,
        interval=5e-4,
    )
    tables = analysis()
    arrows = {key: value for table in tables for key, value in rows(table)[0].items() if key.startswith("gain")}
    assert arrows["gain_of_epsilon"] == pytest.approx(0.500, abs=5e-3) and arrows["gain_of_batch_size"] == pytest.approx(0.116, abs=5e-3)
    assert arrows["gain_of_size"] == pytest.approx(0.545, abs=5e-3)


def test_batches_stop_paying_in_proportion_to_the_scale(monkeypatch):
    # A ratio whose turning point is known: B + N sqrt(eps/T) over B doubles its batch for a gain of a half at B = scale.
    monkeypatch.setattr(diminishing_batch, "ratio", lambda size, batch, epsilon, steps, *_: 1 + size * (epsilon / steps) ** 0.5 / batch)
    analysis = diminishing_batch.mckenna_diminishing_batch(
        delta=1e-8, sizes=[10**6, 10**7], epsilons=[1, 16], steps=[4000], smallest_batch_size=64, threshold=1 / 3, interval=1e-3
    )
    points, fit, _ = analysis()
    assert rows(fit)[0]["slope"] == pytest.approx(1.0, rel=0.02)
    assert all(0.8 < row["batch_over_scale"] < 1.25 for row in rows(points))


@pytest.mark.slow
def test_profiles_of_equal_claims_differ_elsewhere():
    analysis = mckenna_calibration_profiles(
        size=10_000_000, examples=48828125, epsilon=8.0, delta=1e-8, batch_sizes=[131072, 524288], points=[0, 8], interval=2e-3
    )
    settings, profiles, excess, _ = analysis()
    assert [row["membership_advantage"] for row in rows(settings)] == [pytest.approx(0.261, abs=2e-3), pytest.approx(0.307, abs=2e-3)]
    at_claim = rows(profiles)[1]
    assert all(at_claim[f"delta_at_batch_{batch}"] == pytest.approx(1e-8, rel=0.02) for batch in (131072, 524288))
    found = {(row["instead_of"], row["uses"]): row["excess"] for row in rows(excess)}
    assert found[(131072, 524288)] > 0.01


def test_excess_vulnerability_of_two_gaussians():
    base, worse = (compose([(Release(noise_multiplier=1 / mu, kind="gaussian"), 1)], "deterministic") for mu in (1.0, 1.5))
    # Both other forms of the definition give 0.0819 here.
    profiles = deltas(base), deltas(worse)
    found = [excess_by_profiles(EPSILONS, *pair) for pair in (profiles, profiles[::-1])]
    assert found == [pytest.approx(0.0819, abs=2e-4), 0.0]
    assert worse.delta(0.0) == pytest.approx(closed_form.delta(1.5, 0.0))


def test_compute_of_a_table_2_row():
    from dpx.cost.memory import published_flops

    case = CASES["mckenna-compute-t2"]
    given = case["inputs"]
    per_example = published_flops(int(given["params"]), given["sequence_length"])
    assert per_example * given["batch_size"] * given["steps"] == pytest.approx(case["expected"]["flops"], rel=1e-6)
    tokens = given["sequence_length"] * given["batch_size"] * given["steps"] / given["params"]
    assert tokens == pytest.approx(case["expected"]["tokens_per_parameter"], rel=1e-6)


@pytest.mark.parametrize(
    "place",
    [
        "anil2021/accounting/anil_accounting",
        "anil2021/accounting/anil_schedule_variants",
        "mckenna2025/accounting/mckenna_fig4_vector_fields",
        "mckenna2025/accounting/mckenna_diminishing_batch",
        "mckenna2025/accounting/mckenna_calibration_profiles",
        "yin2022/accounting/legal_accounting",
        "du2021/accounting/dpfp_table2_accounting",
        "du2021/accounting/dpfp_prop1_noise_dimension",
        "du2021/accounting/dpfp_prop3_noise_ratio",
        "du2021/accounting/dpfp_model_size_gap",
        "du2021/demonstrations/dpfp_postprocessing_counterexample",
        "du2021/demonstrations/dpfp_label_leak",
        "du2021/demonstrations/dpfp_prop2_gradient_bias",
    ],
)
def test_the_evidence_has_tables_and_a_picture_that_its_page_shows(place):
    folder = EXPERIMENTS / place
    pictures = [path.name for path in folder.glob("*.svg")]
    page = (folder.parent / "README.md").read_text()
    assert list(folder.glob("*.csv")) and pictures and all(f"{folder.name}/{name}" in page for name in pictures)
    assert f"+experiment={folder.name}" in page
