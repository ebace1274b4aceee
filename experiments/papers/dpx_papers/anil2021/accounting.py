"""Computes the noise multipliers that Anil et al. 2021 do not print, and epsilon at that noise by each accountant and sampler (sections
3 and 5.1, A11)."""

from collections.abc import Mapping, Sequence

from dpx.privacy import accounting, solve
from dpx.privacy.events import Release
from dpx.privacy.profile import gdp_clt_epsilon, gdp_clt_noise_multiplier
from dpx.sampler.batch_schedule import stages as stages_of
from dpx_papers.analysis import Made, analysis
from dpx_papers.anil2021.schedule_savings import readings

Stages = list[tuple[float, int]]


@analysis()
def anil_accounting(
    epsilon: float,
    delta: float,
    size: int,
    steps: int,
    batch_sizes: Sequence[int],
    curve_steps: Sequence[int],
    known_noise_multipliers: Mapping[str, float],
    interval: float | None = None,
) -> Made:
    """Computes noise multipliers by Renyi accounting for every batch size and schedule, and epsilon at that noise by the other
    accountants and by fixed-size draws.

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

    def solved(stages: Stages, accountant: str = "rdp") -> float:
        charges = accounting.charges_of(stages, 1.0)
        return solve.solve(charges, epsilon=epsilon, delta=delta, accountant=accountant, interval=interval)

    def spent(stages: Stages, sigma: float) -> dict[str, float]:
        charges = accounting.bucketed(accounting.charges_of(stages, sigma), 30)
        return {f"epsilon ({name})": accounting.compose(charges, name, interval=interval).epsilon(delta) for name in ("rdp", "pld")}

    def known(name: str, sigma: float) -> dict[str, float | None]:
        value = known_noise_multipliers.get(name)
        return {"sigma known (rdp)": value, "difference": sigma / value - 1 if value else None}

    constant = {batch: [(batch / size, steps)] for batch in batch_sizes}
    sigmas = {batch: solved(stages) for batch, stages in constant.items()}
    batches, fixed_size, schedules, curve = [], [], [], []
    for batch, sigma in sigmas.items():
        row = {"batch size": batch, "sigma (rdp)": sigma, "sigma / batch": sigma / batch, "epochs": batch * steps / size}
        row |= spent(constant[batch], sigma) | {"sigma (pld)": solved(constant[batch], "pld")}
        row |= {"sigma (gdp_clt)": gdp_clt_noise_multiplier(constant[batch], epsilon=epsilon, delta=delta)}
        batches.append(row | known(str(batch), sigma))
        draws = (without_replacement(size, batch, steps, times * sigma, delta) for times in (2, 1))
        row = {"batch size": batch, "sigma": sigma, "Poisson": epsilon}
        fixed_size.append(row | dict(zip(("fixed size, record emptied (C)", "fixed size, record replaced (2C)"), draws, strict=True)))
    for option, reading, schedule in readings():
        stages = [(batch / size, count) for batch, count in stages_of(schedule, steps)]
        sigma = solved(stages)
        schedules.append({"option": option, "reading": reading, "sigma (rdp)": sigma} | spent(stages, sigma) | known(option, sigma))
    for batch in dict.fromkeys((*batch_sizes[:1], *batch_sizes[-1:])):
        for count in curve_steps:
            stages = [(batch / size, count)]
            limit = gdp_clt_epsilon(accounting.charges_of(stages, sigmas[batch]), delta)
            curve.append({"batch size": batch, "steps": count} | spent(stages, sigmas[batch]) | {"gdp_clt (no bound)": limit})
    return {"sigma_by_batch": batches, "sigma_by_schedule": schedules, "fixed_size_sampling": fixed_size, "epsilon_by_step": curve}


def without_replacement(size: int, batch: int, steps: int, sigma: float, delta: float) -> float:
    """Returns epsilon by RDP of draws without replacement.

    The event halves sigma for a replaced record (sensitivity 2C); twice the noise compensates for that for a zeroed record (C).
    """
    release = Release(noise_multiplier=sigma, sampling_probability=batch / size, kind="fixed_size", size=size, sample_size=batch)
    return accounting.compose([(release, steps)], "rdp", "replace_one").epsilon(delta)
