"""Tests what can be tested of the claim on a billion parameters at epsilon 10 and a billion people (McKenna et al. 2025, section 6)."""

from collections.abc import Sequence

from dpx.cost.designs import FLOPS_A_TOKEN, Calibration
from dpx.cost.surface import Surface
from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling import published
from dpx_papers.scaling.optima import optima

CLAIM = "the model lies outside the trained ones, so that any loss of it is an extrapolation"


@of_positive
def mckenna_billion_claim(
    lab: Lab, parameters: float | int, compute: float | int, size: int, epsilon: float | int, tokens: int, batch_sizes: Sequence[int]
) -> Made:
    """Computes noise-batch ratios by batch for a model of a billion parameters; they need no measurement.

    A loss at that scale is never stated. With measurements, the best configuration inside their range is given beside the ratios.

    Attributes:
        lab: The measurements and the budgets.
        parameters: Parameters of the model.
        compute: FLOPs.
        size: Protected records.
        epsilon: Epsilon.
        tokens: Tokens of a record.
        batch_sizes: Batch sizes.
    """
    noise = []
    for batch in batch_sizes:
        steps = int(compute / (FLOPS_A_TOKEN * parameters * batch * tokens))
        solved = Calibration(epsilon, lab.delta).exact(size, batch, steps)
        row = {"batch_size": batch, "steps": steps, "epochs": batch * steps / size, "sigma_poisson": solved.poisson}
        noise.append(row | {"sigma_fixed": solved.deterministic, "chosen": solved.chosen, "ratio": solved.ratio})
    names = ("size", "epsilon", "compute", "parameters", "loss")
    tables = {"noise": noise, "printed": [{name: getattr(one, name) for name in names} for one in published.TABLE_2 if one.size == size]}
    if not lab.is_measured:
        return tables | {"verdicts": [Part.of(CLAIM, None, "no measurements")]}
    fitted = lab.fitted()
    best = optima(fitted.surface, lab.ratio, [size], [epsilon], [float(compute)])
    inside = best.rename(columns={"parameters": "model"})[["model", "batch_size", "steps", "loss", "marks"]]
    return tables | {"best_inside": Noted(inside, fitted.notes), "verdicts": [judged(fitted.surface, float(parameters))]}


def judged(surface: Surface, parameters: float) -> Part:
    """Returns the verdict on the claim, which passes if the configuration is flagged as outside the measured range."""
    smallest, largest = float(surface.parameters_M[0]), float(surface.parameters_M[-1])
    words = f"trained: {smallest:,.0f} to {largest:,.0f} parameters; asked: {parameters:,.0f}"
    return Part.of(CLAIM, bool(surface.at(parameters, surface.steps_T[-1], surface.ratios_R[0]).is_outside), words)
