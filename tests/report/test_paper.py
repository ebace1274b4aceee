"""paper.yaml: what is wrong in it is refused in one line; what a rule selects, and each rule that no committed paper needs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpx.declaration import ConfigError
from dpx_papers.report import page, paper
from dpx_papers.report.evidence import Best, Evidence, Selection, column, row_of, rows_of
from dpx_papers.report.rules import Flat, Monotone, Rule, Slope, Trend, Within
from dpx_papers.report.sizes import LAPTOP
from tests.report import made

HEAD = "title: T\nheadline: heldout/loss\ncolumns: {heldout/loss: loss}\n"
ITEM = "  - {number: P1, experiment: anil_batch_sweep, title: T, kind: trains, verdict: [VERDICT]}\n"
RULE = "{rule: within, claim: c, value: heldout/mlm_accuracy, least: 0}"


def _read(home: Path, rule: str = RULE, head: str = HEAD, item: str = ITEM) -> paper.Paper:
    (home / "paper.yaml").write_text(f"{head}items:\n{item.replace('VERDICT', rule)}")
    return paper.read(home)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"head": HEAD + "titel: x\n"}, ["titel: unknown key", "Did you mean", "title"]),
        ({"rule": RULE.replace("least", "leest")}, ["P1.verdict.0.leest: unknown key", "least"]),
        ({"rule": RULE.replace("within", "withn")}, ["P1.verdict.rule=withn: no such rule", "Use above, agrees, analysis"]),
        (
            {"rule": RULE.replace("within", "dpx_papers.report.rules.Withn")},
            ["P1.verdict.0._target_=dpx_papers.report.rules.Withn", "cannot be loaded"],
        ),
        ({"rule": RULE.replace("least: 0", "least: a")}, ["P1.verdict.0.least=a: expected a number"]),
        ({"rule": RULE.replace("claim: c, ", "")}, ["P1.verdict.0.claim: this key has no value"]),
        ({"item": ITEM.replace("kind: trains", "kind: train")}, ["P1.kind=train: no such kind of item", "Use trains"]),
        (
            {"item": ITEM.replace("anil_batch_sweep", "anil_batch_sweeps")},
            ["experiment anil_batch_sweeps: no recipe has", "anil_batch_sweep"],
        ),
        ({"rule": RULE.replace("claim", "experiment: anil_nowhere, claim")}, ["P1: experiment anil_nowhere: no recipe has that name"]),
        ({"item": ITEM.replace("T,", "T, where: x,")}, ["P1.where: unknown key"]),
        ({"item": "  - P1\n"}, ["paper.yaml: is not a mapping with a list of items"]),
        ({"head": "title: a: b\n"}, ["paper.yaml: is not YAML that can be read", "line 1"]),
        ({"head": "[\n"}, ["paper.yaml: is not YAML that can be read"]),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(parts: dict[str, str], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, **parts)
    line = str(refused.value)
    assert "\n" not in line and [word for word in words if word not in line] == []


def _judged(declared: paper.Paper, evidence: Evidence) -> str:
    (item,) = declared.items
    return page.verdict(item, evidence).state


@pytest.mark.parametrize("missing", ["value: heldout/mlm_accuracyy", "value: heldout/mlm_accuracy, where: {optimizer.weight_decy: 1}"])
def test_a_column_that_no_run_has_is_refused_in_one_line(missing: str, tmp_path: Path) -> None:
    runs = made.replicates("anil_batch_sweep", [0.1, 0.2], optimizer__weight_decay=1.0)
    declared = _read(tmp_path, RULE.replace("value: heldout/mlm_accuracy", missing))
    assert _judged(declared, Evidence(tmp_path)) == "not run"
    with pytest.raises(ConfigError) as refused:
        _judged(declared, Evidence(tmp_path, runs))
    line = str(refused.value)
    assert (
        ".P1: column " in line
        and "none of the 2 rows selected has it" in line
        and "Name a column that exists, such as" in line
        and "\n" not in line
    )


def test_a_table_that_its_analysis_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="table: sigmas: anil_accounting has no such table. Use sigma_by_batch"):
        Selection(experiment="anil_accounting", table="sigmas").rows(
            Evidence(tmp_path, tables={"anil_accounting": {"sigma_by_batch": made.Table.from_rows("sigma_by_batch", [{"x": 1}])}}), ""
        )


def test_a_number_that_published_csv_does_not_have_is_refused() -> None:
    (item,) = [item for item in made.declared("anil2021").items if item.number == "A13"]
    with pytest.raises(ConfigError, match="published.csv has no such metric for anil_sgd32x_ref"):
        item.verdict[0].parts(Evidence(Path("nowhere")), item.experiment)


def test_columns_of_a_run() -> None:
    curve = tuple((step, float(step)) for step in range(10, 101, 10))
    rows = rows_of([row_of(made.run("x", 0.5, curves={"grad/norm": curve}, optimizer__weight_decay=0.1))])
    names = ("grad/norm@first", "grad/norm@last", "grad/norm@peak", "grad/norm@mean", "grad/norm@0.5:1", "grad/norm@last/first")
    assert [column(rows, name)[0] for name in names] == [10, 100, 100, 55, 80, 10]
    assert column(rows, "optimizer.weight_decay") == [0.1] and column(rows, "heldout/mlm_accuracy") == [0.5]
    with pytest.raises(ConfigError, match="no such feature of a curve"):
        column(rows, "grad/norm@lats")


def test_a_selection_keeps_values_ends_and_all_but_one(tmp_path: Path) -> None:
    runs = [made.run("x", 0.1 * size, model__name=name, batch_schedule__size=size) for size in (1, 2, 3) for name in ("a", "b")]

    laptop = Evidence(tmp_path, runs).at(LAPTOP)

    def sizes(**where: object) -> list[float]:
        chosen = Selection(where={key.replace("__", "."): value for key, value in where.items()}).rows(laptop, "x")
        return list(chosen["batch_schedule.size"])

    assert sizes(batch_schedule__size="max") == [3, 3] and sizes(batch_schedule__size="!min", model__name="a") == [2, 3]
    assert sizes(batch_schedule__size=2) == [2, 2] and sizes(model__name="!a") == [1, 2, 3]
    assert Selection(at_least=7).rows(laptop, "x").empty
    best = Best(value="heldout/mlm_accuracy", over="batch_schedule.size", each=["model.name"], lowest=True)
    assert list(best(rows_of(map(row_of, runs)))["batch_schedule.size"]) == [1, 1]


@pytest.mark.parametrize("rule", [{}, {"rule": "above", "than": {"where": {"model.name": "b"}}, "where": {"model.name": "a"}}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_run_that_diverged_is_not_left_out_of_a_claim(tmp_path: Path, rule: dict[str, Any], place: int) -> None:
    runs = [made.run("anil_batch_sweep", 0.5 + 0.1 * (n < 2), n, model__name="aab"[n]) for n in range(3)]
    wanted = yaml.safe_dump({"rule": "within", "claim": "c", "value": "heldout/mlm_accuracy"} | rule, default_flow_style=True, width=1000)
    declared = _read(tmp_path, wanted.strip())
    assert _judged(declared, Evidence(tmp_path, runs)) == "pass"
    runs[place] = dataclasses.replace(runs[place], finals=runs[place].finals | {"heldout/mlm_accuracy": float("nan")})
    (item,) = declared.items
    (part,) = page.verdict(item, Evidence(tmp_path, runs)).parts
    assert part.state == "fail" and part.statistic == "1 of 3 values are no numbers"


VALUES = {1.0: [1.0, 1.1], 2.0: [2.0, 2.1], 4.0: [4.0, 4.1]}


def _state(rule: Rule, values: dict[float, list[float]]) -> str:
    rows = [{"x": x, "y": y} for x, ys in values.items() for y in ys]
    evidence = Evidence(Path("nowhere"), tables={"e": {"t": made.Table.from_rows("t", rows)}} if rows else {})
    return rule.parts(evidence, "e")[0].state


def test_flat_is_equivalent_within_a_margin_at_every_value() -> None:
    rule, near = (
        Flat(claim="c", table="t", value="y", by="x", margin=0.2),
        {1.0: [1.0, 1.02, 1.01], 2.0: [1.05, 1.04, 1.06], 3.0: [1.02, 1.03, 1.02]},
    )
    assert _state(rule, VALUES) == "fail" and _state(rule, near) == "pass"
    assert _state(dataclasses.replace(rule, margin=0.04), near) == "fail"
    assert _state(rule, {1: [0.6, 1.4], 2: [0.7, 1.3]}) == "fail", "equal means of scattered runs show nothing"
    assert _state(rule, {1: [1.0], 2: [1.0]}) == "not run" and _state(rule, {}) == "not run"
    by_factor = Flat(claim="c", table="t", value="y", by="x", factor=2.0)
    assert _state(by_factor, {1: [1.0], 2: [2.0]}) == "pass" and _state(by_factor, {1: [1.0], 2: [2.0], 3: [4.0]}) == "fail"
    for margin, factor in ((None, None), (1.0, 2.0)):
        with pytest.raises(ConfigError, match="has no margin and no factor, or both"):
            Flat(claim="c", margin=margin, factor=factor)


@pytest.mark.parametrize(("least", "most", "state"), [(0.9, 1.1, "pass"), (1.5, 2.5, "fail")])
def test_slope_is_that_of_logarithms(least: float, most: float, state: str) -> None:
    assert _state(Slope(claim="c", table="t", value="y", by="x", least=least, most=most), VALUES) == state


def test_monotone_takes_means_and_allows_ties_where_declared() -> None:
    rule, tied = Monotone(claim="c", table="t", value="y", by="x"), {1.0: [1.0], 2.0: [1.0], 4.0: [2.0]}
    assert _state(rule, VALUES) == "pass" and _state(rule, tied) == "fail"
    assert _state(Monotone(claim="c", table="t", value="y", by="x", ties=True), tied) == "pass"
    assert _state(Monotone(claim="c", table="t", value="y", by="x", falls=True), VALUES) == "fail"
    by_a_step = Monotone(claim="c", table="t", value="y", by="x", ties=True, step=2.0)
    assert _state(by_a_step, {1.0: [4.0], 2.0: [2.0], 4.0: [2.0]}) == "pass" and _state(by_a_step, {1.0: [4.0], 2.0: [1.0]}) == "fail"
    falls_by_a_step = dataclasses.replace(by_a_step, falls=True)
    assert _state(falls_by_a_step, {1.0: [2.0], 2.0: [4.0]}) == "pass" and _state(falls_by_a_step, {1.0: [1.0], 2.0: [4.0]}) == "fail"


def test_a_trend_holds_at_each_value_of_another_column() -> None:
    rows = [{"x": x, "y": x * sign, "each": sign} for x in (1.0, 2.0, 3.0) for sign in (1.0, -1.0) for _ in range(3)]
    rule = Trend(claim="c", table="t", value="y", by="x", each="each")
    states = [
        rule.parts(Evidence(Path("nowhere"), tables={"e": {"t": made.Table.from_rows("t", own)}}), "e")[0].state
        for own in (rows, [row for row in rows if row["each"] > 0])
    ]
    assert states == ["fail", "pass"]


def test_one_row_is_enough_where_the_best_of_them_is_meant() -> None:
    rule = Within(claim="c", table="t", value="y", least=4.0, one_is_enough=True)
    assert _state(rule, VALUES) == "pass" and _state(dataclasses.replace(rule, least=5.0), VALUES) == "fail"


def test_what_cannot_be_judged_did_not_run() -> None:
    rows = [{"x": x, "y": 1.0, "model": model} for x, model in ((1, "a"), (2, "b"))]
    evidence = Evidence(Path("nowhere"), tables={"e": {"t": made.Table.from_rows("t", [*rows, {"x": 3, "z": 1.0}])}})
    rules = [Monotone(claim="c", table="t", value="y", by="x", each="model"), Within(claim="c", table="t", value="y", minus="z")]
    assert [rule.parts(evidence, "e")[0].state for rule in rules] == ["not run", "not run"]
    assert _state(Slope(claim="c", table="t", value="y", by="x"), {0: [1.0], 1: [2.0]}) == "not run"


@pytest.mark.parametrize(("above", "most", "state"), [(0.9, 4.1, "pass"), (1.0, 5.0, "fail"), (0.0, 4.0, "fail")])
def test_within_takes_every_row(above: float, most: float, state: str) -> None:
    assert _state(Within(claim="c", table="t", value="y", above=above, most=most), VALUES) == state
    assert _state(Within(claim="c", table="t", value="y", minus="x", least=0.0, most=0.2), VALUES) == "pass"


def test_a_claim_on_an_accuracy_has_its_interval_where_all_rows_read_as_many() -> None:
    rule, values, rows = (
        Flat(claim="c", value="task/test/macro_f1", margin=1.0),
        {"a": [0.5, 0.6]},
        rows_of([{"task/test/rows": 100.0}] * 2),
    )
    assert rule.spreads(values, rows) == "a: 0.55 ± 0.071 (n = 2) [0.452 to 0.644; 100 rows]"
    assert rule.spreads(values, rows_of([{"task/test/rows": 100.0}, {"task/test/rows": 90.0}])) == "a: 0.55 ± 0.071 (n = 2)"
    assert Flat(claim="c", value="task/test/macro_f1_low", margin=1.0).spreads(values, rows) == "a: 0.55 ± 0.071 (n = 2)"
