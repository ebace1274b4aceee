"""Each laptop verdict of Anil et al. 2021 on made-up runs that show the shape, that do not, and that are missing."""

import dataclasses
import functools

import pytest

from dpx.pages.read_runs import Run
from dpx_papers.anil2021 import rules
from dpx_papers.anil2021.sgd32x_ref import anil_sgd32x_ref
from tests.report import made

judged = functools.partial(made.verdict, "anil2021")


def states(*arguments, **tables) -> list[str]:
    return [part.state for part in judged(*arguments, **tables).parts]


def test_without_evidence_nothing_is_judged() -> None:
    found = {item.number: judged(item.number).state for item in made.declared("anil2021").items}
    assert list(found) == [f"A{number}" for number in range(1, 14)] and set(found.values()) == {"not run"}


def _baseline(accuracy: float, steps: int = 100) -> list[Run]:
    private = made.replicates("anil_epsilon_sweep", [0.2, 0.3], noise__epsilon=5.36)
    return [*private, made.run("anil_nonprivate_baseline", accuracy, mechanism="NoPrivacy", steps=steps)]


def test_nonprivate_baseline() -> None:
    assert judged("A1", _baseline(0.4)).state == "pass"
    assert judged("A1", _baseline(0.25)).state == "fail"
    assert judged("A1", _baseline(0.4, steps=50)).state == "not run", "other steps do not compare"


def test_runs_on_another_text_do_not_compare() -> None:
    *private, plain = _baseline(0.25)
    other = [dataclasses.replace(run, facts=run.facts | {"corpus": "other"}) for run in private]
    assert judged("A1", [*other, plain]).state == "not run"


def _trials(best_decay: float, count: int = 30) -> list[Run]:
    decays = [best_decay, *(0.1 + 0.001 * number for number in range(count - 1))]
    accuracies = [0.5, *([0.3] * (count - 1))]
    return [made.run("anil_tune_32k", a, n, optimizer__weight_decay=d) for n, (a, d) in enumerate(zip(accuracies, decays, strict=True))]


def test_tuning() -> None:
    assert judged("A2", _trials(0.5)).state == "pass"
    assert judged("A2", _trials(0.4)).state == "fail"
    assert judged("A2", _trials(0.5, count=29)).state == "not run"


def test_table1_best() -> None:
    assert judged("A3", [*_trials(0.5), *made.replicates("anil_table1_best", [0.45, 0.52])]).state == "pass"
    assert judged("A3", [*_trials(0.5), *made.replicates("anil_table1_best", [0.45, 0.46])]).state == "fail"
    assert judged("A3", [*_trials(0.5), *made.replicates("anil_table1_best", [0.9])]).state == "not run"


def _decays(ends: dict[float, float], accuracy: dict[float, float], gradient: dict[float, float]) -> list[Run]:
    found = []
    for decay, end in ends.items():
        curves = {"weights/matrices": ((5, 10.0), (100, end)), "grad/example_norm": ((50, 9.0), (100, gradient[decay]))}
        values = [accuracy[decay] + shift for shift in (-0.01, 0.0, 0.01)]
        found += made.replicates("anil_weight_decay", values, curves=curves, optimizer__weight_decay=decay)
    return found


GOOD = ({0.0: 30.0, 0.1: 20.0, 1.0: 9.0}, {0.0: 0.1, 0.1: 0.2, 1.0: 0.3}, {0.0: 1.0, 0.1: 2.0, 1.0: 3.0})


def test_weight_decay() -> None:
    assert states("A4", _decays(*GOOD)) == ["pass"] * 5
    flat = {decay: 9.0 for decay in GOOD[0]}
    assert states("A4", _decays(flat, *GOOD[1:])) == ["fail", "fail", "pass", "pass", "pass"]
    turned = {decay: 40.0 - end for decay, end in GOOD[0].items()}
    assert states("A4", _decays(turned, *GOOD[1:]))[1:3] == ["fail", "fail"]
    equal = {decay: 0.2 for decay in GOOD[1]}
    assert states("A4", _decays(GOOD[0], equal, equal))[3:] == ["fail", "fail"]


def _epsilons(means: dict[float, float]) -> list[Run]:
    pairs = ((epsilon, [mean - 0.01, mean, mean + 0.01]) for epsilon, mean in means.items())
    return [run for epsilon, values in pairs for run in made.replicates("anil_epsilon_sweep", values, noise__epsilon=epsilon)]


def test_epsilon_sweep() -> None:
    assert states("A6", _epsilons({1.08: 0.1, 3: 0.2, 5.36: 0.25, 10.6: 0.3})) == ["pass", "pass"]
    assert states("A6", _epsilons({1.08: 0.1, 3: 0.12, 10.6: 0.9})) == ["pass", "fail"], "convex"
    assert states("A6", _epsilons({1.08: 0.3, 3: 0.2, 10.6: 0.1})) == ["fail", "fail"]
    assert judged("A6", _epsilons({1.08: 0.1, 3: 0.2})).state == "not run"


def test_batch_sweep() -> None:
    good = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0), 256: ([0.3, 0.31], 4.0)})
    assert states("A7", good) == ["pass", "pass", "pass"]
    crossed = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.1, 0.11], 0.9)})
    assert states("A7", crossed) == ["fail", "pass", "fail"]
    rising = [
        dataclasses.replace(run, curves={"grad/snr": ((25, 1.0), (100, 2.0 + float(run.config["batch_schedule.size"])))}) for run in good
    ]
    assert states("A7", rising)[1] == "fail"
    assert judged("A7", good[:2]).state == "not run"


def test_one_crossing_is_named() -> None:
    runs = made.sweep({16: ([0.1], 1.0), 64: ([0.2], 2.0)})
    curve = tuple((step, 0.0 if step == 45 else value) for step, value in runs[1].curves["grad/snr"])
    runs[1] = dataclasses.replace(runs[1], curves={"grad/snr": curve})
    part = judged("A7", runs).parts[0]
    assert part.state == "fail" and part.statistic.startswith("19 of 20") and part.statistic.endswith("step 45")


def test_largest_batch() -> None:
    sweep = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0)})
    assert judged("A8", [*sweep, *made.replicates("anil_2m_batch", [0.2, 0.21])]).state == "pass"
    assert judged("A8", [*sweep, *made.replicates("anil_2m_batch", [0.0, 0.0, 0.0])]).state == "fail"
    assert judged("A8", made.replicates("anil_2m_batch", [0.3])).state == "not run"


@pytest.mark.parametrize(
    ("accuracies", "slope", "expected"),
    [
        ([0.298, 0.3, 0.302], 0.1, ["pass", "pass", "pass", "arithmetic"]),
        ([0.20, 0.21, 0.22], 0.1, ["fail", "fail", "pass", "arithmetic"]),
        ([0.298, 0.3, 0.302], 1.5, ["pass", "pass", "fail", "arithmetic"]),
        ([0.3], 0.1, ["not run", "pass", "pass", "arithmetic"]),
    ],
)
def test_batch_schedule(accuracies: list[float], slope: float, expected: list[str]) -> None:
    assert states("A9", made.schedule(accuracies, slope)) == expected


def test_batch_schedule_without_the_large_batch() -> None:
    runs = [run for run in made.schedule([0.3, 0.3]) if run.config["batch_schedule.sizes"] != str(made.LARGE)]
    assert judged("A9", runs).state == "not run"


def test_examples_to_an_accuracy_are_counted_along_the_schedule() -> None:
    assert rules.reached([(10, 0.1), (20, 0.3)], 0.2) == 15 and rules.reached([(10, 0.1)], 0.2) == float("inf")
    assert rules.reached([(10, 0.1), (20, 0.3)], 0.05) == 5
    assert [rules.examples(step, [2, 3, 4], 10) for step in (5, 10, 25, 40)] == [10, 20, 70, 130] and rules.examples(7, [4], 10) == 28


def test_the_text_s_own_sizes_do_not_save_what_the_text_says() -> None:
    rows = [{"saved": value} for value in (0.17578125, 0.10546875, 0.140625, 0.140625)]
    assert states("A10", schedule_savings=rows) == ["fail", "arithmetic"]
    assert states("A10", schedule_savings=[{"saved": 0.14}, *rows[1:]]) == ["pass", "fail"]


def test_published_sizes_are_computed_from_declarations() -> None:
    _, sizes = anil_sgd32x_ref(batch_size=2_097_152, reference_batch_size=65_536)()
    rows = sizes.as_json()["rows"]
    assert [row["parameters"] for row in rows] == [336_226_108, 337_741_058]
    assert rows[0]["FLOPs"] == pytest.approx(1.08e22, rel=0.01)


SIGMA = {32768: 0.4941, 65536: 0.5227, 131072: 0.5581, 262144: 0.6064, 524288: 0.6812, 1048576: 0.8263, 2097152: 1.2151}


def _sigmas(shift: float = 1.0, pld: float = 5.0) -> list[dict]:
    columns = ("batch size", "sigma (rdp)", "epsilon (rdp)", "epsilon (pld)")
    return [dict(zip(columns, (batch, shift * sigma, 5.36, pld), strict=True)) for batch, sigma in SIGMA.items()]


def test_accounting() -> None:
    assert states("A11", sigma_by_batch=_sigmas()) == ["arithmetic", "arithmetic"]
    assert judged("A11", sigma_by_batch=_sigmas()).state == "arithmetic", "it is shown, and not counted"
    assert states("A11", sigma_by_batch=_sigmas(1.02)) == ["fail", "arithmetic"]
    assert states("A11", sigma_by_batch=_sigmas(pld=5.4)) == ["arithmetic", "fail"]
    assert states("A11", sigma_by_batch=_sigmas()[:6])[0] == "not run"


def _invariance(kept: float, gradient: float, lost: float) -> list[dict]:
    columns = ("alpha", "relative change of the output", "alpha * gradient norm / unscaled", "claim holds")
    rows = [(1.0, 0.0, 1.0, True), (2.0, kept, gradient, True), (1.0, 0.0, 1.0, False), (2.0, lost, 0.5, False)]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_scale_invariance() -> None:
    assert states("A5", scale_invariance=_invariance(1e-9, 1.0, 0.3)) == ["pass", "pass", "pass"]
    assert states("A5", scale_invariance=_invariance(0.1, 1.0, 0.3)) == ["fail", "pass", "pass"]
    assert states("A5", scale_invariance=_invariance(1e-9, 2.0, 0.3)) == ["pass", "fail", "pass"]
    assert states("A5", scale_invariance=_invariance(1e-9, 1.0, 1e-9)) == ["pass", "pass", "fail"]


def test_throughput_is_private_over_plain_at_each_batch() -> None:
    plain = {"clipping": "plain", "physical_batch": 8, "ratio_to_plain": 1.0}
    assert judged("A12", benchmark=[plain]).state == "not run"
    both = judged("A12", benchmark=[plain, plain | {"clipping": "book_keeping", "ratio_to_plain": 0.8}])
    assert both.state == "pass" and "8: 0.8" in both.parts[0].statistic
    slow = judged("A12", benchmark=[plain, plain | {"clipping": "book_keeping", "ratio_to_plain": 0.7}])
    assert slow.state == "fail"
