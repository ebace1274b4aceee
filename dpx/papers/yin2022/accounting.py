"""Yin and Habernal 2022, section 6.2.1 and Table 3: the noise of their epsilon 5, and where "4e5" comes from."""

from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table


@declaration
class LegalAccounting:
    """`orders` are those of the library they used; the lists of batch sizes and computed values go together.

    `interval` is the PLD grid, which errs upward.
    """

    size: int
    delta: float
    epsilon: float
    epochs: int
    batch_sizes: Sequence[int]
    computed_noise_multipliers: Sequence[float | int]
    orders: Sequence[float | int]
    small_size: int
    small_delta: float
    small_batch_size: int
    small_steps: int
    published: dict[str, float]
    interval: float | None = None

    def __call__(self) -> list[Table]:
        return [self._batches(), self._small()]

    def _batches(self) -> Table:
        from dpx.privacy import accounting, closed_form, solve

        rows = []
        for batch, known in zip(self.batch_sizes, self.computed_noise_multipliers, strict=True):
            # Their epoch is the whole batches that fit, so a record takes part at the rate of one in so many.
            per_epoch = self.size // batch
            steps = self.epochs * per_epoch
            stages = [(1 / per_epoch, steps)]
            sigma = solve.noise_multiplier(stages, epsilon=self.epsilon, delta=self.delta, accountant="rdp", orders=self.orders)
            pld = accounting.compose(accounting.charges_of(stages, sigma), interval=self.interval).epsilon(self.delta)
            # Their data is shuffled once an epoch and read in order.
            as_read = closed_form.epsilon(self.epochs**0.5 / sigma, self.delta)
            rows.append((batch, steps, sigma, known, sigma / known - 1, pld, as_read))
        columns = ("batch_size", "steps", "sigma_rdp", "sigma_rdp_known", "difference", "pld_epsilon", "epsilon_as_read")
        notes = ("epsilon_as_read: no amplification, one release per epoch, which is what shuffled batches allow",)
        return Table("noise_by_batch_size", columns, tuple(rows), f"noise multiplier for epsilon {self.epsilon}", notes)

    def pictures(self) -> list[Picture]:
        """Noise by batch size beside the known values; epsilon at that noise."""
        batch: dict[str, Any] = {"table": "noise_by_batch_size", "x": "batch_size", "x_scale": "log"}
        noise = (("sigma_rdp", "RDP"), ("sigma_rdp_known", "RDP, known"))
        spent = (("pld_epsilon", "PLD, Poisson"), ("epsilon_as_read", "shuffled, as read"))
        panels = (
            Lines(y=("sigma_rdp",), marks=("sigma_rdp_known",), names=noise, y_label="noise multiplier", **batch),
            Lines(y=("pld_epsilon", "epsilon_as_read"), names=spent, y_scale="log", y_label="epsilon", **batch),
        )
        caption = (
            f"Noise multiplier for epsilon {self.epsilon} by RDP, and epsilon at that noise: Poisson by PLD, and as the data was read."
        )
        return [Picture("legal_noise", caption, panels)]

    def _small(self) -> Table:
        """Noise of 0.1: the printed 4e5 is the order grid's, not the mechanism's."""
        from dpx.privacy import accounting

        stages = [(self.small_batch_size / self.small_size, self.small_steps)]
        rows = []
        for text, published in self.published.items():
            charges = accounting.charges_of(stages, float(text))
            by = (("rdp", self.orders), ("rdp", None), ("pld", None))
            epsilons = [
                accounting.compose(charges, name, orders=orders, interval=self.interval).epsilon(self.small_delta) for name, orders in by
            ]
            rows.append((float(text), published, *epsilons))
        columns = ("noise_multiplier", "published", "rdp_old_orders", "rdp_default_orders", "pld")
        notes = ("the size of the small corpus is not printed; this one is inferred",)
        return Table("small_corpus", columns, tuple(rows), f"{self.small_steps:,} steps of {self.small_batch_size}", notes)
