"""Yin and Habernal 2022, section 6.2.1 and Table 3: the noise of their epsilon 5, and where "4e5" comes from."""

from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table


@declaration
class LegalAccounting:
    """Computes noise multipliers of the paper's batch sizes, and epsilon of the small corpus.

    The lists of batch sizes and computed values go together.

    Attributes:
        size: Documents of the corpus.
        delta: Delta of epsilon.
        epsilon: Epsilon for which the noise is solved.
        epochs: Epochs of a run.
        batch_sizes: Batch sizes.
        computed_noise_multipliers: Noise multipliers by batch size, from the authors' library.
        orders: Renyi orders of that library.
        small_sizes: Candidates for the number of documents of the small corpus, each with its delta.
        small_batch_size: Batch size on the small corpus.
        small_steps: Steps on the small corpus.
        published: Values that the paper prints, by name.
        most: An epsilon above this limits nothing and is reported as infinite.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    size: int
    delta: float
    epsilon: float
    epochs: int
    batch_sizes: Sequence[int]
    computed_noise_multipliers: Sequence[float | int]
    orders: Sequence[float | int]
    small_sizes: Sequence[Sequence[int | float]]
    small_batch_size: int
    small_steps: int
    published: dict[str, float]
    most: float = 100.0
    interval: float | None = None

    def __call__(self) -> list[Table]:
        return [self._batches(), self._small()]

    def _batches(self) -> Table:
        from dpx.privacy import accounting, closed_form, solve

        rows = []
        for batch, known in zip(self.batch_sizes, self.computed_noise_multipliers, strict=True):
            # Their epoch is the whole batches that fit (their code), so at a batch of N/25.7 five epochs have 125 steps.
            steps = self.epochs * (self.size // batch)
            stages = [(batch / self.size, steps)]
            sigma = solve.noise_multiplier(stages, epsilon=self.epsilon, delta=self.delta, accountant="rdp", orders=self.orders)
            pld = accounting.compose(accounting.charges_of(stages, sigma), interval=self.interval).epsilon(self.delta)
            # Their data is shuffled once an epoch and read in order. A record that is replaced moves each epoch's sum by twice the norm.
            as_read, replaced = (closed_form.epsilon(far * self.epochs**0.5 / sigma, self.delta) for far in (1, 2))
            rows.append((batch, steps, sigma, known, sigma / known - 1, pld, as_read, replaced))
        columns = ("batch_size", "steps", "sigma_rdp", "sigma_rdp_known", "difference", "pld_epsilon", "epsilon_as_read")
        columns += ("epsilon_as_read_replace_one",)
        notes = (
            "epsilon_as_read: no amplification, one release per epoch, which is what shuffled batches allow; an upper bound under zero_out",
            "second segments from other documents void every epsilon here",
        )
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

        rows = []
        for size, delta in self.small_sizes:
            stages = [(self.small_batch_size / size, self.small_steps)]
            for text, published in self.published.items():
                charges = accounting.charges_of(stages, float(text))
                by = (("rdp", self.orders), ("rdp", None), ("pld", None))
                epsilons = [accounting.compose(charges, name, orders=orders, interval=self.interval).epsilon(delta) for name, orders in by]
                reported = f"{epsilons[0]:.2f}" if epsilons[0] < self.most else "infinite"
                rows.append((int(size), delta, float(text), published, *epsilons, reported))
        columns = ("documents", "delta", "noise_multiplier", "published", "rdp_old_orders", "rdp_default_orders", "pld", "reported")
        notes = (
            "the size of the small corpus is not printed: 4.0 to 4.4 million is its share of the bytes, the last one is what gives 3.726",
            f"reported: by RDP at their orders; above {self.most:g} an epsilon limits nothing and is reported as infinite",
        )
        return Table("small_corpus", columns, tuple(rows), f"{self.small_steps:,} steps of {self.small_batch_size}", notes)
