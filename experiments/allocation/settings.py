"""Prints epsilon of random allocation in thirty settings, beside Poisson sampling and no amplification, at the same noise and steps.

`python experiments/allocation/settings.py > experiments/allocation/settings.md`; with the arguments `0 10` it prints rows 0 to 9 alone.
"""

import sys

from dpx.privacy import accounting
from dpx.privacy.events import Release

# Steps of an epoch, noise multiplier, epochs, delta.
SETTINGS = [
    *((1, sigma, 1, 1e-6) for sigma in (0.7, 2.0)),
    *((2, sigma, epochs, 1e-6) for sigma in (0.6, 1.0, 3.0) for epochs in (1, 10)),
    *((10, sigma, epochs, delta) for sigma, epochs, delta in ((0.5, 3, 1e-5), (1.0, 10, 1e-6), (2.0, 30, 1e-8), (5.0, 100, 1e-10))),
    *((100, sigma, epochs, 1e-6) for sigma in (0.5, 0.7, 1.0, 2.0) for epochs in (1, 10)),
    *((100, 1.0, 10, delta) for delta in (1e-3, 1e-9, 1e-12)),
    *((1000, sigma, epochs, 1e-8) for sigma in (0.4, 0.6, 1.0) for epochs in (1, 10)),
    (10_000, 0.6, 4, 1e-9),
]


def own(steps: int, sigma: float, epochs: int, delta: float, accountant: str) -> float:
    charges = [(Release(noise_multiplier=sigma, sampling_probability=1 / steps, kind="random_allocation"), epochs)]
    return accounting.compose(charges, accountant).epsilon(delta)


def main(first: int = 0, last: int = len(SETTINGS)) -> None:
    if first == 0:
        print("# Epsilon of random allocation\n")
        print("By `python experiments/allocation/settings.py`. `pld` and `rdp` are bounds of random allocation with t steps an epoch.\n")
        print("| t | sigma | epochs | delta | pld | rdp | Poisson, pld | no amplification |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for steps, sigma, epochs, delta in SETTINGS[first:last]:
        by_pld, by_rdp, alone = (own(steps, sigma, epochs, delta, name) for name in ("pld", "rdp", "deterministic"))
        poisson = accounting.epsilon([(1 / steps, steps * epochs)], noise_multiplier=sigma, delta=delta)
        values = " | ".join(f"{value:.4f}" for value in (by_pld, by_rdp, poisson, alone))
        print(f"| {steps} | {sigma} | {epochs} | {delta:g} | {values} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
