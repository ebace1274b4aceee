"""Tests whether noise power falls as 1/M with M micro-batches (Du and Mi 2021, proposition 3 and equation 13).

By the central limit, this is true only as epsilon goes to 0. By the composition that is valid for DP-FP (`dpfp_table2_accounting`), it is
false: a record is used E times in E epochs for every M, and every use is visible.
"""

import math
from collections.abc import Sequence

from dpx_papers.analysis import Made, analysis
from dpx_papers.du2021.table2_accounting import own_stages


@analysis()
def dpfp_prop3_noise_ratio(
    size: int,
    epochs: int,
    batch_sizes: Sequence[int],
    micro_batches: Sequence[int],
    epsilons: Sequence[float | int],
    pld_epsilons: Sequence[float | int],
    epsilons_by_uses: Sequence[float | int] = (),
) -> Made:
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
    from dpx.privacy import solve
    from dpx.privacy.profile import gdp_clt_noise_multiplier

    delta, by_the_limit, by_losses, by_uses = 1 / (2 * size), [], [], []
    for epsilon in epsilons:
        for batch in batch_sizes:
            sigmas = {
                number: gdp_clt_noise_multiplier(own_stages(size, batch, number, epochs), epsilon=epsilon, delta=delta)
                for number in (1, *micro_batches)
            }
            at = {"epsilon_clt": epsilon, "batch_size": batch}
            by_the_limit += [at | _against_one(number, sigmas[number], sigmas[1]) for number in micro_batches]
    batch, most = batch_sizes[0], max(micro_batches)
    for epsilon in pld_epsilons:
        alone, sigma = (
            solve.noise_multiplier(own_stages(size, batch, number, epochs), epsilon=epsilon, delta=delta) for number in (1, most)
        )
        ends = {"sigma_alone": alone, "sigma": sigma, "power_ratio": (sigma / alone) ** 2}
        by_losses.append({"epsilon_pld": epsilon, "batch_size": batch, "micro_batches": most} | ends)
    for epsilon in epsilons_by_uses:
        alone = _sigma_by_uses(float(epsilon), own_stages(size, batch, 1, epochs), delta)
        for number in micro_batches:
            sigma = _sigma_by_uses(float(epsilon), own_stages(size, batch, number, epochs), delta)
            by_uses.append({"epsilon": epsilon, "batch_size": batch} | _against_one(number, sigma, alone))
    return {"power_by_equation_11": by_the_limit, "power_by_pld": by_losses, "power_by_uses": by_uses}


def _against_one(micro_batches: int, sigma: float, alone: float) -> dict[str, float | int]:
    return {"micro_batches": micro_batches, "sigma": sigma, "power_ratio": (sigma / alone) ** 2, "claimed_ratio": 1 / micro_batches}


def _sigma_by_uses(epsilon: float, stages: Sequence[tuple[float, int]], delta: float) -> float:
    from dpx.privacy import closed_form

    ((probability, draws),) = stages

    def excess(log_sigma: float) -> float:
        return closed_form.epsilon_by_uses(math.exp(log_sigma), draws, probability, delta) - epsilon

    return math.exp(closed_form.root(excess, math.log(0.05), math.log(1e4), 1e-10))
