"""Du and Mi 2021, Table 2's two epsilon rows: whose they are, and what DP-FP's own setting gives."""

import math
from collections.abc import Sequence

from dpx.analysis.table import Table
from dpx.declaration import declaration
from dpx.experiment import Experiment


@declaration
class Cell:
    """One task at one target: Li et al.'s DP-SGD setting, and the two epsilons that Table 2 prints for it."""

    task: str
    size: int
    li_batch_size: int
    li_epochs: int
    epsilon_rdp: float
    published_clt: float
    published_pld: float


@declaration
class DpfpTable2Accounting:
    """`cells` as printed; DP-FP's own defaults are `micro_batches`, `batch_size`, `epochs` and clipping norm 1 (section 4.1)."""

    cells: Sequence[Cell]
    micro_batches: int
    batch_size: int
    epochs: int

    def __call__(self, experiment: Experiment) -> list[Table]:
        del experiment
        return [self._of_li(), self._of_their_own()]

    def _of_li(self) -> Table:
        from dpx.privacy import accounting, solve
        from dpx.privacy.approximations import gdp_clt_epsilon

        rows = []
        for cell in self.cells:
            delta = 1 / (2 * cell.size)
            runs = [(cell.li_batch_size / cell.size, cell.li_epochs * cell.size // cell.li_batch_size)]
            sigma = solve.noise_multiplier(runs, epsilon=cell.epsilon_rdp, delta=delta, accountant="rdp")
            limit = gdp_clt_epsilon(accounting.charges_of(runs, sigma), delta)
            pld = accounting.epsilon(runs, noise_multiplier=sigma, delta=delta)
            rows.append((cell.task, cell.epsilon_rdp, runs[0][1], sigma, limit, cell.published_clt, pld, cell.published_pld))
        columns = ("task", "epsilon_rdp", "steps", "sigma", "clt", "clt_published", "pld", "pld_published")
        return Table("settings_of_li", columns, tuple(rows), "DP-SGD of Li et al. at the printed epsilons: the published rows")

    def _of_their_own(self) -> Table:
        from dpx.privacy import accounting
        from dpx.privacy.approximations import gdp_clt_noise_multiplier

        rows = []
        for cell in self.cells:
            delta = 1 / (2 * cell.size)
            runs = own_runs(cell.size, self.batch_size, self.micro_batches, self.epochs)
            sigma = gdp_clt_noise_multiplier(runs, epsilon=cell.published_clt, delta=delta)
            pld = accounting.epsilon(runs, noise_multiplier=sigma, delta=delta)
            known = accounting.compose(accounting.charges_of(runs, sigma), "pld").delta(cell.published_clt)
            rows.append((cell.task, cell.published_clt, sigma, pld, cell.published_pld, known, known / delta))
        columns = ("task", "clt_claimed", "sigma", "pld", "pld_published", "delta_at_claim", "times_delta")
        notes = (
            "a bound for the noisy rows only, if nothing below the noise is trained: with a trained encoder DP-FP has no guarantee",
            "the noise is that of the central limit, which is an approximation and bounds nothing",
        )
        return Table("settings_of_dpfp", columns, tuple(rows), "DP-FP at its own defaults, noise from its equation 11", notes)


def own_runs(size: int, batch_size: int, micro_batches: int, epochs: int) -> list[tuple[float, int]]:
    """p = B / (M D) and T M = E D M / B releases (section 3.2)."""
    return [(batch_size / (micro_batches * size), math.floor(epochs * size * micro_batches / batch_size))]
