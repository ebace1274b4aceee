"""Every claim that an analysis judges itself, and that counts, passes on made-up rows with it true and fails on rows with it false."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpx_papers.du2021 import headline, label_leak, model_size_gap, postprocessing_counterexample, prop2_gradient_bias, table2_accounting
from dpx_papers.du2021 import table3_datasets as table3
from dpx_papers.mckenna2025 import (
    allocation,
    calibration_profiles,
    diminishing_batch,
    fig3_compute,
    fig4_vector_fields,
    fig5_baselines,
    fig6_full_grid,
    fig11_nonprivate,
    fig15_vulnerability,
    fig17_transform,
    fig19_parametric_optimum,
    fit_semiparametric,
    flops_model,
    parametric,
    table1_models,
    table2_saturation,
    table3_trainset,
)
from dpx_papers.mckenna2025.verdicts import Slope
from dpx_papers.report.rules import Analysis
from dpx_papers.report.shape import Part
from dpx_papers.scaling.parametric import Fit, transformed
from dpx_papers.yin2022 import tokenizer_leak
from dpx_papers.yin2022.corpus import legal_table1_corpus
from tests.papers.mckenna_surfaces import fitted, form_l2
from tests.report import made

# Claims on made-up rows, and the states that they must have there.
Judged = tuple[Part | Sequence[Part], str]
COMPUTES = [1e12, 1e13, 1e14, 1e15]


def fit_of_the_grid(_: Path) -> Iterator[Judged]:
    for truth, states in ((form_l2, "pass pass pass"), (lambda m, t, r: 10 - form_l2(m, t, r), "fail fail pass")):
        found = fitted(truth)
        yield fit_semiparametric.judged(found.grid, found.surface), states


def allocations(_: Path) -> Iterator[Judged]:
    # The rule of 20 tokens a parameter has models of 1e5 and 1e6 there.
    for small, large, states in ((0.2, 0.5, "pass pass"), (2.0, 3.0, "fail pass"), (0.5, 0.2, "pass fail")):
        pairs = itertools.product((1.2e12, 1.2e14), ((1.0, small), (4.0, large)))
        rows = [(1e6, epsilon, compute, share * allocation.by_the_rule(compute)) for compute, (epsilon, share) in pairs]
        yield allocation.judged(pd.DataFrame(rows, columns=["size", "epsilon", "compute", "smallest_model"]), (1e3, 1e8)), states


def allocations_by_records(_: Path) -> Iterator[Judged]:
    # Of one number of records alone the model is too large in the second case, where one pool of pairs would pass.
    for few, many, states in ((0.2, 0.5, "pass pass"), (0.5, 2.0, "fail pass"), (0.5, 0.2, "pass fail")):
        axes = itertools.product((1.2e12, 1.2e13, 1.2e14), (1.0, 4.0), ((1e6, few), (1e7, many)))
        rows = [(size, epsilon, compute, share * allocation.by_the_rule(compute)) for compute, epsilon, (size, share) in axes]
        yield allocation.judged(pd.DataFrame(rows, columns=["size", "epsilon", "compute", "smallest_model"]), (1e3, 1e8)), states


def knees(_: Path) -> Iterator[Judged]:
    for power, is_flat, states in ((1, True, "pass pass pass"), (-1, True, "pass fail fail"), (1, False, "fail not-run not-run")):
        axes = itertools.product((1.0, 2.0), (1.0, 4.0))
        yield (
            fig3_compute.judged([{"size": n, "epsilon": e, "saturates_at": 1e12 * (n * e) ** power, "is_flat": is_flat} for n, e in axes]),
            states,
        )


def ratios_of_tokens(_: Path) -> Iterator[Judged]:
    rising, slower, falling = Slope(0.5, 0.4, 0.6, 9), Slope(0.1, 0.0, 0.2, 9), Slope(-0.1, -0.2, 0.0, 9)
    yield fig3_compute.judged_ratio({1.0: rising, 64.0: slower}), "pass pass"
    yield fig3_compute.judged_ratio({1.0: falling, 64.0: slower}), "fail fail"


def arrows(_: Path) -> Iterator[Judged]:
    axes = {"size": [2**k for k in range(20, 23)], "batch_size": [2**k for k in range(8, 11)], "epsilon": [1, 2, 4]}
    place = {"size": 2.0**21, "batch_size": 2.0**9, "epsilon": 2.0}
    # Sampling and noise each cost something; and a product, in which each doubling takes off three quarters and never less.
    costs: list[tuple[Callable[..., float], str]] = [
        (lambda size, batch_size, epsilon: 1 / batch_size + 2**12 / (size * epsilon), "pass pass pass"),
        (lambda size, batch_size, epsilon: (size * batch_size * epsilon) ** -2.0, "fail fail fail"),
    ]
    for ratio, states in costs:
        planes = {names: fig4_vector_fields.plane(ratio, axes, place, *names) for names in fig4_vector_fields.PLANES}
        yield fig4_vector_fields.judged(planes), states


def fixed_settings(_: Path) -> Iterator[Judged]:
    names = ("x", "y", fig5_baselines.OPTIMAL, fig5_baselines.CHEAPER)
    for first, second, states in (
        ((4.0, 5.0, 3.9, 4.0), (5.0, 4.0, 3.9, 4.0), "pass pass pass"),
        ((4.0, 5.0, 4.5, 5.0), (4.0, 5.0, 4.5, 5.0), "fail fail fail"),
    ):
        rows = [(1.0, *pair) for pair in zip(names, first, strict=True)] + [(4.0, *pair) for pair in zip(names, second, strict=True)]
        yield fig5_baselines.judged(pd.DataFrame(rows, columns=["epsilon", "setting", "loss"]), 4.0), states


def saturating(_: Path) -> Iterator[Judged]:
    for power, states in ((1, "pass pass"), (-1, "fail fail")):
        rows = [{"size": n, "epsilon": e, "compute": (n * e) ** power} for n, e in itertools.product((1.0, 2.0), (1.0, 4.0))]
        yield table2_saturation.judged(pd.DataFrame(rows)), states


def curves(_: Path) -> Iterator[Judged]:
    def of(loss: Callable[[int], float], steepest: str) -> pd.DataFrame:
        pairs = itertools.product(fig6_full_grid.AXES, range(6))
        rows = [("size", 1.0, axis, float(place), (3 if axis == steepest else 1) * loss(place)) for axis, place in pairs]
        return pd.DataFrame(rows, columns=["varies", "value", "axis", "place", "loss"])

    yield fig6_full_grid.judged(of(lambda place: 4 + (place - 2) ** 2, "batch_size")), "pass pass pass pass"
    yield fig6_full_grid.judged(of(lambda place: 9 - place, "model")), "fail fail fail fail"


def training_rows(_: Path) -> Iterator[Judged]:
    for losses, state in (([3.6, 4.0, 4.1], "pass"), ([4.1, 4.0, 3.6], "fail")):
        yield table3_trainset.judged(pd.DataFrame({"batch_size": [128, 512, 8192], "loss": losses})), state


def without_noise(_: Path) -> Iterator[Judged]:
    for exponent, state in ((0.5, "pass"), (0.9, "fail")):
        models = [1e4 * (compute / 1e12) ** exponent * scatter for compute, scatter in zip(COMPUTES, (1, 1.02, 0.98, 1), strict=True)]
        yield fig11_nonprivate.judged(pd.DataFrame({"compute": COMPUTES, "model": models, "is_censored": False}), 0.15), state


def advantages(_: Path) -> Iterator[Judged]:
    # The second setting reaches one loss twice, at batches that were computed or between them; or not; or at one advantage.
    rising = [0.1, 0.13, 0.16]
    for losses, own, state in (
        ([4.0, 4.005, 4.5], rising, "pass"),
        ([4.4, 4.0, 4.8], rising, "pass"),
        ([4.0, 4.2, 4.4], rising, "fail"),
        ([4.4, 4.0, 4.8], [0.1, 0.101, 0.102], "fail"),
    ):
        first = pd.DataFrame({"setting": "a", "batch_size": [256, 512, 1024], "advantage": rising, "loss": [4.0, 4.001, 4.5]})
        yield fig15_vulnerability.judged(pd.concat([first, first.assign(setting="b", advantage=own, loss=losses)])), state


_KIND = {"E": 2.0, "A": 40.0, "B": 30.0, "C": 2.0, "alpha": 0.4, "beta": 0.3, "gamma": 0.9}


def first_form(_: Path) -> Iterator[Judged]:
    fit = Fit("L1", _KIND, 0.0, 1)
    parameters, examples, ratio = np.full(10, 1e5), np.geomspace(1e3, 1e7, 10)[::-1], np.full(10, 1e-3)
    predicted = fit.loss(parameters, examples, ratio)
    # Losses ascend: the last two are the highest fifth.
    for error, state in ((np.repeat([1.01, 1.2], [8, 2]), "pass"), (np.full(10, 1.05), "fail")):
        points = parametric.Points(parameters, examples, ratio, predicted * error, np.arange(10))
        yield parametric.judged_l1(points, fit), state


def second_form(_: Path) -> Iterator[Judged]:
    for huber, state in ((0.5, "pass"), (0.95, "fail")):
        yield parametric.judged_l2(Fit("L1", _KIND, 1.0, 1), Fit("L2", _KIND | {"alpha2": -0.05}, huber, 1)), state


def straight(_: Path) -> Iterator[Judged]:
    ratios = 2.0 ** -np.arange(6, 18)
    for losses, state in ((3 + transformed(ratios), "pass"), (10 + np.log(ratios), "fail")):
        rows = {"model": "a", "noise_batch_ratio": ratios, "transformed": transformed(ratios), "loss": losses}
        yield fig17_transform.judged(pd.DataFrame(rows)), state


def growth(_: Path) -> Iterator[Judged]:
    for exponents, state in (((0.6, 0.2), "pass"), ((0.2, 0.6), "fail")):
        rows = [
            (ratio, compute, 1e4 * (compute / 1e12) ** e) for ratio, e in zip((1e-5, 1e-2), exponents, strict=True) for compute in COMPUTES
        ]
        yield fig19_parametric_optimum.judged(pd.DataFrame(rows, columns=["ratio", "compute", "model"]), (1e3, 1e9)), state


def counts_of_models(_: Path) -> Iterator[Judged]:
    for factor, state in ((1.01, "pass"), (1.1, "fail")):
        rows = [{"vocabulary": 30522, "model": name, "printed": count} for name, count in (("tiny", 4e6), ("mini", 1e7))]
        readings = {reading: [4e6 * factor, 1e7 * factor] for reading in table1_models.READINGS}
        found = pd.DataFrame(rows).assign(**readings)
        yield [table1_models.judged(found, "printed", words) for words in ("Table 4", "Table 1")], f"{state} {state}"


def turning(_: Path) -> Iterator[Judged]:
    yield diminishing_batch.judged(1.04), "pass"
    yield diminishing_batch.judged(0.5), "fail"


def shares(_: Path) -> Iterator[Judged]:
    for power, state in ((-1, "pass"), (1, "fail")):
        columns = {"noise": 0.01, "book_keeping_kept": 0.1, "book_keeping_grams": 0.1}
        yield flops_model.judged([{"model": "a", "S": n, "clip_instantiated": 0.1 * n**power} | columns for n in (1, 2, 4)]), state


def profiles(_: Path) -> Iterator[Judged]:
    for crossing, state in ((8.0, "pass"), (2.0, "fail")):
        epsilons = np.array([1.0, 4.0, 8.0, 12.0])
        rows = {"epsilon": epsilons, "small": 1.0, "large": 1 + (crossing - epsilons) / 100}
        yield calibration_profiles.judged(pd.DataFrame(rows), 8.0), state


def accounting(_: Path) -> Iterator[Judged]:
    for apart, claimed, states in ((0.0, 5.0, "pass pass pass"), (0.5, 1.0, "fail fail fail")):
        of_li = pd.DataFrame([{"task": "SST-2", "epsilon_rdp": 3.0, "clt_difference": apart, "pld_difference": apart}])
        yield table2_accounting.judged(of_li, pd.DataFrame([{"epsilon": 4.0, "clt_claimed": claimed}])), states


def rows_of_glue(_: Path) -> Iterator[Judged]:
    for printed, state in ((67_349, "pass"), (67_350, "fail")):
        subject = table3.Subject(task="SST-2", data="glue_sst2", printed_rows=printed, rows=67_349, printed_length=9.94)
        yield _verdicts(table3.dpfp_table3_datasets(subjects=[subject])())[0], state


def biases(_: Path) -> Iterator[Judged]:
    for errors, bias, states in ((1.0, 0.1, "pass pass pass"), (9.0, 9.0, "fail fail fail")):
        names = ("clean loss", "mean noisy loss", "sum of clipped gradients")
        columns = {
            "noise_multiplier": 1.0,
            "squared_bias": bias,
            "squared_bias_error": 1.0,
            "relative_bias": 0.1,
            "along_in_errors": errors,
        }
        yield prop2_gradient_bias.judged(pd.DataFrame([{"reference": name} | columns for name in names])), states


def words(_: Path) -> Iterator[Judged]:
    for recall, wrong, states in ((1.0, 0, "pass pass pass"), (0.9, 1, "fail fail fail")):
        rows = [{"numbers": "float64", "noise_multiplier": one, "recall": recall, "wrong": wrong, "recovered": 9} for one in (0.3, 10.0)]
        yield postprocessing_counterexample.judged(pd.DataFrame(rows)), states


def labels(_: Path) -> Iterator[Judged]:
    for exact, accuracy, states in ((2, 0.7, "pass pass"), (1, 0.9, "fail fail")):
        guesses = [{"accuracy": accuracy, "error": 0.01, "bound_by_profile": 0.8, "bound_by_epsilon": 0.95}]
        yield label_leak.judged(pd.DataFrame([{"steps": 2, "exact_steps": exact}]), pd.DataFrame(guesses)), states


def gaps_by_size(_: Path) -> Iterator[Judged]:
    claim = {"claim": "a gap", "printed_epsilon": 3, "printed": 1.0}
    for gaps, apart, reverse, states in (((2.0, 1.0), 0.0, [], "pass pass pass"), ((1.0, 2.0), 0.5, [{"excess": 0.1}], "fail fail fail")):
        rows = pd.DataFrame([{"printed_epsilon": 3, "parameters": n, "mean_gap": gap} for n, gap in enumerate(gaps)])
        compared = pd.DataFrame([claim | {"from_table_2": 1.0 + apart, "difference": apart}])
        yield model_size_gap.judged(rows, compared, reverse), states


def abstract(folder: Path) -> Iterator[Judged]:
    printed = (made.EXPERIMENTS / "du2021" / "published.csv").read_text()
    (line,) = [line for line in printed.splitlines() if '"RoBERTa-large, DP-FP, printed as epsilon 3, SST-2"' in line]
    for name, text, mean, states in (
        ("true", printed, 91.34, "pass pass"),
        ("false", printed.replace(line, line.replace("95.07", "85.07")), 99.0, "fail fail"),
    ):
        (folder / f"{name}.csv").write_text(text)
        given = {"model": "RoBERTa-large", "mean": mean, "over_dp_sgd": 3.81, "below_non_private": 0.90}
        yield _verdicts(headline.dpfp_headline(published=str(folder / f"{name}.csv"), **given)()), states


def corpus(_: Path) -> Iterator[Judged]:
    for total, examples, states in ((3.0, 95, "pass pass"), (4.0, 60, "fail fail")):
        printed = [["a", 40, 1.0], ["b", 60, 2.0]]
        given = {"printed_totals": [total], "examples": examples, "heldout_fraction": 0.05, "files": []}
        yield _verdicts(legal_table1_corpus(printed=printed, **given)())[:2], states


def names_in_vocabularies(_: Path) -> Iterator[Judged]:
    for own, public, states in ((True, False, "pass pass"), (False, True, "fail fail")):
        kinds = ((tokenizer_leak.FITTED, own), (tokenizer_leak.PUBLIC, public))
        yield (
            tokenizer_leak.judged(pd.DataFrame([{"vocabulary": v, "name": "n", "times": 9, "is_token": found} for v, found in kinds])),
            states,
        )


def _verdicts(tables: Any) -> list[Part]:
    (table,) = [table for table in tables if table.name == "verdicts"]
    return [Part(**row) for row in table.as_json()["rows"]]


ANALYSES: dict[str, Callable[[Path], Iterator[Judged]]] = {
    "mckenna_fit_semiparametric": fit_of_the_grid,
    "mckenna_fig1_allocation": allocations,
    "mckenna_fig3ab_compute": knees,
    "mckenna_fig3c_token_ratio": ratios_of_tokens,
    "mckenna_fig4_vector_fields": arrows,
    "mckenna_fig5_baselines": fixed_settings,
    "mckenna_table2_saturation": saturating,
    "mckenna_fig6_full_grid": curves,
    "mckenna_table3_trainset": training_rows,
    "mckenna_fig11_nonprivate": without_noise,
    "mckenna_fig13_allocation_by_n": allocations_by_records,
    "mckenna_fig15_vulnerability": advantages,
    "mckenna_fig16_parametric_l1": first_form,
    "mckenna_fig17_transform": straight,
    "mckenna_fig18_parametric_l2": second_form,
    "mckenna_fig19_parametric_optimum": growth,
    "mckenna_table1_models": counts_of_models,
    "mckenna_diminishing_batch": turning,
    "mckenna_flops_model": shares,
    "mckenna_calibration_profiles": profiles,
    "dpfp_table2_accounting": accounting,
    "dpfp_table3_datasets": rows_of_glue,
    "dpfp_prop2_gradient_bias": biases,
    "dpfp_postprocessing_counterexample": words,
    "dpfp_label_leak": labels,
    "dpfp_model_size_gap": gaps_by_size,
    "dpfp_headline": abstract,
    "legal_table1_corpus": corpus,
    "legal_tokenizer_leak": names_in_vocabularies,
}


@functools.cache
def counted() -> dict[str, set[int]]:
    """The places of the claims that count, by the analysis that judges them; of an analysis without `claims`, all that are committed."""
    found: dict[str, set[int]] = {}
    for home in ("anil2021", "mckenna2025", "du2021", "yin2022"):
        tables = {path.stem.removeprefix("laptop_"): path for path in (made.EXPERIMENTS / home / "analyses").glob("*.json")}
        for item in made.declared(home).items:
            for rule in item.verdict:
                name = rule.experiment or item.experiment
                if isinstance(rule, Analysis) and not rule.arithmetic:
                    claims = rule.claims or range(len(_committed(tables[name])))
                    found.setdefault(name, set()).update(claims)
    return found


def _committed(path: Path) -> list[dict[str, Any]]:
    tables = pd.read_json(path, typ="series")["tables"]
    return next(table["rows"] for table in tables if table["name"] == "verdicts")


@pytest.mark.parametrize("name", ANALYSES)
def test_a_claim_of_an_analysis_passes_where_it_is_true_and_fails_where_it_is_false(name: str, tmp_path: Path) -> None:
    states: dict[int, set[str]] = {}
    for judged, expected in ANALYSES[name](tmp_path):
        parts = [judged] if isinstance(judged, Part) else list(judged)
        assert [part.state.replace(" ", "-") for part in parts] == expected.split(), [part.statistic for part in parts]
        for place, part in enumerate(parts):
            states.setdefault(place, set()).add(part.state)
    assert all({"pass", "fail"} <= states[place] for place in counted()[name])


def test_no_analysis_with_a_claim_that_counts_is_without_a_case() -> None:
    assert counted().keys() == ANALYSES.keys()
