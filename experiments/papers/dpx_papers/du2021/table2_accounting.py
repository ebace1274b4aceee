"""Finds which setting gives the two epsilon rows of Table 2, and what is valid for DP-FP's own setting (Du and Mi 2021, F8).

With a trained encoder DP-FP has no guarantee. With encoder and pooler frozen, each drawn record releases a noisy row beside its label, in a
position that shows whether the record was drawn. So sampling amplifies nothing: the valid composition is the Gaussian over the Binomial(T
M, p) uses of a record, for its text alone. The central limit, RDP and PLD of a Poisson-sampled Gaussian are not bounds here.
"""

import math
from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.report.shape import Part

# Printed and computed values agree within this share.
NEAR = 0.01


@declaration
class Cell:
    """Holds one task at one target: Li et al.'s DP-SGD setting, and the two epsilons that Table 2 prints for it.

    Attributes:
        task: Name of the task.
        size: Its training rows.
        li_batch_size: Li et al.'s batch size.
        li_epochs: Li et al.'s epochs.
        epsilon_rdp: Target epsilon by RDP.
        published_clt: Printed epsilon by the central limit.
        published_pld: Printed epsilon by PLD.
    """

    task: str
    size: int
    li_batch_size: int
    li_epochs: int
    epsilon_rdp: float
    published_clt: float
    published_pld: float

    @property
    def delta(self) -> float:
        return 1 / (2 * self.size)


@analysis()
def dpfp_table2_accounting(
    cells: Sequence[Cell],
    micro_batches: int,
    batch_size: int,
    epochs: int,
    tried: Sequence[Sequence[int]] = (),
    interval: float | None = None,
) -> Made:
    """Recomputes the printed epsilons, and epsilon at DP-FP's defaults and clipping norm 1 (section 4.1).

    Attributes:
        cells: The printed cells.
        micro_batches: DP-FP's micro-batches.
        batch_size: DP-FP's batch size.
        epochs: DP-FP's epochs.
        tried: (batch size, epochs) for the cells whose central limit differs from the printed one at Li et al.'s setting.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    def found(cell: Cell, batch: int, epochs: int, of_the_limit: bool = False) -> dict[str, Any]:
        return {"task": cell.task, "epsilon_rdp": cell.epsilon_rdp} | at_noise(cell, batch, epochs, of_the_limit, interval)

    of_li = frame([found(cell, cell.li_batch_size, cell.li_epochs) for cell in cells])
    of_li.insert(5, "clt_published", [cell.published_clt for cell in cells])
    of_li.insert(8, "pld_published", [cell.published_pld for cell in cells])
    lines = []
    for cell in (cell for cell, apart in zip(cells, of_li["clt_difference"], strict=True) if tried and abs(apart) > NEAR):
        settings = [("epsilon by RDP", batch, epochs, False) for batch, epochs in tried]
        for solved_for, batch, epochs_tried, of_the_limit in (*settings, ("the printed limit", cell.li_batch_size, cell.li_epochs, True)):
            setting = {"noise_solved_for": solved_for, "batch_size": batch, "epochs": epochs_tried}
            row = found(cell, batch, epochs_tried, of_the_limit)
            lines.append({name: row.pop(name) for name in ("task", "epsilon_rdp")} | setting | row)
    own = frame([_of_their_own(cell, own_stages(cell.size, batch_size, micro_batches, epochs), interval) for cell in cells])
    trials = {"settings_tried": lines} if lines else {}
    return {"settings_of_li": of_li} | trials | {"settings_of_dpfp": own, "verdicts": judged(of_li, own)}


def at_noise(cell: Cell, batch_size: int, epochs: int, of_the_limit: bool, interval: float | None) -> dict[str, Any]:
    """Returns the steps, the noise for the cell's target (Renyi's epsilon, or the printed limit), and the limit and PLD at that noise with
    their differences to the printed ones."""
    from dpx.privacy import accounting, solve
    from dpx.privacy.profile import gdp_clt_epsilon, gdp_clt_noise_multiplier

    stages = [(batch_size / cell.size, epochs * cell.size // batch_size)]
    if of_the_limit:
        sigma = gdp_clt_noise_multiplier(stages, epsilon=cell.published_clt, delta=cell.delta)
    else:
        sigma = solve.noise_multiplier(stages, epsilon=cell.epsilon_rdp, delta=cell.delta, accountant="rdp")
    charges = accounting.charges_of(stages, sigma)
    limit, pld = gdp_clt_epsilon(charges, cell.delta), accounting.compose(charges, interval=interval).epsilon(cell.delta)
    differences = {"clt": limit, "clt_difference": limit / cell.published_clt - 1}
    return {"steps": stages[0][1], "sigma": sigma} | differences | {"pld": pld, "pld_difference": pld / cell.published_pld - 1}


def _of_their_own(cell: Cell, stages: list[tuple[float, int]], interval: float | None) -> dict[str, Any]:
    from dpx.privacy import accounting, closed_form
    from dpx.privacy.profile import gdp_clt_epsilon, gdp_clt_noise_multiplier

    ((probability, draws),) = stages
    sigma = round(gdp_clt_noise_multiplier(stages, epsilon=cell.published_clt, delta=cell.delta), 3)
    charges = accounting.charges_of(stages, sigma)
    return {
        "task": cell.task,
        "clt_claimed": cell.published_clt,
        "sigma": sigma,
        "epsilon": closed_form.epsilon_by_uses(sigma, draws, probability, cell.delta),
        "delta_at_claim": closed_form.delta_by_uses(sigma, draws, probability, cell.published_clt),
        "unsupported_clt": gdp_clt_epsilon(charges, cell.delta),
        "unsupported_rdp": accounting.compose(charges, "rdp").epsilon(cell.delta),
        "unsupported_pld": accounting.compose(charges, interval=interval).epsilon(cell.delta),
        "pld_published": cell.published_pld,
    }


def judged(of_li: Any, own: Any) -> list[Part]:
    """Returns the verdicts: which setting the printed rows belong to, and whether DP-FP's own setting gives them."""
    apart = of_li[of_li["clt_difference"].abs() > NEAR]
    words = ", ".join(f"{row.task} {row.epsilon_rdp:g}: {row.clt_difference:+.1%}" for row in apart.itertuples())
    largest, factor = of_li["pld_difference"].abs().max(), (own["epsilon"] / own["clt_claimed"]).min()
    shown = f"{len(of_li) - len(apart)} of {len(of_li)} cells; {words}"
    least = f"what holds is at least {factor:.0f} times the claim"
    return [
        Part.of("the printed limits are those of Li et al.'s settings", apart.empty, shown),
        Part.of("the printed composed epsilons are those of Li et al.'s settings", largest <= NEAR, f"largest difference {largest:.2%}"),
        Part.of("DP-FP's own setting has the claimed epsilon, encoder frozen", factor <= 1, least),
    ]


def own_stages(size: int, batch_size: int, micro_batches: int, epochs: int) -> list[tuple[float, int]]:
    """Returns the sampling probability p = B / (M D) and the T M = E D M / B releases (section 3.2)."""
    return [(batch_size / (micro_batches * size), math.floor(epochs * size * micro_batches / batch_size))]
