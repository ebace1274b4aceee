"""What needs no training at scale: arithmetic, accounting, scale invariance and the throughput ratio (A5, A10-A13)."""

from collections.abc import Sequence

from dpx.batch_schedule import Constant
from dpx.cost.flops import published_flops
from dpx.models.shape import Bert
from dpx.papers.anil2021.schedule_savings import SIZES, examples, readings
from dpx.report.rows import FINAL, Row, Run, cells
from dpx.report.shape import Part, Verdict

STEPS, LENGTH = 20_000, 128
# Section (e)1: percent saved against a constant 1,048,576.
SAVINGS = {"step_1875": 17.578, "first_rise_at_0": 10.547, "linear_7500": 14.0625, "five_stage_1500": 14.0625}
# Computed with RDP (Poisson, add/remove) at epsilon 5.36, delta 2.89e-9, n = 346e6, 20,000 steps; to 1 %.
SIGMA = {32768: 0.4941, 65536: 0.5227, 131072: 0.5581, 262144: 0.6064, 524288: 0.6812, 1048576: 0.8263, 2097152: 1.2151}
LARGE = Bert(name="large", layers=24, width=1024, heads=16, feed_forward=4096)


def savings() -> dict[str, float]:
    """Percent of examples that each reading saves against a constant largest batch over 20,000 steps."""
    constant = examples(Constant(size=SIZES[-1]), STEPS)
    return {option or "first_rise_at_0": 100 * (1 - examples(schedule, STEPS) / constant) for option, _, schedule in readings()}


def computed() -> list[Row]:
    """Full-scale numbers that are arithmetic on declarations: results.csv holds them beside the results of runs."""
    parameters = LARGE.parameters(30_522, next_sentence=True)
    values: dict[str, tuple[str, float]] = {
        "parameters": ("anil_table1_best", parameters),
        "parameters at 32,000 word-pieces": ("anil_table1_best", LARGE.parameters(32_000, next_sentence=True)),
        "GiB of float32 parameters": ("anil_table1_best", parameters * 4 / 2**30),
        "FLOPs": ("anil_2m_batch", published_flops(parameters, LENGTH) * 2_097_152 * STEPS),
        "batch over reference": ("anil_sgd32x_ref", 2_097_152 / 65_536),
    }
    values |= {f"percent saved, {name}": ("anil_schedule_variants", value) for name, value in savings().items()}
    return [Row(experiment, "arithmetic", 0, f"computed/{name}", FINAL, f"{value:.9g}") for name, (experiment, value) in values.items()]


def scale_invariance(runs: Sequence[Run]) -> Verdict:
    """The verdict on A5, scale invariance."""
    holds, not_holds = "unchanged output and gradient ∝ 1/α where the claim holds", "changed output for one table and for single matrices"
    rows = [row for row in cells(runs, "anil_scale_invariance", "scale_invariance") if row["alpha"] != 1]
    kept = [row for row in rows if row["claim holds"] == "True"]
    lost = [row for row in rows if row["claim holds"] == "False"]
    if not kept or not lost:
        parts = tuple(Part.missing(claim, "the analysis has not run") for claim in (holds, not_holds))
    else:
        change = max(row["relative change of the output"] for row in kept)
        error = max(abs(row["alpha * gradient norm / unscaled"] - 1) for row in kept)
        least = min(lost, key=lambda row: row["relative change of the output"])
        parts = (
            Part.of(holds, change < 1e-4 and error < 1e-3, f"largest change {change:.2g}, largest error of α · gradient {error:.2g}"),
            Part.of(
                not_holds,
                least["relative change of the output"] > 1e-3,
                f"smallest change {least['relative change of the output']:.2g} ({least['scaled by alpha']})",
            ),
        )
    passes_if = "output unchanged (to LN epsilon) and gradient ∝ 1/α for the joint case; changed for one table alone"
    return Verdict("A5", "anil_scale_invariance", passes_if, parts)


def schedule_variants(runs: Sequence[Run]) -> Verdict:
    """The verdict on A10, readings of the schedule."""
    del runs
    parts = [
        Part.of(f"{name}: {SAVINGS[name]:.2f} %", abs(value - SAVINGS[name]) < 0.005, f"{value:.3f} % by the declared schedule")
        for name, value in savings().items()
    ]
    return Verdict("A10", "anil_schedule_variants", "pure arithmetic: 17.58 %, 14.06 %, 14.06 %", tuple(parts))


def accounting(runs: Sequence[Run]) -> Verdict:
    """The verdict on A11, accounting."""
    claims = ("σ by RDP as computed, to 1 %, at all seven batches", "RDP's ε is at or above PLD's")
    rows = {int(row["batch size"]): row for row in cells(runs, "anil_accounting", "sigma_by_batch")}
    if not set(SIGMA) <= set(rows):
        parts = tuple(Part.missing(claim, f"{len(rows)} of {len(SIGMA)} batches") for claim in claims)
    else:
        worst = max(abs(rows[batch]["sigma (rdp)"] / sigma - 1) for batch, sigma in SIGMA.items())
        gaps = [row["epsilon (rdp)"] - row["epsilon (pld)"] for row in rows.values()]
        parts = (
            Part.of(claims[0], worst <= 0.01, f"largest relative difference {worst:.2%}"),
            Part.of(claims[1], min(gaps) >= 0, f"ε by RDP minus ε by PLD from {min(gaps):.3g} to {max(gaps):.3g}"),
        )
    return Verdict("A11", "anil_accounting", "σ table reproduced; RDP ≥ PLD", parts)


def throughput(runs: Sequence[Run]) -> Verdict:
    """The verdict on A12, throughput: speeds are those of one machine; only that both are measured is judged."""
    claim = "ratio of private to plain speed reported at every physical batch"
    ratios = throughput_ratios(runs)
    if not ratios:
        part = Part.missing(claim, "no physical batch with a private and a plain measurement")
    else:
        words = ", ".join(f"batch {size}: {ratio:.2f}" for size, ratio in ratios.items())
        part = Part.of(claim, True, f"examples/s of book_keeping over plain: {words}")
    passes_if = "ratio DP/non-DP reported (that accumulated sums equal one-shot sums is a test's matter)"
    return Verdict("A12", "anil_throughput", passes_if, (part,))


def throughput_ratios(runs: Sequence[Run]) -> dict[int, float]:
    """Private over plain examples per second at the same physical batch."""
    rows = cells(runs, "laptop_anil_throughput", "benchmark")
    speeds = {(row["clipping"], int(row["physical_batch"])): row["examples_per_s"] for row in rows}
    sizes = sorted({size for _, size in speeds})
    ways = ("book_keeping", "plain")
    return {size: speeds[ways[0], size] / speeds[ways[1], size] for size in sizes if all((way, size) in speeds for way in ways)}


def reference(runs: Sequence[Run]) -> Verdict:
    """The verdict on A13, the reference batch."""
    del runs
    ratio = 2_097_152 / 65_536
    return Verdict("A13", "anil_sgd32x_ref", "arithmetic", (Part.of("2,097,152 / 65,536 = 32", ratio == 32, f"{ratio:g}"),))
