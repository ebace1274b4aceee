"""Surfaces whose truth is known: measurements of them as a grid of runs would give, with noise of a stated deviation."""

import numpy as np

from dpx.cost.measured_runs import Measurements

PARAMETERS = {"a": 2e4, "b": 6e4, "c": 2e5, "d": 6e5, "e": 2e6}
RATIOS = 2.0 ** -np.arange(6, 15)[::-1]
STEPS = 100.0 * np.arange(1, 21)
BATCH, TOKENS = 128.0, 32.0


def form_l2(parameters, steps, ratio, *, e=2.0, a=40.0, alpha=0.4, b=30.0, beta=0.3, c=2.0, gamma=0.9, alpha2=-0.03):
    """Form L2 of the paper, with N = 128 examples a step."""
    noise = 1 / (1 + np.exp(-(np.log(ratio) + 5.5) / 1.6))
    return e + a / parameters**alpha + b / (BATCH * steps) ** beta + c * noise**gamma / parameters**alpha2


def form_l1(parameters, steps, ratio, model=1.0, data=1.0, noise=1.0):
    """Form L1 of the paper: noise costs every model and every number of steps the same."""
    return 2.0 + 35 * model / parameters**0.38 + 25 * data / (BATCH * steps) ** 0.28 + 12 * noise * ratio**0.5


def fewer_examples(parameters, steps, ratio, model=1.0, data=1.0, noise=1.0):
    """Of no form of the paper: with noise an example is worth a part of one, the less the larger the model."""
    worth = 1 / (1 + noise * (2e3 * ratio) ** 1.5 * (parameters / 2e5) ** 0.3)
    return 2.0 + 40 * model / parameters**0.4 + 30 * data / (BATCH * steps * worth) ** 0.3


def saturating(parameters, steps, ratio):
    """Not of that form: a plateau that noise makes longer, left along a logistic curve in log T."""
    delay = np.log(20 + 4e5 * ratio**1.2)
    progress = 1 / (1 + np.exp(-1.3 * (np.log(steps) - delay)))
    return 6.0 - (2.5 - 20 / parameters**0.35) * progress


def rows_of(truth, *, deviation=0.0, seed=0, ratios=RATIOS, steps=STEPS, parameters=PARAMETERS, rate=0.01):
    generator = np.random.default_rng(seed)
    rows = []
    for name, m in parameters.items():
        for ratio in ratios:
            losses = truth(m, steps, ratio) + deviation * generator.normal(size=len(steps))
            for step, loss in zip(steps, losses, strict=True):
                rows.append(
                    {"model": name, "parameters": m, "noise_batch_ratio": ratio, "learning_rate": rate, "replicate": 0}
                    | {"batch_size": BATCH, "sequence_length": TOKENS, "step": step, "loss": loss}
                )
    return rows


def measured(truth, **options) -> Measurements:
    return Measurements.from_rows(rows_of(truth, **options))


def simple_ratio(size, batch_size, steps):
    """A stand-in that needs no accountant: the noise of one Gaussian release a use, sqrt(uses) / B."""
    uses = np.maximum(steps * batch_size / size, 1e-3)
    return np.where(batch_size <= size, np.sqrt(uses) / batch_size, np.nan), np.zeros(np.shape(batch_size), bool)
