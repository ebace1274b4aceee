"""Tests whether noise power falls as 1/M with M micro-batches (Du and Mi 2021, proposition 3 and equation 13).

By the central limit, this is true only as epsilon goes to 0. By the composition that is valid for DP-FP (`dpfp_table2_accounting`), it is
false: a record is used E times in E epochs for every M, and every use is visible.
"""

import math
from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.du2021.table2_accounting import own_stages


@declaration
class DpfpProp3NoiseRatio:
    """Divides the noise power at M micro-batches by that at one, by equation 11 of the paper, by PLD, and by composition over uses.

    Attributes:
        size: Number of rows.
        epochs: Epochs of a run.
        batch_sizes: Batch sizes.
        micro_batches: Numbers of micro-batches.
        epsilons: Epsilons for which equation 11 is used.
        pld_epsilons: Epsilons for which PLD accounting is used.
        epsilons_by_uses: Epsilons for which a record's uses are composed, which is valid with a frozen encoder.
    """

    size: int
    epochs: int
    batch_sizes: Sequence[int]
    micro_batches: Sequence[int]
    epsilons: Sequence[float | int]
    pld_epsilons: Sequence[float | int]
    epsilons_by_uses: Sequence[float | int] = ()

    def __call__(self) -> list[Table]:
        return [self._by_the_limit(), self._by_losses(), self._by_uses()]

    def _by_the_limit(self) -> Table:
        from dpx.privacy.approximations import gdp_clt_noise_multiplier

        rows = []
        for epsilon in self.epsilons:
            for batch in self.batch_sizes:
                alone = gdp_clt_noise_multiplier(own_stages(self.size, batch, 1, self.epochs), epsilon=epsilon, delta=self._delta)
                for number in self.micro_batches:
                    sigma = gdp_clt_noise_multiplier(own_stages(self.size, batch, number, self.epochs), epsilon=epsilon, delta=self._delta)
                    rows.append((epsilon, batch, number, sigma, (sigma / alone) ** 2, 1 / number))
        columns = ("epsilon_clt", "batch_size", "micro_batches", "sigma", "power_ratio", "claimed_ratio")
        notes = ("sigma by the central limit, an approximation; the claim is its first-order term",)
        return Table("power_by_equation_11", columns, tuple(rows), "noise power over that of one micro-batch", notes)

    def _by_losses(self) -> Table:
        from dpx.privacy import solve

        batch, rows = self.batch_sizes[0], []
        for epsilon in self.pld_epsilons:
            ends = [
                solve.noise_multiplier(own_stages(self.size, batch, number, self.epochs), epsilon=epsilon, delta=self._delta)
                for number in (1, max(self.micro_batches))
            ]
            rows.append((epsilon, batch, max(self.micro_batches), *ends, (ends[1] / ends[0]) ** 2))
        columns = ("epsilon_pld", "batch_size", "micro_batches", "sigma_alone", "sigma", "power_ratio")
        notes = ("unsupported: as if nobody saw which records were drawn",)
        return Table("power_by_pld", columns, tuple(rows), "the same by PLD of Poisson-sampled Gaussians", notes)

    def _by_uses(self) -> Table:
        batch, rows = self.batch_sizes[0], []
        for epsilon in self.epsilons_by_uses:
            alone = self._sigma_by_uses(float(epsilon), batch, 1)
            for number in self.micro_batches:
                sigma = self._sigma_by_uses(float(epsilon), batch, number)
                rows.append((epsilon, batch, number, sigma, (sigma / alone) ** 2, 1 / number))
        columns = ("epsilon", "batch_size", "micro_batches", "sigma", "power_ratio", "claimed_ratio")
        notes = ("zero_out_text, encoder and pooler frozen: Binomial(T M, p) uses, whose mean is the number of epochs for every M",)
        return Table("power_by_uses", columns, tuple(rows), "the same by what holds: more micro-batches do not lower the noise", notes)

    def _sigma_by_uses(self, epsilon: float, batch_size: int, micro_batches: int) -> float:
        from dpx.privacy import closed_form

        ((probability, draws),) = own_stages(self.size, batch_size, micro_batches, self.epochs)

        def excess(log_sigma: float) -> float:
            return closed_form.epsilon_by_uses(math.exp(log_sigma), draws, probability, self._delta) - epsilon

        return math.exp(closed_form.root(excess, math.log(0.05), math.log(1e4), 1e-10))

    def pictures(self) -> list[Picture]:
        """Plots the ratio at each epsilon, one panel a batch size."""
        axes: dict[str, Any] = {"table": "power_by_equation_11", "x": "micro_batches", "x_scale": "log", "y_scale": "log"}
        axes |= {"x_label": "micro-batches M", "y_label": "noise power over that of M = 1"}
        panels = tuple(
            Lines(y=("power_ratio",), by="epsilon_clt", where=("batch_size", batch), title=f"batch size {batch}", **axes)
            for batch in self.batch_sizes
        )
        if self.epsilons_by_uses:
            # Drawn beside the claim: alone, ratios that differ in the fourth digit would fill the axis.
            epsilon = max(self.epsilons_by_uses)
            uses: dict[str, Any] = {**axes, "table": "power_by_uses", "where": ("epsilon", epsilon)}
            names = (("power_ratio", f"what holds, epsilon {epsilon:g}"), ("claimed_ratio", "1/M, claimed"))
            panels += (Lines(y=("power_ratio", "claimed_ratio"), names=names, title="frozen encoder", **uses),)
        caption = (
            f"Noise power by equation 11; proposition 3's 1/M is what epsilon {min(self.epsilons):g} gives, and no larger one. By what "
            "holds of DP-FP, M changes nothing."
        )
        return [Picture("dpfp_noise_ratio", caption, panels)]

    @property
    def _delta(self) -> float:
        return 1 / (2 * self.size)
