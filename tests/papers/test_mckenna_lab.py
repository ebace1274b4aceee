"""Analyses of McKenna et al. 2025 on surfaces whose truth is known: every claim of the paper holds on one and fails on another."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from dpx.cost.designs import Calibration, NoiseBatchRatio
from dpx.declaration import ConfigError
from dpx.packages import option_file
from dpx.pages import pictures as drawing
from dpx.privacy import closed_form
from dpx_papers.mckenna2025 import (
    allocation,
    billion_claim,
    fig3_compute,
    fig5_baselines,
    fig6_full_grid,
    fig11_nonprivate,
    fig14_smoothing,
    fig15_vulnerability,
    fig17_transform,
    fig19_parametric_optimum,
    fit_semiparametric,
    parametric,
    table2_saturation,
    table3_trainset,
)
from dpx_papers.mckenna2025.lab import Lab
from dpx_papers.report.shape import Part
from dpx_papers.scaling.optima import optima
from dpx_papers.scaling.parametric import Fit, transformed

from .mckenna_surfaces import RATIOS, fitted, fixed_batches, form_l2, lab, table

NOISELESS = np.concatenate([[2.0**-40], RATIOS])


@pytest.fixture(autouse=True)
def cheap_noise(monkeypatch):
    monkeypatch.setattr(Lab, "ratio", fixed_batches)


def states(tables_or_parts):
    """Pass, fail or not run, in the order of the claims."""
    if isinstance(tables_or_parts, Part):
        return [tables_or_parts.state]
    if hasattr(tables_or_parts[-1], "columns"):
        assert tables_or_parts[-1].name == "verdicts"
        return [row["state"] for row in tables_or_parts[-1].as_json()["rows"]]
    return [part.state for part in tables_or_parts]


def declared(name, analysis, **given):
    """The analysis `name` with the figures and titles of its option."""
    node: Any = OmegaConf.to_container(OmegaConf.load(option_file("analysis", name)))
    return analysis(**given, tables=node.get("tables", {}), figures=node.get("figures", []))


def answered(analysis):
    """Tables of an analysis that hold what its pictures show."""
    tables = analysis()
    rows = {one.name: one.as_json()["rows"] for one in tables}
    pictures = analysis.pictures(tables)
    assert len(pictures) == len(analysis.figures) > 0
    for panel in (panel for picture in pictures for panel in picture.panels):
        shown = drawing.selected(rows[panel.table], panel.where)
        assert shown and {panel.x, *panel.y, *panel.marks, *panel.band, *([panel.by] if panel.by else [])} <= set(shown[0])
        assert all(any(row[column] is not None for row in shown) for column in (*panel.y, *panel.marks))
    return tables


def found(truth=form_l2, *, sizes=(2e5, 8e5), epsilons=(1, 4, 16, 64), computes=None, **options) -> pd.DataFrame:
    own = lab()
    places = own.computes_of() if computes is None else computes
    return optima(fitted(truth, **options).surface, own.ratio, sizes, epsilons, places)


def test_without_measurements_the_line_says_what_to_run():
    with pytest.raises(ConfigError, match=r"laptop/mckenna_grid.*analysis\.lab\.measurements"):
        allocation.mckenna_allocation(lab=lab(), sizes=None)()
    with pytest.raises(ConfigError, match="is not there"):
        lab("nowhere").measured()


# Section 3.3 and Figure 14
def test_the_fit_of_a_monotone_surface_holds_and_of_one_without_order_fails(tmp_path):
    analysis = declared("mckenna_fit_semiparametric", fit_semiparametric.mckenna_fit_semiparametric, lab=lab(table(tmp_path)))
    assert states(answered(analysis)) == ["pass"] * 3
    upside_down = fitted(lambda m, t, r: 10 - form_l2(m, t, r))
    assert states(fit_semiparametric.judged(upside_down.grid, upside_down.surface)) == ["fail", "fail", "pass"]
    rough = fitted()
    rough.surface.losses_MRT[0, 0, 3] = 9.0
    assert states(fit_semiparametric.judged(rough.grid, rough.surface))[2] == "fail"


def test_smoothing_is_close_to_falling_losses_and_not_to_losses_that_rise_again(tmp_path):
    analysis = declared("mckenna_fig14_smoothing", fig14_smoothing.mckenna_fig14_smoothing, lab=lab(table(tmp_path)), reach=8)
    tables = answered(analysis)
    assert states(tables) == ["pass", "pass"]
    assert drawing.draw(analysis.pictures(tables), tables)[0].drawn("svg"), "steps beyond the measured ones have no record"
    diverging = fitted(lambda m, t, r: form_l2(m, t, r) + np.maximum(t - 1000, 0) / 1000)
    assert states(fig14_smoothing.judged(fig14_smoothing.stages(diverging, 8))) == ["pass", "fail"]
    rising = pd.DataFrame({"noise_batch_ratio": 1e-3, "step": [100.0, 200.0], "rolling_mean": [5.0, 5.1], "fitted": [5.0, 5.1]})
    assert states(fig14_smoothing.judged(rising))[0] == "fail"


# Figures 1 and 13
def test_the_best_model_is_smaller_at_a_smaller_epsilon(tmp_path):
    analysis = declared("mckenna_fig13_allocation_by_n", allocation.mckenna_allocation, lab=lab(table(tmp_path)), sizes=None)
    assert states(answered(analysis)) == ["pass", "pass"]
    inside = allocation.judged(found(lambda m, t, r: form_l2(m, t, r, a=4e4, alpha=1.0)), (2e4, 2e6))
    assert inside[0].state == "fail", "models that pay for themselves at once are larger than 20 tokens a parameter would have them"
    tolerant = found(lambda m, t, r: form_l2(m, t, r * (m / 2e5) ** -3))
    assert allocation.judged(tolerant, (2e4, 2e6))[1].state == "fail", "where larger models bear more noise"


# Figures 3a to 3c and Table 2
def plateau(m, t, r):
    """A few hundred steps are enough; after that only noise is in the way, and the data limits how little there can be."""
    return 3 + 40 / m**0.4 + 30 * r**0.5 + 2 * np.exp(-t / 60)


def test_where_loss_stops_falling_the_knee_rises_with_epsilon_and_data():
    computes = np.geomspace(1e11, 1e16, 41)
    knees = fig3_compute.knees_of(found(plateau, sizes=(1e4, 4e4, 1.6e5), epsilons=(1, 4, 16), computes=computes))
    assert states(fig3_compute.judged(knees)) == ["pass", "pass", "pass"]
    assert fig3_compute.judged(fig3_compute.knees_of(found()))[0].state == "fail", "every curve still falls where the grid ends"
    falling = [
        {"size": size, "epsilon": epsilon, "saturates_at": 1e12 / epsilon / size, "is_flat": True}
        for size in (1.0, 2.0)
        for epsilon in (1.0, 2.0)
    ]
    assert states(fig3_compute.judged(falling)) == ["pass", "fail", "fail"]


def test_tokens_per_parameter_rise_with_compute_less_so_at_a_larger_epsilon(tmp_path):
    given = {"lab": lab(table(tmp_path)), "size": None, "epsilons": [1, 10, 100]}
    assert states(answered(declared("mckenna_fig3c_token_ratio", fig3_compute.mckenna_fig3c_token_ratio, **given))) == ["pass", "pass"]
    own = declared("mckenna_fig3ab_compute", fig3_compute.mckenna_fig3ab_compute, lab=given["lab"], epsilons=[1, 16])
    (picture,) = own.pictures(answered(own))
    assert [panel.title for panel in picture.panels] == ["epsilon = 1", "epsilon = 16"]
    assert states(fig3_compute.judged_ratio(fig3_compute.slopes_of(found(epsilons=(1,))))) == ["not run", "not run"]
    no_noise = lambda m, t, r: 2 + 4000 / m**0.8 + 2 / (128 * t) ** 0.05  # noqa: E731
    slopes = fig3_compute.slopes_of(found(no_noise, epsilons=(1, 64), sizes=(8e5,)))
    assert "fail" in states(fig3_compute.judged_ratio(slopes)), slopes


def test_the_compute_that_saturates_grows_with_epsilon_and_data(tmp_path):
    own = lab(table(tmp_path, plateau), lowest_compute=1e11, highest_compute=1e16, computes=41)
    points = optima(own.fitted().surface, own.ratio, [1e4, 4e4, 1.6e5], [1, 4, 16], own.computes_of())
    saturated = table2_saturation.saturated(points)
    assert len(saturated) == 9 and states(table2_saturation.judged(saturated[saturated["is_flat"]])) == ["pass", "pass"]
    assert states(table2_saturation.judged(found(computes=[1e13]))) == ["fail", "fail"], "one compute for all"


# Figure 5
def test_the_optimum_is_below_fixed_settings_unless_a_model_between_its_candidates_stands_out(tmp_path):
    own = lab(table(tmp_path), size=3.2e6)
    analysis = fig5_baselines.mckenna_fig5_baselines(lab=own, epsilons=[1, 4, 16, 64], published=[], published_size=10)
    assert states(analysis())[:2] == ["pass", "pass"]
    spike = lambda m, t, r: form_l2(m, t, r) - 3.0 * (m == 550016)  # noqa: E731
    models = {"a": 2e4, "b": 549_000, "c": 550_016, "d": 551_000, "e": 2e6}
    rows = fig5_baselines.losses(own, fitted(spike, parameters=models), [1, 4, 16, 64])
    assert states(fig5_baselines.judged(rows, 4.0)) == ["fail", "fail", "fail"]
    names = ("x", fig5_baselines.OPTIMAL, fig5_baselines.CHEAPER)
    needless = pd.DataFrame([{"epsilon": one, "setting": name, "loss": 4.0} for one in (1.0, 4.0) for name in names])
    assert states(fig5_baselines.judged(needless, 4.0))[2] == "pass"


# Figure 6
def test_curves_are_u_shaped_and_steepest_in_the_batch(tmp_path):
    given = {"lab": lab(table(tmp_path)), "epsilons": [1, 4, 16], "times": [0.1, 1, 10], "times_of_compute": [0.1, 1, 10]}
    assert states(answered(declared("mckenna_fig6_full_grid", fig6_full_grid.mckenna_fig6_full_grid, **given))) == ["pass"] * 4
    rows = [("size", 1.0, axis, float(place), 5.0 - place) for axis in fig6_full_grid.AXES for place in range(6)]
    rows += [("size", 2.0, "model", float(place), 9.0 * place) for place in range(6)]
    only_fall = pd.DataFrame(rows, columns=["varies", "value", "axis", "place", "loss"])
    assert states(fig6_full_grid.judged(only_fall)) == ["fail"] * 4, "curves that only fall, and most for the model"


# Figure 11
def test_model_and_data_grow_alike_where_their_exponents_are_alike(tmp_path):
    alike = lambda m, t, r: 2 + 300 / m**0.5 + 500 / (128 * t) ** 0.5 + r  # noqa: E731
    path, computes = table(tmp_path, alike, ratios=NOISELESS), {"lowest_compute": 2e11, "highest_compute": 4e12}
    of_lab = fig11_nonprivate.mckenna_fig11_nonprivate
    tables = answered(declared("mckenna_fig11_nonprivate", of_lab, lab=lab(path, **computes), tolerance=0.15))
    assert states(tables) == ["pass"] and all(
        row["tokens"] * row["model"] == pytest.approx(row["compute"] / 6) for row in tables[0].as_json()["rows"]
    )
    unlike = lambda m, t, r: 2 + 3 / m**0.2 + 624 / (128 * t) ** 0.8 + r  # noqa: E731
    unlike_lab = lab(table(tmp_path, unlike, ratios=NOISELESS), **computes)
    assert states(of_lab(lab=unlike_lab, tolerance=0.15)()) == ["fail"]
    # Steps are worth so much that as many as there are would be best: the model grows with compute only because it must.
    capped = lambda m, t, r: 2 + 3 / m**0.1 + 5000 / (128 * t) ** 0.8 + r  # noqa: E731
    capped_lab = lab(table(tmp_path, capped, ratios=NOISELESS), **computes)
    assert states(of_lab(lab=capped_lab, tolerance=0.15)()) == ["not run"]
    with pytest.raises(ConfigError, match="without noise"):
        of_lab(lab=lab(table(tmp_path)), tolerance=0.15)()


# Figures 16 to 19
def of_form(form, gamma=0.9):
    fit = Fit(form, {"E": 2.0, "A": 40.0, "B": 30.0, "C": 2.0, "alpha": 0.4, "beta": 0.3, "gamma": gamma, "alpha2": -0.05}, 0.0, 1)
    return lambda m, t, r: fit.loss(m, 128 * t, r)


def test_the_second_form_beats_the_first_unless_the_first_is_the_truth(tmp_path):
    second, first = (
        lab(table(tmp_path / form, of_form(form), deviation=0.005, ratios=RATIOS[::2]), steps_above=1500) for form in _folders(tmp_path)
    )
    options = {"published": {"alpha": 0.7}, "starts": 2, "samples": 1}
    l1 = answered(declared("mckenna_fig16_parametric_l1", parametric.mckenna_parametric, lab=second, form="L1", **options))
    l2 = answered(declared("mckenna_fig18_parametric_l2", parametric.mckenna_parametric, lab=second, form="L2", **options))
    assert (states(l1), states(l2)) == (["pass"], ["pass"])
    coefficients = l2[0].as_json()["rows"]
    assert coefficients[4]["coefficient"] == "alpha" and coefficients[4]["published"] == 0.7
    assert {row["is_identified"] for row in coefficients} <= {True, False}
    points = parametric.points_of(first.measured()[0], first)
    fits = [parametric.parametric.fit(form, *points.columns, starts=2) for form in ("L1", "L2")]
    assert states([parametric.judged_l1(points, fits[0]), parametric.judged_l2(*fits)]) == ["fail", "fail"]


def _folders(tmp_path):
    for form in ("L2", "L1"):
        (tmp_path / form).mkdir()
    return ("L2", "L1")


def test_a_parametric_fit_takes_the_rate_that_ends_lowest(tmp_path):
    from tests.scaling.synthetic import Measurements, rows_of

    last = max(row["step"] for row in rows_of(form_l2))
    # Ahead until the last step.
    slow = [row | {"learning_rate": 0.001, "loss": row["loss"] + (1 if row["step"] == last else -1)} for row in rows_of(form_l2)]
    Measurements.from_rows([*slow, *rows_of(form_l2)]).write(tmp_path / "both.csv")
    measured = lab(tmp_path / "both.csv").measured()[0]
    points = parametric.points_of(measured, lab(steps_above=0))
    turned = parametric.points_of(measured.where(np.arange(len(measured))[::-1]), lab(steps_above=0))
    assert turned.loss[::-1].tolist() == points.loss.tolist(), "the rows of a table have no order"
    assert len(points.loss) == len(slow) and points.loss == pytest.approx([row["loss"] for row in rows_of(form_l2)])
    assert len(np.unique(points.run)) == 45


def test_losses_straight_in_the_transformed_ratio_pass_and_losses_straight_in_its_logarithm_fail(tmp_path):
    straight = lambda m, t, r: 2 + 30 / (128 * t) ** 0.3 + 3 * transformed(r)  # noqa: E731
    ratios = 2.0 ** -np.arange(6, 18)[::-1]
    own = lab(table(tmp_path, straight, ratios=ratios))
    assert states(answered(declared("mckenna_fig17_transform", fig17_transform.mckenna_fig17_transform, lab=own))) == ["pass"]
    of_log = pd.DataFrame({"model": "a", "noise_batch_ratio": ratios, "transformed": transformed(ratios), "loss": 10 + np.log(ratios)})
    assert states(fig17_transform.judged(of_log)) == ["fail"]


def test_the_best_model_by_the_second_form_grows_more_slowly_with_noise_where_noise_costs_large_models(tmp_path):
    own = lab(table(tmp_path, of_form("L2"), ratios=RATIOS[::2]), steps_above=1000, computes=5)
    of_lab = fig19_parametric_optimum.mckenna_fig19_parametric_optimum
    analysis = declared("mckenna_fig19_parametric_optimum", of_lab, lab=own, ratios=[2**-14, 2**-9, 2**-6], times=100, starts=2)
    assert states(answered(analysis)) == ["pass"]
    kind = {"E": 2.0, "A": 40.0, "B": 30.0, "C": 2.0, "alpha": 0.4, "beta": 0.3, "gamma": 0.9, "alpha2": 0.05}
    rows = fig19_parametric_optimum.optimal(Fit("L2", kind, 0.0, 1), [2**-14, 2**-6], [1e12, 1e13, 1e14, 1e15], 32.0, (2e3, 1e9))
    assert states(fig19_parametric_optimum.judged(rows, (2e3, 1e9))) == ["fail"]


def test_slopes_of_best_models_are_apart_only_if_their_intervals_are():
    computes, models = np.tile([1e12, 1e13, 1e14, 1e15], 2), (2e3, 1e9)
    for scatter, state in ((0.01, "pass"), (1.5, "fail")):
        off_the_line = np.exp(scatter * np.array([1, -1, -1, 1, -1, 1, 1, -1]))
        exponent = np.repeat([0.4, 0.3], 4)
        rows = pd.DataFrame({"ratio": np.repeat([1e-5, 1e-2], 4), "compute": computes})
        rows["model"] = 1e4 * (computes / 1e12) ** exponent * off_the_line
        found = fig19_parametric_optimum.judged(rows, models)
        assert states(found) == [state] and "ratio 1e-05: 0.40 (95 %: " in found.statistic


# Figure 15, section 6 and Table 3
def test_one_loss_at_unequal_advantage():
    for advantage, loss, state in ((0.2, 4.01, "pass"), (0.101, 4.01, "fail"), (0.2, 5.0, "fail"), (0.2, None, "not run")):
        rows = pd.DataFrame({"setting": "a", "batch_size": [256, 512], "advantage": [0.1, advantage], "loss": [4.0, loss]})
        assert states(fig15_vulnerability.judged(rows)) == [state]


@pytest.fixture
def fixed_batches_alone(monkeypatch):
    """Fixed batches, in closed form: nothing is solved."""

    def exact(self, size, batch_size, steps):
        noise = math.sqrt(math.ceil(steps * batch_size / size)) / closed_form.mu(self.epsilon, self.delta)
        return NoiseBatchRatio(batch_size, math.inf, noise, 1)

    monkeypatch.setattr(Calibration, "exact", exact)


def test_batches_of_one_epsilon_are_compared_by_loss_and_by_what_an_attacker_gains(tmp_path, fixed_batches_alone):
    settings = [["a", 1.0e13, 173120.0]]
    options = {"settings": settings, "epsilon": 8, "size": 100_000, "tokens": 32, "batch_sizes": [512, 1024, 2048]}
    of_lab = fig15_vulnerability.mckenna_fig15_vulnerability
    tables = answered(declared("mckenna_fig15_vulnerability", of_lab, lab=lab(table(tmp_path)), **options))
    rows, (forms,) = (one.as_json()["rows"] for one in tables[:2])
    assert all(row["loss"] is not None and 0 < row["advantage"] < 1 for row in rows) and min(row["excess"] for row in rows) == 0
    assert forms["by_risks"] == pytest.approx(forms["by_profiles"], abs=2e-3) == forms["by_trade_off"]
    without = declared("mckenna_fig15_vulnerability", of_lab, lab=lab(), **options)
    assert states(answered(without)) == ["not run"]
    (picture,) = without.pictures(without())
    assert len(picture.panels) == 1, "no loss is known without measurements"


def test_what_is_said_of_a_billion_parameters_needs_no_measurement(tmp_path, fixed_batches_alone):
    options = {"parameters": 1e9, "compute": 1e23, "size": 10**9, "epsilon": 10, "tokens": 512, "batch_sizes": [262_144, 1_048_576]}
    noise, printed, *_ = answered(declared("mckenna_billion_claim", billion_claim.mckenna_billion_claim, lab=lab(), **options))
    assert [row["epochs"] for row in noise.as_json()["rows"]] == pytest.approx([32.55] * 2, rel=0.01) and len(printed.rows) == 4
    assert states(billion_claim.mckenna_billion_claim(lab=lab(table(tmp_path)), **options)()) == ["pass"]


def test_a_billion_parameters_are_flagged_where_they_were_not_trained():
    assert billion_claim.judged(fitted().surface, 1e9).state == "pass"
    assert billion_claim.judged(fitted(parameters={"a": 1e8, "b": 2e9}).surface, 1e9).state == "fail"


def test_the_loss_of_training_rows_rises_with_the_batch_or_does_not():
    rows = pd.DataFrame({"batch_size": [128, 512, 8192, 8192], "loss": [3.6, 4.0, 4.1, 3.5]})
    assert states(table3_trainset.judged(rows[:3])) == ["pass"] and states(table3_trainset.judged(rows[:1])) == ["not run"]
    assert states(table3_trainset.judged(rows)) == ["fail"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 0}, "analysis.lab.size=0: must be positive"),
        ({"epsilons": [4, -1]}, "analysis.lab.epsilons"),
        ({"sizes": []}, "nothing would be computed"),
        ({"baselines": []}, "nothing would be computed"),
        ({"lowest_compute": 0}, "lowest_compute=0: must be positive"),
        ({"lowest_compute": 2e30}, "no range"),
        ({"highest_compute": float("nan")}, "highest_compute=nan"),
        ({"steps_above": -1}, "must not be negative"),
        ({"reach": 0.5}, "reach=0.5"),
    ],
)
def test_numbers_of_a_lab_that_cannot_be_are_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        lab(**changed)


@pytest.mark.parametrize(
    ("analysis", "options"),
    [
        (fig19_parametric_optimum.mckenna_fig19_parametric_optimum, {"ratios": [0.0], "times": 4, "starts": 8}),
        (fig6_full_grid.mckenna_fig6_full_grid, {"epsilons": [1], "times": []}),
        (
            fig15_vulnerability.mckenna_fig15_vulnerability,
            {"settings": [["a", 1e9, 1e5]], "epsilon": 8, "size": 9, "tokens": 8, "batch_sizes": [0]},
        ),
    ],
)
def test_numbers_of_an_analysis_that_cannot_be_are_refused(analysis, options):
    with pytest.raises(ConfigError, match="must be positive|nothing would be computed"):
        analysis(lab=lab(), **options)
