"""Computes the noise multipliers that Anil et al. 2021 do not print, and epsilon at that noise by each accountant and sampler (sections
3 and 5.1, A11)."""

from collections.abc import Sequence
from typing import Any

from dpx.batch_schedule import stages as stages_of
from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.privacy import accounting, solve
from dpx.privacy.approximations import gdp_clt_epsilon, gdp_clt_noise_multiplier
from dpx.privacy.events import Release
from dpx.table import Table
from dpx_papers.anil2021.schedule_savings import readings

Stages = list[tuple[float, int]]


@declaration
class AnilAccounting:
    """Computes noise multipliers by Renyi accounting for every batch size and schedule, and epsilon at that noise by the other
    accountants.

    Attributes:
        epsilon: Epsilon for which the noise is solved.
        delta: Delta of epsilon.
        size: Number of protected rows.
        steps: Steps of a run.
        batch_sizes: Batch sizes of the table.
        curve_steps: Numbers of steps of the curve.
        known_noise_multipliers: Noise multipliers that other implementations compute from the paper's settings, by batch size or
            schedule option.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    epsilon: float
    delta: float
    size: int
    steps: int
    batch_sizes: Sequence[int]
    curve_steps: Sequence[int]
    known_noise_multipliers: dict[str, float]
    interval: float | None = None

    def __call__(self) -> list[Table]:
        return [self.batches(), self.schedules(), self.fixed_size(), self.curve()]

    def batches(self) -> Table:
        """Returns a table with one row per batch size."""
        rows = []
        for batch in self.batch_sizes:
            stages = [(batch / self.size, self.steps)]
            sigma = self._sigma(stages)
            row = {"batch size": batch, "sigma (rdp)": sigma, "sigma / batch": sigma / batch, "epochs": batch * self.steps / self.size}
            row |= {f"epsilon ({name})": self._epsilon(stages, sigma, name) for name in ("rdp", "pld")}
            row |= {"sigma (pld)": self._sigma(stages, "pld")}
            row |= {"sigma (gdp_clt)": gdp_clt_noise_multiplier(stages, epsilon=self.epsilon, delta=self.delta)}
            rows.append(row | dict(zip(("sigma known (rdp)", "difference"), self._known(str(batch), sigma), strict=True)))
        notes = ("gdp_clt is an approximation and bounds nothing: at its noise the true epsilon is above the target",)
        return Table.from_rows("sigma_by_batch", rows, f"noise for epsilon {self.epsilon} at delta {self.delta}", notes)

    def schedules(self) -> Table:
        """Returns a table with one row per reading of the batch schedule."""
        rows = []
        for option, reading, schedule in readings():
            stages = [(batch / self.size, steps) for batch, steps in stages_of(schedule, self.steps)]
            sigma = self._sigma(stages)
            bounds = (self._epsilon(stages, sigma, "rdp"), self._epsilon(stages, sigma, "pld"))
            rows.append((option, reading, sigma, *bounds, *self._known(option, sigma)))
        columns = ("option", "reading", "sigma (rdp)", "epsilon (rdp)", "epsilon (pld)", "sigma known (rdp)", "difference")
        return Table("sigma_by_schedule", columns, tuple(rows), "one noise multiplier for a rising batch")

    def fixed_size(self) -> Table:
        """Returns a table for the sampling that the text describes (batches of fixed size), at the noise of its formula for Poisson
        sampling."""
        rows = []
        for batch in self.batch_sizes:
            sigma = self._sigma([(batch / self.size, self.steps)])
            rows.append((batch, sigma, self.epsilon, self._without_replacement(batch, 2 * sigma), self._without_replacement(batch, sigma)))
        columns = ("batch size", "sigma", "Poisson", "fixed size, record emptied (C)", "fixed size, record replaced (2C)")
        notes = ("the paper draws a prespecified number of examples and uses the bound for Poisson draws: these are different mechanisms",)
        return Table("fixed_size_sampling", columns, tuple(rows), "epsilon (rdp) of fixed-size batches at Poisson's noise", notes)

    def curve(self) -> Table:
        """Returns a table of epsilon by step, at the noise of the whole run."""
        rows = []
        for batch in (self.batch_sizes[0], self.batch_sizes[-1]):
            sigma = self._sigma([(batch / self.size, self.steps)])
            for steps in self.curve_steps:
                stages = [(batch / self.size, steps)]
                charges = accounting.charges_of(stages, sigma)
                bounds = (self._epsilon(stages, sigma, "rdp"), self._epsilon(stages, sigma, "pld"))
                rows.append((batch, steps, *bounds, gdp_clt_epsilon(charges, self.delta)))
        columns = ("batch size", "steps", "epsilon (rdp)", "epsilon (pld)", "gdp_clt (no bound)")
        return Table("epsilon_by_step", columns, tuple(rows), "epsilon spent as steps go by")

    def pictures(self) -> list[Picture]:
        """Plots noise and epsilon by batch size, the cost of fixed-size draws, and epsilon by step."""
        text = f"Noise multiplier for epsilon {self.epsilon} at delta {self.delta} over {self.steps:,} steps, and epsilon at RDP's."
        other = "Epsilon by RDP of fixed-size draws at the noise that Poisson draws need; epsilon as steps go by at two batch sizes."
        return [Picture("anil_noise", text, _noise_panels()), Picture("anil_epsilon", other, _epsilon_panels())]

    def _known(self, name: str, sigma: float) -> tuple[float | None, float | None]:
        known = self.known_noise_multipliers.get(name)
        return (known, sigma / known - 1) if known else (None, None)

    def _sigma(self, stages: Stages, accountant: str = "rdp") -> float:
        charges = accounting.charges_of(stages, 1.0)
        return solve.solve(charges, epsilon=self.epsilon, delta=self.delta, accountant=accountant, interval=self.interval)

    def _epsilon(self, stages: Stages, sigma: float, accountant: str) -> float:
        charges = accounting.bucketed(accounting.charges_of(stages, sigma), 30)
        return accounting.compose(charges, accountant, interval=self.interval).epsilon(self.delta)

    def _without_replacement(self, batch: int, sigma: float) -> float:
        """Returns the event of a draw without replacement.

        The event halves sigma for a replaced record (sensitivity 2C); twice the noise compensates for that for a zeroed record (C).
        """
        release = Release(
            noise_multiplier=sigma, sampling_probability=batch / self.size, kind="fixed_size", size=self.size, sample_size=batch
        )
        return accounting.compose([(release, self.steps)], "rdp", "replace_one").epsilon(self.delta)


BATCH: dict[str, Any] = {"x": "batch size", "x_scale": "log"}
BOUNDS = (("epsilon (rdp)", "RDP"), ("epsilon (pld)", "PLD"))


def _noise_panels() -> tuple[Lines, Lines]:
    names = (("sigma (rdp)", "RDP"), ("sigma (pld)", "PLD"), ("sigma (gdp_clt)", "CLT, no bound"), ("sigma known (rdp)", "RDP, known"))
    return (
        Lines(
            table="sigma_by_batch",
            y=("sigma (rdp)", "sigma (pld)", "sigma (gdp_clt)"),
            marks=("sigma known (rdp)",),
            names=names,
            y_label="noise multiplier",
            **BATCH,
        ),
        Lines(table="sigma_by_batch", y=("epsilon (rdp)", "epsilon (pld)"), names=BOUNDS, y_label="epsilon at RDP's noise", **BATCH),
    )


def _epsilon_panels() -> tuple[Lines, Lines]:
    fixed = (("fixed size, record emptied (C)", "fixed, emptied"), ("fixed size, record replaced (2C)", "fixed, replaced"))
    return (
        Lines(
            table="fixed_size_sampling",
            y=("Poisson", "fixed size, record emptied (C)", "fixed size, record replaced (2C)"),
            names=fixed,
            y_scale="log",
            y_label="epsilon",
            **BATCH,
        ),
        Lines(
            table="epsilon_by_step",
            x="steps",
            y=("epsilon (rdp)", "epsilon (pld)", "gdp_clt (no bound)"),
            by="batch size",
            names=(*BOUNDS, ("gdp_clt (no bound)", "CLT")),
            y_label="epsilon",
        ),
    )
