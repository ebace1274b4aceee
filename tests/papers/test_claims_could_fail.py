"""Every declared rule that counts passes on made-up rows with its claim true, and fails on rows with it false."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dpx.pages.analysis_tables import Table
from dpx.pages.read_runs import KIND, Run
from dpx_papers.mckenna2025 import rules as mckenna_rules
from dpx_papers.report import rows
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.paper import Item
from dpx_papers.report.rules import Agrees, Analysis, Rule
from dpx_papers.report.sizes import FULL, LAPTOP, PREFIX
from tests.report import made

F1, WORDS, CASEHOLD = "overruling/test/macro_f1", "pretrain/heldout/mlm_accuracy", "casehold/test/macro_f1"
ACCURACY, LOSS, GRID = "heldout/accuracy", "heldout/loss", "noise.noise_batch_ratio"
RATE, BATCH = "lr_schedule.learning_rate", "batch_schedule.size"
# What rules read: runs, or rows of tables by name. True and false of each rule, by the item and the place of the rule.
Rows = list[Run] | Mapping[str, list[dict[str, Any]]]
Case = tuple[Rows, Rows]


def runs(name: str, column: str, values: Mapping[Any, list[float]], knob: str = "", **more: Any) -> list[Run]:
    """Replicates by the value of a knob; `more` are other knobs, with two underscores for a dot."""
    found = []
    for value, measured in values.items():
        for replicate, one in enumerate(measured):
            run = made.run(name, 0.0, replicate, finals={column: one}, **more)
            found.append(dataclasses.replace(run, run=f"{run.run}-{value}", config=run.config | ({knob: str(value)} if knob else {})))
    return found


def chain(name: str, finals: Mapping[str, float], replicate: int = 0, **knobs: Any) -> Run:
    keys = {key.replace("__", "."): str(value) for key, value in knobs.items()}
    return Run(f"laptop_{name}", f"{knobs}{replicate}", str(knobs), replicate, keys, {"kind": KIND}, dict(finals), {})


def chains(name: str, column: str, values: Mapping[Any, list[float]], knob: str) -> list[Run]:
    return [chain(name, {column: one}, n, **{knob: key}) for key, measured in values.items() for n, one in enumerate(measured)]


def turned(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of the groups in reverse order."""
    return dict(zip(values, list(values.values())[::-1], strict=True))


def both(build: Callable[[Mapping[Any, list[float]]], list[Run]], values: Mapping[Any, list[float]]) -> Case:
    return build(values), build(turned(values))


TASK = {"data__name": "glue_sst2"}
BASE = TASK | {"model__name": "base"}


def above(upper: str, lower: str, knobs: Mapping[str, str], gap: float = 0.2) -> Case:
    def made_of(first: float, second: float) -> list[Run]:
        pairs = ((upper, first), (lower, second))
        return [run for name, value in pairs for run in runs(name, ACCURACY, {"": [value, value + 0.001, value + 0.002]}, **knobs)]

    return made_of(0.5 + gap, 0.5), made_of(0.5, 0.5 + gap)


def table(name: str, true: list[dict[str, Any]], false: list[dict[str, Any]]) -> Case:
    return {name: true}, {name: false}


def slope(name: str, x: str, y: str, rise: float, **more: Any) -> Case:
    true, false = ([{x: n, y: float(n) ** power} | more for n in (2, 4, 8)] for power in (rise, rise + 1))
    return table(name, true, false)


def miniature(upper: str, lower: str, gap: float = 0.2) -> Case:
    def made_of(first: float, second: float) -> list[dict[str, Any]]:
        rows = [(method, value + 0.001 * n) for method, value in ((upper, first), (lower, second)) for n in range(3)]
        return [{"task": "SST-2", "method": method, ACCURACY: value, "target": "one"} for method, value in rows]

    return table("miniature_runs", made_of(0.5 + gap, 0.5), made_of(0.5, 0.5 + gap))


PLAIN, DPFP, DPSGD, RGP, LAST = (
    "without privacy",
    "DP-FP, all trained",
    "DP-SGD, all trained",
    "RGP, layers and head",
    "DP-FP, last map alone",
)
SHOWN = [{"method": DPFP, "words_recovered": 1.0, "wrong": 0.0}]


def _du() -> dict[tuple[str, int], Any]:
    nonprivate, eps3, eps8 = (f"dpfp_table2_{name}" for name in ("nonprivate", "eps3", "eps8"))
    li, yu, rgp = (f"dpfp_table2_{name}" for name in ("dpsgd_li", "dpsgd_yu", "rgp_yu"))

    def over(accuracy: float) -> list[Run]:
        frequent = runs(eps3, "baseline/most_frequent_class", {"": [0.5]}, **TASK)
        return [dataclasses.replace(run, finals=run.finals | {ACCURACY: accuracy}) for run in frequent]

    sizes, rates = {8: [0.7], 32: [0.6], 128: [0.5]}, {5e-4: [0.7], 2e-3: [0.6], 8e-3: [0.5]}
    full_rates = {1e-6: [0.7], 1e-5: [0.6], 1e-4: [0.5]}
    norms, parts = (
        {0.1: [0.5, 0.51, 0.52], 0.4: [0.6, 0.61, 0.62], 1.0: [0.7, 0.71, 0.72]},
        {1: [0.5, 0.51], 4: [0.6, 0.61], 32: [0.7, 0.71]},
    )
    fig1, fig2 = "dpfp_fig1_batch_lr", "dpfp_fig2_clip"
    return {
        ("F1", 0): above(nonprivate, eps3, TASK),
        ("F1", 1): above(nonprivate, eps8, BASE),
        ("F1", 2): miniature(PLAIN, DPFP),
        ("F2", 0): above(nonprivate, li, TASK),
        ("F2", 1): miniature(PLAIN, DPSGD),
        ("F2", 2): above(nonprivate, li, TASK | {"model__name": "roberta_base"}),
        ("F3", 0): (above(nonprivate, yu, TASK)[0], above(nonprivate, yu, TASK, 0.05)[0]),
        ("F3", 1): (above(nonprivate, yu, BASE)[0], above(nonprivate, yu, BASE, 0.05)[0]),
        ("F4", 0): above(nonprivate, rgp, TASK),
        ("F4", 1): above(rgp, yu, TASK),
        ("F4", 2): above(nonprivate, rgp, BASE),
        ("F4", 3): above(rgp, yu, BASE),
        ("F5", 0): miniature(PLAIN, RGP),
        ("F5", 1): miniature(RGP, DPSGD),
        ("F6", 0): (miniature(PLAIN, DPFP, 0.01)[0], miniature(PLAIN, DPFP, 0.1)[0]),
        ("F6", 1): (over(0.7), over(0.4)),
        ("F6", 2): table("miniature_runs", SHOWN, [SHOWN[0] | {"words_recovered": 0.9}]),
        ("F6", 3): table("miniature_runs", SHOWN, [SHOWN[0] | {"wrong": 1.0}]),
        ("F7", 0): above(eps8, eps3, TASK),
        ("F9", 0): both(lambda values: runs(fig1, ACCURACY, values, BATCH, lr_schedule__learning_rate=1e-3), sizes),
        ("F9", 1): both(lambda values: runs(fig1, ACCURACY, values, RATE), rates),
        ("F9", 2): both(lambda values: runs(fig1, ACCURACY, values, RATE), full_rates),
        ("F10", 0): both(lambda values: runs(fig2, ACCURACY, values, "clip.clipping_norm", lr_schedule__learning_rate=1e-3), norms),
        ("F11", 0): both(lambda values: runs("dpfp_fig3_microbatch", ACCURACY, values, "mechanism.micro_batches"), parts),
        ("F12", 0): slope("memory", "d", "numbers_per_example", 1.0, method="DP-SGD"),
        ("F12", 1): slope("time", "d", "products_per_example", 1.0, method="DP-FP"),
        ("F12", 2): table("time", [{"method": "RGP", "over_SGD": 1.0}], [{"method": "RGP", "over_SGD": 1.2}]),
        ("F12", 3): table("memory", [{"method": "DP-FP", "over_d": 0.0}], [{"method": "DP-FP", "over_d": 0.5}]),
        ("F12", 4): table("slopes", [{"method": "DP-SGD", "beyond_SGD_over_d": 1.0}], [{"method": "DP-SGD", "beyond_SGD_over_d": 0.1}]),
        ("F12", 5): slope("slopes", "d", "numbers_beyond_SGD", 1.0, method="DP-SGD"),
        ("F12", 6): table("slopes", [{"method": "DP-FP", "beyond_SGD_over_d": 0.0}], [{"method": "DP-FP", "beyond_SGD_over_d": 0.5}]),
        ("F12", 7): slope("slopes", "w", "numbers_beyond_SGD", 1.0, method="RGP"),
        **{
            ("F12", place): slope("step", "m", "flops", 1.0, method=name, model="tiny")
            for place, name in ((8, "DP-FP"), (9, "DP-SGD"), (10, "RGP"))
        },
        ("F14", 0): table("noise_dimension", [{"d_over_k": 1.5e5}], [{"d_over_k": 10.0}]),
        ("F14", 1): table("noise_dimension", *([{"forward_norm": one, "mean_gradient_norm": 1.0}] for one in (0.5, 2.0))),
        ("F16", 0): table(
            "power_by_equation_11",
            *([{"epsilon_clt": 0.001, "power_ratio": one, "claimed_ratio": 0.03}] for one in (0.031, 0.5)),
        ),
        ("F16", 1): table(
            "power_by_equation_11",
            *([{"epsilon_clt": 1.73, "micro_batches": 32, "batch_size": 32, "power_ratio": one}] for one in (0.59, 0.03)),
        ),
        ("F16", 2): table("power_by_uses", [{"power_ratio": 1.0}], [{"power_ratio": 0.5}]),
        ("F17", 0): above(eps3, "dpfp_frozen_encoder", TASK),
        ("F17", 1): miniature(DPFP, LAST),
        ("F17", 2): tuple(
            [dataclasses.replace(run, facts=run.facts | {"epsilon/pld": one}) for run in runs("dpfp_frozen_encoder", ACCURACY, {"": [0.5]})]
            for one in ("31.4", "5.0")
        ),
    }


def snr(values: Mapping[Any, list[float]]) -> list[Run]:
    found = []
    for size, (high,) in values.items():
        found.append(made.run("legal_fig1a_snr_batch", 0.2, snr=lambda step, high=high: high / step, batch_schedule__size=size))
    return found


def along(falls: float) -> list[Run]:
    sizes = (32, 256, 2048)
    return [made.run("legal_fig1a_snr_batch", 0.2, snr=lambda step: 1 - falls * step / 200, batch_schedule__size=size) for size in sizes]


def of_rates(swings: tuple[float, ...], accuracies: tuple[float, ...]) -> list[Run]:
    found = []
    for rate, swing, accuracy in zip((1e-3, 2e-3, 5e-2), swings, accuracies, strict=True):
        ratio = functools.partial(_swinging, swing=swing)
        found.append(made.run("legal_fig1b_snr_lr", accuracy, snr=ratio, lr_schedule__learning_rate=rate))
    return found


def _swinging(step: int, swing: float) -> float:
    return 1 + swing * (-1) ** (step // 5)


def held(accuracies: tuple[float, ...]) -> list[Run]:
    pairs = zip((32, 256), accuracies, strict=True)
    return [made.run("legal_fig1a_snr_batch", accuracy, batch_schedule__size=size) for size, accuracy in pairs]


def clipped(share: float) -> list[Run]:
    return [made.run("legal_clip_sweep", 0.2, curves={"grad/clipped_fraction": ((100, share),)})]


def _benchmark(speeds: Mapping[tuple[str, int], float]) -> list[dict[str, Any]]:
    return [{"clipping": name, "physical_batch": size, "examples_per_s": value} for (name, size), value in speeds.items()]


def faster(name: str) -> Case:
    pairs = ((1.0, 2.0), (2.0, 1.0))
    return table("benchmark", *(_benchmark({("loop", 4): loop, (name, 4): other}) for loop, other in pairs))


def by_batch(name: str, rise: float, other: float) -> Case:
    return table("benchmark", *(_benchmark({(name, n): 10.0 * n**power for n in (1, 2, 4, 8)}) for power in (rise, other)))


def _yin() -> dict[tuple[str, int], Any]:
    def scored(**finals: float) -> list[Run]:
        return [chain("legal_table2_baselines", {key.replace("__", "/"): value for key, value in finals.items()})]

    noises = {"none": [0.8, 0.81], "s00001": [0.8, 0.82], "s01": [0.6, 0.61], "s05": [0.5, 0.51]}
    decays = {0.1: [0.5, 0.5001], 0.5: [0.5, 0.5002], 1.0: [0.5, 0.5001]}
    apart = {0.1: [0.5, 0.501], 0.5: [0.6, 0.601], 1.0: [0.7, 0.701]}
    small, sc, grid, decay = (f"legal_{name}" for name in ("table3_small_base", "table3_small_sc", "fig2_batch_lr", "table5_weight_decay"))
    batches = {256: [0.60], 1024: [0.61], 131072: [0.63], 524288: [0.64], 1048576: [0.63]}

    def of_batches(values: Mapping[Any, list[float]], rate: float = 0.001) -> list[Run]:
        return [chain(grid, {CASEHOLD: one}, point__batch=key, point__learning_rate=rate) for key, (one,) in values.items()]

    corners = [
        [
            chain(grid, {WORDS: high if batch == 2048 else 0.5}, n, point__batch=batch, point__learning_rate=rate)
            for batch, rate in ((32, 1e-4), (2048, 1e-3))
            for n in range(3)
        ]
        for high in (0.6, 0.4)
    ]
    plain = [made.run("legal_nonprivate_full", value, mechanism="NoPrivacy") for value in (0.4, 0.1)]
    private = held((0.2, 0.3))
    return {
        ("L2", 0): tuple(scored(sc_overruling__test__macro_f1=one, overruling__test__macro_f1=0.8) for one in (0.9, 0.7)),
        ("L3", 0): both(lambda values: chains(small, WORDS, values, "point.sigma"), noises),
        ("L3", 1): both(lambda values: chains(small, CASEHOLD, values, "point.sigma"), noises),
        ("L4", 0): both(lambda values: chains(sc, WORDS, values, "point.sigma"), noises),
        ("L4", 1): both(lambda values: chains(sc, CASEHOLD, values, "point.sigma"), noises),
        ("L5", 0): both(snr, {32: [0.1], 256: [0.3], 2048: [1.0]}),
        ("L5", 1): (along(1.0), along(-1.0)),
        ("L6", 0): (of_rates((0.1, 0.1, 0.6), (0.2, 0.3, 0.1)), of_rates((0.6, 0.1, 0.1), (0.2, 0.3, 0.1))),
        ("L6", 1): (of_rates((0.1, 0.1, 0.6), (0.2, 0.3, 0.1)), of_rates((0.1, 0.1, 0.6), (0.2, 0.3, 0.4))),
        ("L7", 0): (held((0.2, 0.3)), held((0.3, 0.2))),
        ("L7", 1): (corners[0], corners[1]),
        ("L7", 2): both(of_batches, {256: [0.60], 1024: [0.61], 131072: [0.63], 524288: [0.64]}),
        ("L7", 3): (of_batches(batches), of_batches(batches | {1048576: [0.7]})),
        ("L7", 4): tuple(of_batches({256: [one]}) + of_batches({256: [0.62]}, 5e-4) for one in (0.64, 0.6)),
        ("L8", 0): tuple([chain("legal_best", {WORDS: one, "pretrain/before": 0.5}, n) for n in range(3)] for one in (0.6, 0.4)),
        ("L9", 0): (chains(decay, WORDS, decays, "point.weight_decay"), chains(decay, WORDS, apart, "point.weight_decay")),
        ("L9", 1): (chains(decay, F1, decays, "point.weight_decay"), chains(decay, F1, apart, "point.weight_decay")),
        ("L9", 2): (chains(decay, CASEHOLD, decays, "point.weight_decay"), chains(decay, CASEHOLD, apart, "point.weight_decay")),
        ("L10", 0): (clipped(0.99), clipped(0.5)),
        ("L10", 1): (
            [run for norm in (0.01, 1.0) for run in made.replicates("legal_clip_sweep", [0.2, 0.201], clip__clipping_norm=norm)],
            [run for norm in (0.01, 1.0) for run in made.replicates("legal_clip_sweep", [norm / 5, norm / 5], clip__clipping_norm=norm)],
        ),
        **{("L12", place): faster(name) for place, name in enumerate(("vmap", "ghost", "book_keeping"))},
        **{("L12", 3 + place): by_batch(name, 0.5, 0.0) for place, name in enumerate(("vmap", "ghost", "book_keeping", "opacus_hooks"))},
        ("L12", 7): by_batch("loop", 0.0, 0.5),
        ("L13", 2): table("small_corpus", *([{"noise_multiplier": 0.1, "pld": one}] for one in (400.0, 50.0))),
        ("L15", 0): tuple([*private, run] for run in plain),
    }


def trials(best_decay: float) -> list[Run]:
    decays = [best_decay, *(0.1 + 0.001 * number for number in range(29))]
    return [made.run("anil_tune_32k", 0.5 if not n else 0.3, n, optimizer__weight_decay=decay) for n, decay in enumerate(decays)]


def decayed(
    ends: tuple[float, ...], accuracies: tuple[float, ...] = (0.1, 0.2, 0.3), gradients: tuple[float, ...] = (1.0, 2.0, 3.0)
) -> list[Run]:
    """Runs without decay, with little and with much; weights begin at a norm of 10."""
    found = []
    for decay, end, accuracy, gradient in zip((0.0, 0.1, 1.0), ends, accuracies, gradients, strict=True):
        drawn = {"weights/matrices": ((5, 10.0), (100, end)), "grad/example_norm": ((50, 9.0), (100, gradient))}
        values = [accuracy + shift for shift in (-0.01, 0.0, 0.01)]
        found += made.replicates("anil_weight_decay", values, curves=drawn, optimizer__weight_decay=decay)
    return found


def of_epsilons(*means: float) -> list[Run]:
    pairs = zip((1.08, 3, 10.6), means, strict=True)
    return [run for epsilon, mean in pairs for run in made.replicates("anil_epsilon_sweep", [mean, mean + 0.01], noise__epsilon=epsilon)]


def invariance(kept: float, gradient: float, lost: float) -> list[dict[str, Any]]:
    columns = ("alpha", "relative change of the output", "alpha * gradient norm / unscaled", "claim holds")
    lines = [(1.0, 0.0, 1.0, True), (2.0, kept, gradient, True), (1.0, 0.0, 1.0, False), (2.0, lost, 0.5, False)]
    return [dict(zip(columns, line, strict=True)) for line in lines]


def _anil() -> dict[tuple[str, int], Any]:
    def with_private(plain: float) -> list[Run]:
        return [*of_epsilons(0.2, 0.25, 0.3), made.run("anil_nonprivate_baseline", plain, mechanism="NoPrivacy")]

    def rising(run: Run) -> Run:
        return dataclasses.replace(run, curves={"grad/snr": ((25, 1.0), (100, 2.0 + float(run.config["batch_schedule.size"])))})

    baselines = with_private(0.4), with_private(0.25)
    shapes = (30.0, 20.0, 9.0), (9.0, 20.0, 30.0)
    ends = {16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0), 256: ([0.3, 0.31], 4.0)}
    good, crossed = made.sweep(ends), made.sweep(turned(ends))
    private, plain = ({"clipping": name, "physical_batch": 8} for name in ("book_keeping", "plain"))
    return {
        ("A1", 0): baselines,
        ("A1", 1): baselines,
        ("A2", 0): (trials(0.5), trials(0.4)),
        ("A3", 0): tuple([*trials(0.5), *made.replicates("anil_table1_best", [0.45, one])] for one in (0.52, 0.46)),
        **{("A4", place): tuple(decayed(shape) for shape in shapes) for place in range(3)},
        ("A4", 3): (decayed(shapes[0]), decayed(shapes[0], gradients=(3.0, 2.0, 1.0))),
        ("A4", 4): (decayed(shapes[0]), decayed(shapes[0], accuracies=(0.3, 0.2, 0.1))),
        ("A5", 0): table("scale_invariance", *(invariance(one, 1.0, 0.3) for one in (1e-9, 0.1))),
        ("A5", 1): table("scale_invariance", *(invariance(1e-9, one, 0.3) for one in (1.0, 2.0))),
        ("A5", 2): table("scale_invariance", *(invariance(1e-9, 1.0, one) for one in (0.3, 1e-9))),
        ("A6", 0): (of_epsilons(0.1, 0.2, 0.25), of_epsilons(0.25, 0.2, 0.1)),
        ("A6", 1): (of_epsilons(0.1, 0.2, 0.25), of_epsilons(0.1, 0.12, 0.9)),
        ("A7", 0): (good, crossed),
        ("A7", 1): (good, list(map(rising, good))),
        ("A7", 2): (good, crossed),
        ("A8", 0): tuple([*good, *made.replicates("anil_2m_batch", [one, one + 0.01])] for one in (0.3, 0.1)),
        ("A9", 0): tuple(made.schedule([one - 0.002, one, one + 0.002]) for one in (0.3, 0.21)),
        ("A9", 1): tuple(made.schedule([one - 0.002, one, one + 0.002]) for one in (0.3, 0.2)),
        ("A9", 2): tuple(made.schedule([0.298, 0.3, 0.302], one) for one in (0.1, 1.5)),
        ("A12", 0): table("benchmark", *([plain | {"ratio_to_plain": 1.0}, private | {"ratio_to_plain": one}] for one in (0.9, 0.7))),
    }


def losses(name: str, values: Mapping[tuple[Any, ...], float], *knobs: str) -> list[Run]:
    """Two replicates a loss; keys are values of `knobs`."""
    found = []
    for key, loss in values.items():
        given: dict[str, Any] = dict(zip((knob.replace(".", "__") for knob in knobs), key, strict=True))
        found += [made.run(name, 0.1, n, finals={LOSS: loss + 0.01 * n}, steps=100, **given) for n in range(2)]
    return found


def ends(name: str, at_smallest: tuple[float, ...], at_largest: tuple[float, ...]) -> list[Run]:
    """The losses of three batches at two ratios."""
    pairs = ((6e-5, at_smallest), (1e-3, at_largest))
    return losses(
        name, {(ratio, batch): loss for ratio, own in pairs for batch, loss in zip((32, 128, 512), own, strict=True)}, GRID, BATCH
    )


def _mckenna() -> dict[tuple[str, int], Any]:
    falls, rises = (5.0, 4.6, 4.3), (5.0, 5.2, 5.4)
    fig7, fig10, rates = "mckenna_fig7_physical_batch", "mckenna_fig10_decoder", "mckenna_fig12_lr_curves"
    knobs = ("model.name", GRID, RATE)
    low, high = {0.01: 5.0, 0.02: 4.0}, {0.01: 4.0, 0.02: 5.0}

    def of_rates(*of_ratios: Mapping[float, float]) -> list[Run]:
        pairs = zip((1e-4, 1e-3), of_ratios, strict=True)
        return losses(rates, {("a", ratio, rate): loss for ratio, own in pairs for rate, loss in own.items()}, *knobs)

    def of_models(best: float) -> list[Run]:
        pairs = itertools.product((("a", 0.01), ("b", best)), (0.01, 0.02, 0.04))
        return losses("mckenna_lr_nonprivate", {(model, 1e-12, rate): 4.0 + (rate != own) for (model, own), rate in pairs}, *knobs)

    shares = [[made.run("mckenna_clip_check", 0.1, curves={"grad/clipped_fraction": ((100, one),)})] for one in (0.99, 0.5)]
    # The fit predicts 5.0 for a and 4.5 for b (`FIT`).
    as_fitted = [
        losses("mckenna_fig5_direct", {("a", 4.0, 8): one, ("b", 4.0, 8): 4.7}, "model.name", "noise.epsilon", BATCH) for one in (5.1, 4.4)
    ]
    tuned = [{(32, 0.01): 5.0, (32, 0.02): 5.1, (128, 0.01): 5.3, (128, 0.02): one} for one in (5.2, 4.8)]
    return {
        ("M8", 0): tuple(as_fitted),
        ("M11", 0): (ends(fig7, falls, rises), ends(fig7, rises, rises)),
        ("M11", 1): (ends(fig7, falls, rises), ends(fig7, falls, falls)),
        ("M12", 0): tuple(losses("mckenna_fig8_batch_lr", own, BATCH, RATE) for own in tuned),
        ("M14", 0): tuple(ends("mckenna_fig9_batch_large", falls, own) for own in (rises, falls)),
        ("M15", 0): (ends(fig10, falls, rises), ends(fig10, rises, rises)),
        ("M15", 1): (ends(fig10, falls, rises), ends(fig10, falls, falls)),
        ("M18", 0): (of_rates(low, high), of_rates({0.01: 4.0, 0.04: 5.0}, {0.01: 5.0, 0.04: 4.0})),
        ("M18", 1): (of_rates(low, high), of_rates(low, low)),
        ("M19", 0): (of_models(0.01), of_models(0.04)),
        ("M28", 0): tuple(shares),
    }


CASES = {"anil2021": _anil(), "mckenna2025": _mckenna(), "du2021": _du(), "yin2022": _yin()}
FIT = {"a": 5.0, "b": 4.5}


def rule_of(name: str, number: str, place: int) -> tuple[Item, Rule]:
    (item,) = [one for one in made.declared(name).items if one.number == number]
    return item, item.verdict[place]


def state(name: str, item: Item, rule: Rule, given: Rows) -> str:
    """The state of the rule on runs or tables of the size that it judges."""
    size = FULL if rule.scale == "full" or (item.kind == "computed" and not rule.scale) else LAPTOP
    printed = rows.read_published(made.EXPERIMENTS / name / "published.csv")
    if isinstance(given, Mapping):
        source = PREFIX * (size == LAPTOP) + (rule.experiment or item.experiment)
        found = Evidence(
            Path("nowhere"), published=printed, tables={source: {key: Table.from_rows(key, own) for key, own in given.items()}}
        )
    else:
        own = [dataclasses.replace(run, experiment=run.experiment.removeprefix(PREFIX)) if size == FULL else run for run in given]
        found = Evidence(Path("nowhere"), own, printed)
    (part,) = rule.judged(found.at(size), item.experiment)
    return part.state


@pytest.mark.parametrize(("name", "number", "place"), [(name, *key) for name, cases in CASES.items() for key in cases])
def test_a_rule_passes_where_its_claim_is_true_and_fails_where_it_is_false(
    name: str, number: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mckenna_rules, "predictor", lambda _: lambda model, *_: FIT[model])
    item, rule = rule_of(name, number, place)
    assert [state(name, item, rule, given) for given in CASES[name][number, place]] == ["pass", "fail"], rule.claim


def _declared() -> Iterator[tuple[str, Item, int, Rule]]:
    for name in CASES:
        for item in made.declared(name).items:
            yield from ((name, item, place, rule) for place, rule in enumerate(item.verdict))


def test_no_rule_that_counts_is_without_a_case() -> None:
    """Those of analyses are in `test_analyses_could_fail`, those that compare printed values below."""
    counted = {
        (name, item.number, place)
        for name, item, place, rule in _declared()
        if not rule.arithmetic and not isinstance(rule, Agrees | Analysis)
    }
    assert counted == {(name, *key) for name, cases in CASES.items() for key in cases}


PRINTED = [(name, item, rule) for name, item, _, rule in _declared() if isinstance(rule, Agrees) and not rule.arithmetic]


@pytest.mark.parametrize(("name", "item", "rule"), PRINTED, ids=[f"{name}-{item.number}-{rule.quantity}" for name, item, rule in PRINTED])
def test_values_at_full_scale_are_held_against_what_is_printed(name: str, item: Item, rule: Agrees) -> None:
    printed = rows.read_published(made.EXPERIMENTS / name / "published.csv")
    lines = [
        line
        for line in printed
        if line.experiment == item.experiment and rule.value in line.metric and line.value and rule.quantity in line.quantity
    ]
    assert lines and rule.margin is not None
    for factor, expected in ((0.9, "pass"), (1.1, "fail")):
        tables: dict[str, list[dict[str, Any]]] = {}
        found = []
        for number, line in enumerate(lines):
            value = (float(line.value) + factor * rule.margin) / (100 if line.unit == "%" else 1)
            table_name, bracket, place = line.metric.partition("[")
            if bracket:
                at, _, key = place.partition("].")
                own = tables.setdefault(table_name, [{} for _ in range(10)])
                own[int(at)][key] = value
            knobs = dict(pair.split("=", 1) for pair in line.point.split() if "=" in pair)
            found.append(Run(item.experiment, str(number), "-", 0, knobs, {}, {line.metric: value}, {}))
        made_up = {item.experiment: {key: Table.from_rows(key, own) for key, own in tables.items()}}
        (part,) = rule.judged(Evidence(Path("nowhere"), found, printed, made_up).at(FULL), item.experiment)
        assert part.state == expected, part.statistic
