"""Compares settings of equal (epsilon, delta), which differ in what an attacker can reach (McKenna et al. 2025, appendix D and Figure
15)."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Cells, Lines, Picture
from dpx.scaling.vulnerability import excess_by_profiles
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table


@declaration
class MckennaCalibrationProfiles(Positive):
    """Calibrates Poisson settings that visit the same number of records to one (epsilon, delta), and compares them over all of delta(eps).

    Attributes:
        size: Protected records.
        examples: Records that a setting visits.
        epsilon: Epsilon of the calibration.
        delta: Delta of the calibration.
        batch_sizes: Batch sizes.
        points: Epsilons at which delta is compared.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    size: int
    examples: int
    epsilon: float
    delta: float
    batch_sizes: Sequence[int]
    points: Sequence[float | int]
    interval: float

    def __call__(self) -> list[Table]:
        settings = {batch: self._composed(batch) for batch in self.batch_sizes}
        profiles = self._profiles(settings)
        part = judged(profiles.as_json()["rows"], float(self.epsilon))
        return [self._noise(settings), profiles, self._excess(settings), verdict_table([part])]

    def _composed(self, batch: int):
        from dpx.privacy import solve
        from dpx.privacy.accounting import compose
        from dpx.privacy.events import Release

        charges = [(Release(noise_multiplier=1.0, sampling_probability=batch / self.size), self.examples // batch)]
        sigma = solve.solve(charges, epsilon=self.epsilon, delta=self.delta, interval=self.interval)
        return sigma, compose(solve.scaled(charges, sigma), interval=self.interval)

    def _noise(self, settings: dict) -> Table:
        rows = [(batch, self.examples // batch, sigma, composed.delta(0.0)) for batch, (sigma, composed) in settings.items()]
        columns = ("batch_size", "steps", "noise_multiplier", "membership_advantage")
        return Table("settings", columns, tuple(rows), f"all at epsilon {self.epsilon}, delta {self.delta}")

    def _profiles(self, settings: dict) -> Table:
        rows = [(epsilon, *(composed.delta(float(epsilon)) for _, composed in settings.values())) for epsilon in self.points]
        columns = ("epsilon", *(f"delta_at_batch_{batch}" for batch in settings))
        return Table("profiles", columns, tuple(rows), "profiles cross at the calibration point")

    def _excess(self, settings: dict) -> Table:
        profiles = {batch: deltas(composed) for batch, (_, composed) in settings.items()}
        rows = [(one, two, excess_by_profiles(EPSILONS, profiles[one], profiles[two])) for one, two in itertools.permutations(settings, 2)]
        return Table("excess_vulnerability", ("instead_of", "uses", "excess"), tuple(rows), "Kaissis et al. 2024")

    def pictures(self) -> list[Picture]:
        """Plots the profiles, which cross at the claim, and what an attacker gains from them."""
        by_batch = tuple((f"delta_at_batch_{batch}", f"batch {batch:,}") for batch in self.batch_sizes)
        profiles = Lines(
            table="profiles", x="epsilon", y=tuple(name for name, _ in by_batch), names=by_batch, y_scale="log", y_label="delta"
        )
        label = "membership advantage, delta(0)"
        advantage = Lines(table="settings", x="batch_size", y=("membership_advantage",), x_scale="log", y_label=label)
        excess = Cells(table="excess_vulnerability", x="instead_of", y="uses", value="excess", x_label="batch size", y_label="instead uses")
        both = f"Settings of equal epsilon {self.epsilon:g} and delta {self.delta:g}: profiles, and membership advantage by batch size."
        one = "Excess vulnerability (Kaissis et al. 2024) of using one batch size instead of another at the same epsilon and delta."
        return [Picture("mckenna_profiles", both, (profiles, advantage)), Picture("mckenna_excess", one, (excess,))]


EPSILONS = np.concatenate([[0.0], np.geomspace(1e-2, 30, 80)])


def deltas(composed) -> np.ndarray:
    """Returns delta of a composition at each of `EPSILONS`."""
    return np.array([composed.delta(float(epsilon)) for epsilon in EPSILONS])


def judged(rows: Sequence[Mapping[str, float | int]], epsilon: float) -> Part:
    """Returns the verdicts: for each two batch sizes, one profile is above the other below the claimed epsilon and below it above that
    epsilon."""
    claim = f"profiles cross only at epsilon {epsilon:g}: the larger batch reveals more below it and less above"
    names = [name for name in rows[0] if name != "epsilon"]
    kept = [row for row in rows if row["epsilon"] != epsilon]
    signs = [(row[two] > row[one]) == (row["epsilon"] < epsilon) for row in kept for one, two in itertools.pairwise(names)]
    return Part.of(claim, bool(signs) and all(signs), f"{sum(signs)} of {len(signs)} neighbours in order, over {len(kept)} points")
