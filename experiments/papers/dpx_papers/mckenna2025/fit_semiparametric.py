"""Shows how the semi-parametric fit changes the measured losses, and whether they have its assumed order (McKenna et al. 2025, section
3.3)."""

import itertools

import numpy as np

from dpx.cost.surface import Grid, Surface
from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part


@of_positive
def mckenna_fit_semiparametric(lab: Lab) -> Made:
    """Shows the grid as it was measured, the surface's nodes, and the verdicts on three claims.

    Attributes:
        lab: The measurements and the budgets.
    """
    fitted = lab.fitted()
    grid, rows = fitted.grid, []
    for part in (grid.noiseless, grid) if grid.noiseless else (grid,):
        for (m, name), (r, ratio) in itertools.product(enumerate(part.names), enumerate(part.ratios_R.tolist())):
            at = fitted.surface.at(part.parameters_M[m], part.steps_T[-1], ratio)
            row = {"model": name, "parameters": float(part.parameters_M[m]), "noise_batch_ratio": ratio}
            row |= {"measured": float(part.losses_MRT[m, r, -1]), "fitted": float(at.loss)}
            rows.append(row | {"learning_rate": float(part.rates_MRT[m, r, -1])})
    notes = (*fitted.notes, f"choice over learning rates: {lab.choice}", *fitted.left_out)
    title = f"after {grid.steps_T[-1]:,.0f} steps"
    return {"final_losses": Noted(rows, notes, title), "verdicts": judged(grid, fitted.surface)}


def judged(grid: Grid, surface: Surface) -> list[Part]:
    """Returns the verdicts on the measured losses (their order in the ratio and in the steps) and on the surface (its order everywhere,
    and its error at its nodes)."""
    last = grid.losses_MRT[:, :, -1]
    rising = [(float(low), float(high)) for curve in last for low, high in zip(curve[:-1], curve[1:], strict=True)]
    part = max(1, len(grid.steps_T) // 4)
    early, late = grid.losses_MRT[:, :, :part].mean(-1), grid.losses_MRT[:, :, -part:].mean(-1)
    falling = list(zip(late.ravel().tolist(), early.ravel().tolist(), strict=True))
    return [
        verdicts.ascending("the measured loss rises with the ratio", rising),
        verdicts.ascending("the measured loss falls with the steps (last quarter below the first)", falling),
        _monotone(surface),
    ]


def _monotone(surface: Surface) -> Part:
    nodes = np.meshgrid(surface.parameters_M, surface.steps_T, surface.ratios_R, indexing="ij")
    error = float(np.abs(surface.at(*nodes).loss.transpose(0, 2, 1) - surface.losses_MRT).max())
    falls = float(np.diff(surface.losses_MRT, axis=1).min())
    rises = float(np.diff(surface.losses_MRT, axis=2).max(initial=0.0))
    words = f"largest step against the order {max(-falls, rises, 0.0):.2g}, largest difference at a node {error:.2g}"
    return Part.of(
        "the surface is monotone in ratio and steps, and exact at its nodes", falls >= -1e-9 and rises <= 1e-9 and error < 1e-9, words
    )
