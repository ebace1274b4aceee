"""Du and Mi 2021, Table 2's two epsilon rows: whose they are, and what DP-FP's own setting gives."""

import math
from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table


@declaration
class Cell:
    """One task at one target: Li et al.'s DP-SGD setting, and the two epsilons that Table 2 prints for it.

    `clt_batch_size` is the batch size whose limit is the printed one, if it differs from `li_batch_size`; its epochs are `clt_epochs`.
    """

    task: str
    size: int
    li_batch_size: int
    li_epochs: int
    epsilon_rdp: float
    published_clt: float
    published_pld: float
    clt_batch_size: int | None = None
    clt_epochs: int | None = None


@declaration
class DpfpTable2Accounting:
    """`cells` as printed; DP-FP's own defaults are `micro_batches`, `batch_size`, `epochs` and clipping norm 1 (section 4.1).

    `interval` is the PLD grid, which errs upward.
    `tried` are `(batch size, epochs)` at which the cells with a `clt_batch_size` are computed: which one gives what is printed.
    """

    cells: Sequence[Cell]
    micro_batches: int
    batch_size: int
    epochs: int
    tried: Sequence[Sequence[int]] = ()
    interval: float | None = None

    def __call__(self) -> list[Table]:
        return [self._of_li(), self._of_their_own(), *([self._tried()] if self.tried else [])]

    def _of_li(self) -> Table:
        rows = []
        for cell in self.cells:
            steps, sigma, limit, pld = self._at(cell, cell.li_batch_size, cell.li_epochs)
            read = limit
            if cell.clt_batch_size is not None:
                _, _, read, _ = self._at(cell, cell.clt_batch_size, cell.clt_epochs or cell.li_epochs)
            published = (cell.published_clt, read, read / cell.published_clt - 1, pld, cell.published_pld, pld / cell.published_pld - 1)
            rows.append((cell.task, cell.epsilon_rdp, steps, sigma, limit, *published))
        columns = ("task", "epsilon_rdp", "steps", "sigma", "clt", "clt_published", "clt_as_read", "clt_difference")
        notes = (
            "clt_as_read: SST-2's printed limits are those of batches of 2,000 where its printed PLD is that of 1,000 (settings_tried)",
        )
        columns += ("pld", "pld_published", "pld_difference")
        return Table("settings_of_li", columns, tuple(rows), "DP-SGD of Li et al. at the printed epsilons: the published rows", notes)

    def _tried(self) -> Table:
        rows = []
        for cell in self.cells:
            for batch, epochs in self.tried if cell.clt_batch_size is not None else ():
                steps, sigma, limit, pld = self._at(cell, batch, epochs)
                apart = (limit / cell.published_clt - 1, pld, pld / cell.published_pld - 1)
                rows.append((cell.task, cell.epsilon_rdp, batch, epochs, steps, sigma, limit, *apart))
        columns = ("task", "epsilon_rdp", "batch_size", "epochs", "steps", "sigma", "clt", "clt_difference", "pld", "pld_difference")
        notes = ("no setting gives both printed rows: the limit at both targets is that of one, the PLD that of another",)
        return Table("settings_tried", columns, tuple(rows), "which setting gives which of the two printed rows", notes)

    def _at(self, cell: Cell, batch_size: int, epochs: int) -> tuple[int, float, float, float]:
        """Steps, Renyi's noise for the cell's target, and the limit and PLD at that noise."""
        from dpx.privacy import accounting, solve
        from dpx.privacy.approximations import gdp_clt_epsilon

        delta = 1 / (2 * cell.size)
        stages = [(batch_size / cell.size, epochs * cell.size // batch_size)]
        sigma = solve.noise_multiplier(stages, epsilon=cell.epsilon_rdp, delta=delta, accountant="rdp")
        charges = accounting.charges_of(stages, sigma)
        return stages[0][1], sigma, gdp_clt_epsilon(charges, delta), accounting.compose(charges, interval=self.interval).epsilon(delta)

    def _of_their_own(self) -> Table:
        from dpx.privacy import accounting
        from dpx.privacy.approximations import gdp_clt_noise_multiplier

        rows = []
        for cell in self.cells:
            delta = 1 / (2 * cell.size)
            stages = own_stages(cell.size, self.batch_size, self.micro_batches, self.epochs)
            sigma = gdp_clt_noise_multiplier(stages, epsilon=cell.published_clt, delta=delta)
            charges = accounting.charges_of(stages, sigma, "slot_revealed")
            bound = accounting.compose(charges, "pld", "zero_out_text", interval=self.interval).epsilon(delta)
            composed = accounting.compose(accounting.charges_of(stages, sigma), interval=self.interval)
            known = composed.delta(cell.published_clt)
            rows.append((cell.task, cell.published_clt, sigma, bound, composed.epsilon(delta), cell.published_pld, known, known / delta))
        columns = ("task", "clt_claimed", "sigma", "bound", "pld", "pld_published", "delta_at_claim", "times_delta")
        notes = (
            "bound: of a row's text alone, and only if nothing below the noise is trained; with a trained encoder DP-FP has no guarantee",
            "pld: as if it stayed hidden who is drawn, which no release of single rows with their labels hides: no bound",
            "the noise is that of the central limit, which is an approximation and bounds nothing",
        )
        return Table("settings_of_dpfp", columns, tuple(rows), "DP-FP at its own defaults, noise from its equation 11", notes)

    def pictures(self) -> list[Picture]:
        """Computed beside printed, for the two settings."""
        cell: dict[str, Any] = {"table": "settings_of_li", "x": ("task", "epsilon_rdp"), "x_scale": "category", "title": "Li et al."}
        theirs: dict[str, Any] = {"table": "settings_of_dpfp", "x": ("task", "clt_claimed"), "x_scale": "category"}
        limit = (("clt", "one setting"), ("clt_as_read", "as read"), ("clt_published", "printed"))
        bound = (("pld", "computed"), ("pld_published", "printed"))
        own = (("clt_claimed", "CLT, claimed"), ("pld_published", "printed"), ("pld", "PLD"), ("bound", "what holds"))
        panels = (
            Lines(marks=("clt", "clt_as_read", "clt_published"), names=limit, y_label="epsilon by the limit", **cell),
            Lines(marks=("pld", "pld_published"), names=bound, y_label="epsilon by PLD", **cell),
            Lines(
                marks=("clt_claimed", "pld_published", "pld", "bound"), names=own, y_label="epsilon", title="DP-FP's own settings", **theirs
            ),
        )
        caption = "Table 2's epsilon rows: reproduced by Li et al.'s DP-SGD settings (left, middle), not by DP-FP's own noise (right)."
        return [Picture("dpfp_table2", caption, panels)]


def own_stages(size: int, batch_size: int, micro_batches: int, epochs: int) -> list[tuple[float, int]]:
    """p = B / (M D) and T M = E D M / B releases (section 3.2)."""
    return [(batch_size / (micro_batches * size), math.floor(epochs * size * micro_batches / batch_size))]
