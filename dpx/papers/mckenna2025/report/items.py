"""The 32 experiments of the paper in its order: what each is called, where it stands, what it costs at full scale, and how it is judged."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dpx.papers.mckenna2025.report import evidence, trained
from dpx.report.rows import Run
from dpx.report.shape import Part, Verdict
from dpx.scaling.measurements import Measurements
from dpx.scaling.smoothing import grid_of
from dpx.scaling.surface import surface_of

LAB = ("analysis/lab=laptop",)
OF_LAB = (*LAB, "analysis.sizes=null")
# Two models and ratios inside the laptop's grid.
VULNERABLE = (
    *LAB,
    "analysis.settings=[[width 128,1.0e13,550016],[width 64,1.0e13,173120]]",
    "analysis.size=800000",
    "analysis.tokens=32",
    "analysis.batch_sizes=[64,128,256,512,1024,2048]",
)
RATIOS = (*LAB, "analysis.ratios=[0.00390625,0.0009765625,0.000244140625,0.00006103515625]")
TRAINS, COUNTS, FITS = "trains", "needs no training", "needs the grid"


@dataclasses.dataclass(frozen=True)
class Item:
    """`hours` of one H200 at half of 790 TFLOP/s; `options` are those of the laptop's command."""

    number: str
    name: str
    title: str
    kind: str
    hours: float = 0.0
    options: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        name = f"laptop/{self.name}" if self.kind == TRAINS else self.name
        return shlex.join(("python", "-m", "dpx", f"+experiment={name}", *self.options))


ITEMS = (
    Item("M1", "mckenna_grid", "The grid (section 3.2)", TRAINS, 20400.0),
    Item("M2", "mckenna_fit_semiparametric", "The fit (section 3.3)", FITS, options=LAB),
    Item("M3", "mckenna_fig1_allocation", "Allocation (Figure 1)", FITS, options=OF_LAB),
    Item("M4", "mckenna_fig3ab_compute", "Loss by compute (Figures 3a, 3b)", FITS, options=LAB),
    Item("M5", "mckenna_fig3c_token_ratio", "Tokens per parameter (Figure 3c)", FITS, options=LAB),
    Item("M6", "mckenna_fig4_vector_fields", "What doubling does to the ratio (Figure 4)", COUNTS),
    Item("M7", "mckenna_fig5_baselines", "Fixed settings beside the best (Figure 5)", FITS, options=LAB),
    Item("M8", "mckenna_fig5_direct", "The fixed settings trained (ours)", TRAINS, 84.0),
    Item("M9", "mckenna_table2_saturation", "Where compute stops helping (Table 2)", FITS, options=OF_LAB),
    Item("M10", "mckenna_fig6_full_grid", "Loss by steps, model and batch (Figure 6)", FITS, options=LAB),
    Item("M11", "mckenna_fig7_physical_batch", "Physical batches (Figure 7)", TRAINS, 120.0),
    Item("M12", "mckenna_fig8_batch_lr", "Physical batches, each with its rate (Figure 8)", TRAINS, 53.0),
    Item(
        "M13",
        "mckenna_table3_trainset",
        "Loss of training rows (Table 3)",
        FITS,
        options=("analysis.match=laptop_mckenna_fig7_physical_batch-", "analysis.noise_batch_ratio=0.00048828125", "analysis.rows=20000"),
    ),
    Item("M14", "mckenna_fig9_batch_large", "Physical batches of a large model (Figure 9)", TRAINS, 9100.0),
    Item("M15", "mckenna_fig10_decoder", "Physical batches of a decoder (Figure 10)", TRAINS, 200.0),
    Item("M16", "mckenna_table4_throughput", "Throughput (Table 4)", TRAINS, 1.0),
    Item("M17", "mckenna_fig11_nonprivate", "Without noise (Figure 11)", FITS, options=LAB),
    Item("M18", "mckenna_fig12_lr_curves", "Learning rates by ratio (Figure 12)", TRAINS, 370.0),
    Item("M19", "mckenna_lr_nonprivate", "Learning rates without noise (section 3.2)", TRAINS, 110.0),
    Item("M20", "mckenna_fig13_allocation_by_n", "Allocation by data (Figure 13)", FITS, options=LAB),
    Item("M21", "mckenna_fig14_smoothing", "Smoothing (Figure 14)", FITS, options=LAB),
    Item("M22", "mckenna_fig15_vulnerability", "Equal epsilon, unequal advantage (Figure 15)", FITS, options=VULNERABLE),
    Item("M23", "mckenna_fig16_parametric_l1", "Parametric form L1 (Figure 16)", FITS, options=LAB),
    Item("M24", "mckenna_fig17_transform", "The transformed ratio (Figure 17)", FITS, options=LAB),
    Item("M25", "mckenna_fig18_parametric_l2", "Parametric form L2 (Figure 18)", FITS, options=LAB),
    Item("M26", "mckenna_fig19_parametric_optimum", "The optimum of L2 (Figure 19)", FITS, options=RATIOS),
    Item("M27", "mckenna_table1_models", "Models (Table 1)", COUNTS),
    Item("M28", "mckenna_clip_check", "How many are clipped (section 3.2)", TRAINS, 0.1),
    Item("M29", "mckenna_billion_claim", "A billion parameters (section 6)", COUNTS),
    Item("M30", "mckenna_diminishing_batch", "Where batches stop paying (section 4.1)", COUNTS),
    Item("M31", "mckenna_flops_model", "FLOPs (appendix B.3)", COUNTS),
    Item("M32", "mckenna_calibration_profiles", "Profiles (appendix D)", COUNTS),
)
_TRAINED = (
    trained.physical_batch,
    trained.batch_and_rate,
    trained.batch_of_large,
    trained.decoder,
    trained.rates_by_ratio,
    trained.rates_without_noise,
    trained.clipped,
    trained.throughput,
)


def verdicts(runs: Sequence[Run], home: Path) -> dict[str, Verdict]:
    """By item, each of `ITEMS`."""
    judged = {one.item: one for one in (*(check(runs) for check in _TRAINED), trained.direct(runs, predictor(home)))}
    for item in ITEMS:
        if item.number not in judged and item.kind != TRAINS:
            judged[item.number] = Verdict(
                item.number, item.name, "", _parts(home, item.name) or (Part.missing("its claims", "has not run"),)
            )
    grid = _parts(home, "mckenna_fit_semiparametric")[:2] or (
        Part.missing("loss rises with the ratio, falls with the steps", "no fit has run"),
    )
    return judged | {"M1": Verdict("M1", "mckenna_grid", "loss rises with the ratio and falls with the steps", grid)}


def _parts(home: Path, name: str) -> tuple[Part, ...]:
    """What an analysis judged itself."""
    table = evidence.tables(home, name).get("verdicts")
    rows = table.as_json()["rows"] if table else []
    return tuple(Part(row["claim"], row["statistic"], row["state"]) for row in rows)


def predictor(home: Path) -> trained.Predicted:
    """The fit of the laptop's grid as far as it went: losses at a model's name, steps and ratio; `None` outside it, or without one."""
    place = home / "measurements.csv"
    if not place.exists():
        return lambda *_: None
    table = Measurements.read(place)
    grid = grid_of(table)
    if len(grid.parameters_M) < 1 or len(grid.ratios_R) < 2:
        return lambda *_: None
    surface = surface_of(grid, float(table.batch_size[0]), float(table.sequence_length[0]))
    sizes: Mapping[str, float] = dict(zip(surface.names, surface.parameters_M.tolist(), strict=True))

    def loss(model: str, steps: float, ratio: float) -> float | None:
        predicted = float(surface.at(sizes[model], steps, ratio).loss) if model in sizes else float("nan")
        return predicted if np.isfinite(predicted) else None

    return loss
