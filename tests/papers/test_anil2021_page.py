"""Each laptop verdict of Anil et al. 2021 on made-up runs that show the shape, that do not, and that are not there."""

import dataclasses

import pytest

from dpx.papers.anil2021.report import batches, exact, sweeps
from dpx.papers.anil2021.report.verdicts import verdicts
from dpx.report.rows import Run, runs_of
from dpx.report.shape import Verdict
from tests.report import made


def _states(verdict: Verdict) -> list[str]:
    return [part.state for part in verdict.parts]


def test_without_runs_only_arithmetic_is_judged() -> None:
    states = {verdict.item: verdict.state for verdict in verdicts([])}
    assert list(states) == [f"A{number}" for number in range(1, 14)]
    assert {item for item, state in states.items() if state != "not run"} == {"A10", "A13"}
    assert {states["A10"], states["A13"]} == {"pass"}


def _baseline(accuracy: float, steps: int = 100) -> list[Run]:
    private = made.replicates("anil_epsilon_sweep", [0.2, 0.3], noise__epsilon=5.36)
    return [*private, made.run("anil_nonprivate_baseline", accuracy, mechanism="NoPrivacy", steps=steps)]


def test_nonprivate_baseline() -> None:
    assert sweeps.nonprivate_baseline(_baseline(0.4)).state == "pass"
    assert sweeps.nonprivate_baseline(_baseline(0.25)).state == "fail"
    assert sweeps.nonprivate_baseline(_baseline(0.4, steps=50)).state == "not run", "other steps do not compare"


def _trials(best_decay: float, count: int = 30) -> list[Run]:
    decays = [best_decay, *([0.1] * (count - 1))]
    accuracies = [0.5, *([0.3] * (count - 1))]
    return [made.run("anil_tune_32k", a, n, optimizer__weight_decay=d) for n, (a, d) in enumerate(zip(accuracies, decays, strict=True))]


def test_tuning() -> None:
    assert sweeps.tuning(_trials(0.5)).state == "pass"
    assert sweeps.tuning(_trials(0.4)).state == "fail"
    assert sweeps.tuning(_trials(0.5, count=29)).state == "not run"


def test_table1_best() -> None:
    assert sweeps.table1_best([*_trials(0.5), *made.replicates("anil_table1_best", [0.45, 0.52])]).state == "pass"
    assert sweeps.table1_best([*_trials(0.5), *made.replicates("anil_table1_best", [0.45, 0.46])]).state == "fail"
    assert sweeps.table1_best([*_trials(0.5), *made.replicates("anil_table1_best", [0.9])]).state == "not run"


def _decays(ends: dict[float, float], accuracy: dict[float, float], gradient: dict[float, float]) -> list[Run]:
    found = []
    for decay, end in ends.items():
        curves = {"weights/matrices": ((5, 10.0), (100, end)), "grad/example_norm": ((50, 9.0), (100, gradient[decay]))}
        values = [accuracy[decay] + shift for shift in (-0.01, 0.0, 0.01)]
        found += made.replicates("anil_weight_decay", values, curves=curves, optimizer__weight_decay=decay)
    return found


GOOD = ({0.0: 30.0, 0.1: 20.0, 1.0: 9.0}, {0.0: 0.1, 0.1: 0.2, 1.0: 0.3}, {0.0: 1.0, 0.1: 2.0, 1.0: 3.0})


def test_weight_decay() -> None:
    assert _states(sweeps.weight_decay(_decays(*GOOD))) == ["pass"] * 5
    flat = {decay: 9.0 for decay in GOOD[0]}
    assert _states(sweeps.weight_decay(_decays(flat, *GOOD[1:]))) == ["fail", "fail", "pass", "pass", "pass"]
    turned = {decay: 40.0 - end for decay, end in GOOD[0].items()}
    assert _states(sweeps.weight_decay(_decays(turned, *GOOD[1:])))[1:3] == ["fail", "fail"]
    equal = {decay: 0.2 for decay in GOOD[1]}
    assert _states(sweeps.weight_decay(_decays(GOOD[0], equal, equal)))[3:] == ["fail", "fail"]


def _epsilons(means: dict[float, float]) -> list[Run]:
    pairs = ((epsilon, [mean - 0.01, mean, mean + 0.01]) for epsilon, mean in means.items())
    return [run for epsilon, values in pairs for run in made.replicates("anil_epsilon_sweep", values, noise__epsilon=epsilon)]


def test_epsilon_sweep() -> None:
    assert _states(sweeps.epsilon_sweep(_epsilons({1.08: 0.1, 3: 0.2, 5.36: 0.25, 10.6: 0.3}))) == ["pass", "pass"]
    assert _states(sweeps.epsilon_sweep(_epsilons({1.08: 0.1, 3: 0.12, 10.6: 0.9}))) == ["pass", "fail"], "convex"
    assert _states(sweeps.epsilon_sweep(_epsilons({1.08: 0.3, 3: 0.2, 10.6: 0.1}))) == ["fail", "fail"]
    assert sweeps.epsilon_sweep(_epsilons({1.08: 0.1, 3: 0.2})).state == "not run"


def test_batch_sweep() -> None:
    good = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0), 256: ([0.3, 0.31], 4.0)})
    assert _states(batches.batch_sweep(good)) == ["pass", "pass", "pass"]
    crossed = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.1, 0.11], 0.9)})
    assert _states(batches.batch_sweep(crossed)) == ["fail", "pass", "fail"]
    rising = [dataclasses.replace(run, curves={"grad/snr": ((50, 1.0), (100, 2.0 + run.number("batch_schedule.size")))}) for run in good]
    rising = [dataclasses.replace(run, curves={"grad/snr": ((25, 1.0), *run.curves["grad/snr"])}) for run in rising]
    assert _states(batches.batch_sweep(rising))[1] == "fail"
    assert batches.batch_sweep(good[:2]).state == "not run"


def test_one_crossing_is_named() -> None:
    runs = made.sweep({16: ([0.1], 1.0), 64: ([0.2], 2.0)})
    curve = tuple((step, 0.0 if step == 45 else value) for step, value in runs[1].curves["grad/snr"])
    runs[1] = dataclasses.replace(runs[1], curves={"grad/snr": curve})
    part = batches.batch_sweep(runs).parts[0]
    assert part.state == "fail" and part.statistic.startswith("19 of 20") and part.statistic.endswith("step 45")


def test_largest_batch() -> None:
    sweep = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0)})
    assert batches.largest_batch(sweep).state == "pass"
    assert batches.largest_batch([*sweep, *made.replicates("anil_2m_batch", [0.0, 0.0, 0.0])]).state == "fail"
    assert batches.largest_batch(made.replicates("anil_2m_batch", [0.3])).state == "not run"


@pytest.mark.parametrize(
    ("accuracies", "slope", "states"),
    [
        ([0.28, 0.3, 0.32], 0.1, ["pass", "pass", "pass"]),
        ([0.20, 0.21, 0.22], 0.1, ["fail", "pass", "pass"]),
        ([0.28, 0.3, 0.32], 1.5, ["pass", "fail", "pass"]),
        ([0.3], 0.1, ["not run", "pass", "pass"]),
    ],
)
def test_batch_schedule(accuracies: list[float], slope: float, states: list[str]) -> None:
    assert _states(batches.batch_schedule(made.schedule(accuracies, slope))) == states


def test_batch_schedule_without_the_large_batch() -> None:
    runs = [run for run in made.schedule([0.3, 0.3]) if run.config["batch_schedule.sizes"] != "[512]"]
    assert batches.batch_schedule(runs).state == "not run"


def test_savings_of_the_four_readings() -> None:
    assert exact.savings() == pytest.approx(
        {"step_1875": 17.578125, "first_rise_at_0": 10.546875, "linear_7500": 14.0625, "five_stage_1500": 14.0625}
    )


def test_published_sizes_are_computed_from_declarations() -> None:
    values = {row.metric: float(row.value) for row in exact.computed()}
    assert values["computed/parameters"] == 336_226_108
    assert values["computed/parameters at 32,000 word-pieces"] == 337_741_058
    assert values["computed/FLOPs"] == pytest.approx(1.08e22, rel=0.01)
    assert runs_of(exact.computed())


def _analysis(name: str, table: str, rows: list[dict]) -> list[Run]:
    numbers = {
        f"{table}[{n}].{key}": float(value) for n, row in enumerate(rows) for key, value in row.items() if not isinstance(value, str)
    }
    facts = {f"{table}[{n}].{key}": value for n, row in enumerate(rows) for key, value in row.items() if isinstance(value, str)}
    return [Run(name, "0", "-", 0, {}, facts, numbers, {})]


def _accounting(factor: float, pld: float) -> list[Run]:
    rows = [{"batch size": b, "sigma (rdp)": s * factor, "epsilon (rdp)": 5.36, "epsilon (pld)": pld} for b, s in exact.SIGMA.items()]
    return _analysis("anil_accounting", "sigma_by_batch", rows)


def test_accounting() -> None:
    assert exact.accounting(_accounting(1.005, 4.5)).state == "pass"
    assert _states(exact.accounting(_accounting(1.02, 4.5))) == ["fail", "pass"]
    assert _states(exact.accounting(_accounting(1.0, 5.5))) == ["pass", "fail"]


def _invariance(joint: float, ratio: float, alone: float) -> list[Run]:
    rows = [("three tables together", joint, ratio, "True"), ("word table alone", alone, 1.4, "False")]
    columns = ("scaled by alpha", "relative change of the output", "alpha * gradient norm / unscaled", "claim holds")
    tables = [dict(zip(columns, row, strict=True)) | {"alpha": 2.0, "numbers": "float64"} for row in rows]
    return _analysis("anil_scale_invariance", "scale_invariance", tables)


def test_scale_invariance() -> None:
    assert exact.scale_invariance(_invariance(1e-9, 1.0, 0.3)).state == "pass"
    assert _states(exact.scale_invariance(_invariance(0.1, 1.0, 0.3))) == ["fail", "pass"]
    assert _states(exact.scale_invariance(_invariance(1e-9, 2.0, 0.3))) == ["fail", "pass"]
    assert _states(exact.scale_invariance(_invariance(1e-9, 1.0, 1e-9))) == ["pass", "fail"]


def test_throughput_ratio_is_private_over_plain() -> None:
    plain = {"clipping": "plain", "physical_batch": 8, "examples_per_s": 100.0}
    private = plain | {"clipping": "book_keeping", "examples_per_s": 80.0}
    alone = private | {"physical_batch": 16}
    assert exact.throughput(_analysis("laptop_anil_throughput", "benchmark", [plain])).state == "not run"
    both = _analysis("laptop_anil_throughput", "benchmark", [plain, private, alone])
    assert exact.throughput_ratios(both) == {8: pytest.approx(0.8)}
    assert exact.throughput(both).state == "pass"
