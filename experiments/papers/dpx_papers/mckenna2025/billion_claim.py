"""Tests what can be tested of the claim on a billion parameters at epsilon 10 and a billion people (McKenna et al. 2025, section 6)."""

from collections.abc import Sequence

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.noise import Calibration
from dpx.scaling.query import FLOPS_A_TOKEN
from dpx.scaling.surface import Surface
from dpx.table import Table
from dpx_papers.mckenna2025.lab import OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling import published
from dpx_papers.scaling.optima import optimum


@declaration
class MckennaBillionClaim(OfLab):
    """Computes noise-batch ratios by batch for a model of a billion parameters; they need no measurement.

    A loss at that scale is never stated. With measurements, the best configuration inside their range is given beside the ratios.

    Attributes:
        parameters: Parameters of the model.
        compute: FLOPs.
        size: Protected records.
        epsilon: Epsilon.
        tokens: Tokens of a record.
        batch_sizes: Batch sizes.
    """

    parameters: float | int
    compute: float | int
    size: int
    epsilon: float | int
    tokens: int
    batch_sizes: Sequence[int]

    def __call__(self) -> list[Table]:
        tables = [self._noise(), self._printed()]
        if not self.lab.is_measured:
            return [*tables, verdict_table([Part.of(CLAIM, None, "no measurements")])]
        fitted = self.lab.fitted()
        best = optimum(fitted.surface, self.lab.ratio(self.epsilon), size=self.size, epsilon=self.epsilon, compute=float(self.compute))
        rows = () if best is None else ((best.parameters, best.batch_size, best.steps, best.loss, "; ".join(best.marks)),)
        columns = ("model", "batch_size", "steps", "loss", "marks")
        inside = Table("best_inside", columns, rows, "the best configuration inside the grid; empty if none is inside", fitted.notes)
        return [*tables, inside, verdict_table([judged(fitted.surface, float(self.parameters))])]

    def _noise(self) -> Table:
        rows = []
        for batch in self.batch_sizes:
            steps = int(self.compute / (FLOPS_A_TOKEN * self.parameters * batch * self.tokens))
            solved = Calibration(self.epsilon, self.lab.delta).exact(self.size, batch, steps)
            rows.append((batch, steps, batch * steps / self.size, solved.poisson, solved.deterministic, solved.chosen, solved.ratio))
        columns = ("batch_size", "steps", "epochs", "sigma_poisson", "sigma_fixed", "chosen", "ratio")
        title = f"{self.parameters:.3g} parameters, {self.compute:.3g} FLOPs, {self.size:,} records, epsilon {self.epsilon:g}"
        return Table("noise", columns, tuple(rows), title, ("losses were measured in less than one epoch",))

    def _printed(self) -> Table:
        rows = tuple((one.size, one.epsilon, one.compute, one.parameters, one.loss) for one in published.TABLE_2 if one.size == self.size)
        notes = (
            "the paper's own optimum at this data has 3.3e8 parameters, the largest of its fit: a billion lies outside what was trained",
        )
        return Table("printed", ("size", "epsilon", "compute", "parameters", "loss"), rows, "Table 2 at this data", notes)

    def pictures(self) -> list[Picture]:
        """Plots the ratio by batch."""
        lines = Lines(table="noise", x="batch_size", y=("ratio",), y_label="noise-batch ratio", x_scale="log", y_scale="log")
        return [Picture("mckenna_billion_claim", "Noise-batch ratio of a billion parameters by batch size, at equal compute.", (lines,))]


CLAIM = "the model lies outside the trained ones, so that any loss of it is an extrapolation"


def judged(surface: Surface, parameters: float) -> Part:
    """Returns the verdict on the claim, which passes if the configuration is flagged as outside the measured range."""
    smallest, largest = float(surface.parameters_M[0]), float(surface.parameters_M[-1])
    words = f"trained: {smallest:,.0f} to {largest:,.0f} parameters; asked: {parameters:,.0f}"
    return Part.of(CLAIM, bool(surface.at(parameters, surface.steps_T[-1], surface.ratios_R[0]).is_outside), words)
