"""Finds which setting gives the two epsilon rows of Table 2, and what is valid for DP-FP's own setting (Du and Mi 2021, F8).

With a trained encoder DP-FP has no guarantee. With encoder and pooler frozen, each drawn record releases a noisy row beside its label, in a
position that shows whether the record was drawn. So sampling amplifies nothing: the valid composition is the Gaussian over the Binomial(T
M, p) uses of a record, for its text alone. The central limit, RDP and PLD of a Poisson-sampled Gaussian are not bounds here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.report.shape import Part, verdict_table

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


@declaration
class DpfpTable2Accounting:
    """Recomputes the printed epsilons, and epsilon at DP-FP's defaults and clipping norm 1 (section 4.1).

    Attributes:
        cells: The printed cells.
        micro_batches: DP-FP's micro-batches.
        batch_size: DP-FP's batch size.
        epochs: DP-FP's epochs.
        tried: (batch size, epochs) for the cells whose central limit differs from the printed one at Li et al.'s setting.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    cells: Sequence[Cell]
    micro_batches: int
    batch_size: int
    epochs: int
    tried: Sequence[Sequence[int]] = ()
    interval: float | None = None

    def __call__(self) -> list[Table]:
        of_li, own = self._of_li(), self._of_their_own()
        rows = of_li.as_json()["rows"]
        apart = [cell for cell, row in zip(self.cells, rows, strict=True) if abs(row["clt_difference"]) > NEAR]
        tried = [self._tried(apart)] if self.tried and apart else []
        return [of_li, *tried, own, verdict_table(judged(rows, own.as_json()["rows"]))]

    def _of_li(self) -> Table:
        rows = []
        for cell in self.cells:
            steps, sigma, limit, pld = self._at(cell, cell.li_batch_size, cell.li_epochs)
            differences = (limit, cell.published_clt, limit / cell.published_clt - 1, pld, cell.published_pld, pld / cell.published_pld - 1)
            rows.append((cell.task, cell.epsilon_rdp, steps, sigma, *differences))
        columns = ("task", "epsilon_rdp", "steps", "sigma", "clt", "clt_published", "clt_difference")
        columns += ("pld", "pld_published", "pld_difference")
        return Table("settings_of_li", columns, tuple(rows), "DP-SGD of Li et al. at the printed epsilons: the published rows")

    def _tried(self, cells: Sequence[Cell]) -> Table:
        rows = []
        for cell in cells:
            for batch, epochs in self.tried:
                rows.append((cell.task, cell.epsilon_rdp, "epsilon by RDP", batch, epochs, *self._apart(cell, batch, epochs)))
            own = self._apart(cell, cell.li_batch_size, cell.li_epochs, of_the_limit=True)
            rows.append((cell.task, cell.epsilon_rdp, "the printed limit", cell.li_batch_size, cell.li_epochs, *own))
        columns = ("task", "epsilon_rdp", "noise_solved_for", "batch_size", "epochs", "steps", "sigma", "clt", "clt_difference")
        columns += ("pld", "pld_difference")
        notes = (
            "no setting tried gives both printed rows: batches of 2,000 give the limit at both targets, batches of 1,000 the composed row",
            "at the noise whose limit is the printed one, PLD is well above the printed composed value",
        )
        return Table("settings_tried", columns, tuple(rows), "SST-2: what was tried for its two printed rows", notes)

    def _apart(self, cell: Cell, batch_size: int, epochs: int, of_the_limit: bool = False) -> tuple[int, float, float, float, float, float]:
        steps, sigma, limit, pld = self._at(cell, batch_size, epochs, of_the_limit)
        return steps, sigma, limit, limit / cell.published_clt - 1, pld, pld / cell.published_pld - 1

    def _at(self, cell: Cell, batch_size: int, epochs: int, of_the_limit: bool = False) -> tuple[int, float, float, float]:
        """Returns the steps, the noise for the cell's target (Renyi's epsilon, or the printed limit), and the limit and PLD at that
        noise."""
        from dpx.privacy import accounting, solve
        from dpx.privacy.approximations import gdp_clt_epsilon, gdp_clt_noise_multiplier

        stages = [(batch_size / cell.size, epochs * cell.size // batch_size)]
        if of_the_limit:
            sigma = gdp_clt_noise_multiplier(stages, epsilon=cell.published_clt, delta=cell.delta)
        else:
            sigma = solve.noise_multiplier(stages, epsilon=cell.epsilon_rdp, delta=cell.delta, accountant="rdp")
        charges = accounting.charges_of(stages, sigma)
        pld = accounting.compose(charges, interval=self.interval).epsilon(cell.delta)
        return stages[0][1], sigma, gdp_clt_epsilon(charges, cell.delta), pld

    def _of_their_own(self) -> Table:
        from dpx.privacy import accounting, closed_form
        from dpx.privacy.approximations import gdp_clt_epsilon, gdp_clt_noise_multiplier

        rows = []
        for cell in self.cells:
            stages = own_stages(cell.size, self.batch_size, self.micro_batches, self.epochs)
            ((probability, draws),) = stages
            sigma = round(gdp_clt_noise_multiplier(stages, epsilon=cell.published_clt, delta=cell.delta), 3)
            holds = closed_form.epsilon_by_uses(sigma, draws, probability, cell.delta)
            charges = accounting.charges_of(stages, sigma)
            composed = accounting.compose(charges, interval=self.interval)
            renyi = accounting.compose(charges, "rdp").epsilon(cell.delta)
            unsupported = (gdp_clt_epsilon(charges, cell.delta), renyi, composed.epsilon(cell.delta))
            at_claim = closed_form.delta_by_uses(sigma, draws, probability, cell.published_clt)
            rows.append((cell.task, cell.published_clt, sigma, holds, at_claim, *unsupported, cell.published_pld))
        columns = ("task", "clt_claimed", "sigma", "epsilon", "delta_at_claim")
        columns += ("unsupported_clt", "unsupported_rdp", "unsupported_pld", "pld_published")
        notes = (
            "epsilon: what holds if encoder and pooler are frozen (zero_out_text: a record's text, neither its label nor its presence)",
            "with a trained encoder DP-FP has no guarantee",
            "unsupported: these assume that nobody sees which records were drawn, but each drawn record releases a row beside its label",
            "the limit is an approximation in addition; sigma is equation 11's at the claimed limit, to three decimals",
        )
        return Table("settings_of_dpfp", columns, tuple(rows), "DP-FP at its own defaults, noise from its equation 11", notes)

    def pictures(self) -> list[Picture]:
        """Plots computed and printed values for the two settings."""
        cell: dict[str, Any] = {"table": "settings_of_li", "x": ("task", "epsilon_rdp"), "x_scale": "category", "title": "Li et al."}
        theirs: dict[str, Any] = {"table": "settings_of_dpfp", "x": ("task", "clt_claimed"), "x_scale": "category"}
        limit = (("clt", "computed"), ("clt_published", "printed"))
        bound = (("pld", "computed"), ("pld_published", "printed"))
        own = (("epsilon", "what holds, encoder frozen"), ("unsupported_pld", "PLD, unsupported"), ("clt_claimed", "CLT, claimed"))
        title = "DP-FP's own settings"
        panels = (
            Lines(marks=("clt", "clt_published"), names=limit, y_label="epsilon by the limit", **cell),
            Lines(marks=("pld", "pld_published"), names=bound, y_label="epsilon by PLD", **cell),
            Lines(marks=("epsilon", "unsupported_pld", "clt_claimed"), names=own, y_scale="log", y_label="epsilon", title=title, **theirs),
        )
        caption = (
            "Table 2's epsilon rows: reproduced by Li et al.'s DP-SGD settings, SST-2's limits apart (left, middle). What holds of DP-FP's "
            "own noise is far larger, with a frozen encoder (right); with a trained one nothing holds."
        )
        return [Picture("dpfp_table2", caption, panels)]


def judged(of_li: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: which setting the printed rows belong to, and whether DP-FP's own setting gives them."""
    near = [row for row in of_li if abs(row["clt_difference"]) <= NEAR]
    apart = ", ".join(f"{row['task']} {row['epsilon_rdp']:g}: {row['clt_difference']:+.1%}" for row in of_li if row not in near)
    largest = max(abs(row["pld_difference"]) for row in of_li)
    factor = min(row["epsilon"] / row["clt_claimed"] for row in own)
    shown = f"{len(near)} of {len(of_li)} cells; {apart}"
    least = f"what holds is at least {factor:.0f} times the claim"
    return [
        Part.of("the printed limits are those of Li et al.'s settings", len(near) == len(of_li), shown),
        Part.of("the printed composed epsilons are those of Li et al.'s settings", largest <= NEAR, f"largest difference {largest:.2%}"),
        Part.of("DP-FP's own setting has the claimed epsilon, encoder frozen", factor <= 1, least),
    ]


def own_stages(size: int, batch_size: int, micro_batches: int, epochs: int) -> list[tuple[float, int]]:
    """Returns the sampling probability p = B / (M D) and the T M = E D M / B releases (section 3.2)."""
    return [(batch_size / (micro_batches * size), math.floor(epochs * size * micro_batches / batch_size))]
