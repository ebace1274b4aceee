"""Prints epsilon of random allocation in thirty settings, beside Poisson sampling, no amplification and the published package.

`python experiments/allocation/settings.py > experiments/allocation/settings.md`; the last column needs the package `PLD_accounting` 2.0.
"""

import importlib
import importlib.util
import warnings

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


def published(steps: int, sigma: float, epochs: int, delta: float) -> str:
    """Returns the package's epsilon with 2e7 points, or why there is none."""
    if importlib.util.find_spec("PLD_accounting") is None:
        return "not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("PLD_accounting")
        params = package.PrivacyParams(sigma=sigma, num_steps=steps, num_epochs=epochs, delta=delta)
        route = package.ConvolutionMethod.FFT
        config = package.AllocationSchemeConfig(
            loss_discretization=2e-3, tail_truncation=delta * 1e-4, max_grid_fft=20_000_000, convolution_method=route
        )
        try:
            return f"{package.gaussian_allocation_epsilon_configurable(params=params, config=config):.4f}"
        except (ValueError, MemoryError) as refused:
            return type(refused).__name__


def main() -> None:
    print("# Epsilon of random allocation\n")
    print("`python experiments/allocation/settings.py`. `pld` and `rdp` are dpx's bounds; the others have the same noise and steps.\n")
    print("| t | sigma | epochs | delta | pld | rdp | Poisson, pld | no amplification | PLD_accounting 2.0, FFT |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for steps, sigma, epochs, delta in SETTINGS:
        by_pld, by_rdp, alone = (own(steps, sigma, epochs, delta, name) for name in ("pld", "rdp", "deterministic"))
        poisson = accounting.epsilon([(1 / steps, steps * epochs)], noise_multiplier=sigma, delta=delta)
        values = " | ".join(f"{value:.4f}" for value in (by_pld, by_rdp, poisson, alone))
        print(f"| {steps} | {sigma} | {epochs} | {delta:g} | {values} | {published(steps, sigma, epochs, delta)} |", flush=True)


if __name__ == "__main__":
    main()
