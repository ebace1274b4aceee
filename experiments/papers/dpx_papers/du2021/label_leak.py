"""Tests the claim "labels need no protection if inputs are protected" with the gradient of the head (Du and Mi 2021, section 2, F19).

The gradient of the head's bias is the mean over rows of (probability - label), so the sum of probabilities minus rows times the gradient is
the label counts. DP-FP puts no noise on it, with a trained encoder or a frozen one. DP-SGD on the head does: its noise bounds how well
anyone can distinguish a batch from the same batch with one label changed.

B: rows, K: classes, H: width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.declared_data import Data
from dpx.declaration import require
from dpx.models.checkpoint_shape import OfCheckpoint
from dpx.models.shape import Bert
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.du2021 import batches
from dpx_papers.du2021.batches import Steps
from dpx_papers.du2021.one_step import NoisyClassifier
from dpx_papers.report.shape import Part

Stages = Sequence[tuple[float, int]]
# Recovered counts with a larger error are plotted with the last one.
MOST = 4


def _require_part(declared: Any) -> None:
    is_part = 0 < declared.dp_sgd_batch_size <= declared.size
    require(is_part, f"analysis.dp_sgd_batch_size={declared.dp_sgd_batch_size}", "is not a part of the rows", "Give at most analysis.size")
    require(declared.draws > 1, f"analysis.draws={declared.draws}", "an error needs two draws", "Give thousands")


@analysis(_require_part)
def dpfp_label_leak(
    model: Bert | OfCheckpoint,
    init: RandomStart | FromCheckpoint,
    data: Data,
    sentences: Sequence[Sequence[str | int]],
    noise_multipliers: Sequence[float | int],
    steps: int,
    batch_size: int,
    micro_batches: int,
    size: int,
    dp_sgd_batch_size: int,
    dp_sgd_steps: int,
    epsilons: Sequence[float | int],
    draws: int,
    seed: int,
) -> Made:
    """Recovers labels from gradients of a made-up batch, and of steps of `data` if its files exist.

    DP-SGD trains the head alone, on the same features, at delta 1/(2 size), for neighbours that differ in one row's text or label.

    Attributes:
        model: The model.
        init: Its initial weights.
        data: Rows whose steps are drawn, if its files exist.
        sentences: A made-up batch of (text, label).
        noise_multipliers: DP-FP's sigma over C, each of which is measured.
        steps: Steps that are drawn.
        batch_size: Expected rows of a step.
        micro_batches: Poisson micro-batches of a step.
        size: Number of rows that DP-SGD protects.
        dp_sgd_batch_size: Batch size of DP-SGD.
        dp_sgd_steps: Steps of DP-SGD.
        epsilons: Epsilons of DP-SGD.
        draws: Draws of noise and simulated runs.
        seed: Fixes all randomness of the analysis.
    """
    import pandas as pd

    large = batches.drawn(data, init, steps, batch_size, micro_batches, seed)
    subjects = [batches.made_up(sentences, init, data), *([large] if large else [])]
    classifiers = [batches.classifier_of(model, subject) for subject in subjects]
    starts = [classifier.parameters(init, seed) for classifier in classifiers]
    each = zip(classifiers, starts, subjects, strict=True)
    counts = frame([row for one in each for row in of_dp_fp(*one, noise_multipliers, seed)])
    stages, delta = [(dp_sgd_batch_size / size, dp_sgd_steps)], 1 / (2 * size)
    sigmas = {float(epsilon): sigma_of(stages, float(epsilon), delta) for epsilon in epsilons}
    last = counts[counts["batch"] == subjects[-1].name]
    errors = []
    for step, total_K in zip(subjects[-1].steps, _clipped_bias(classifiers[-1], starts[-1], subjects[-1]), strict=True):
        errors += _errors_of(step.labels, total_K, sigmas, draws, seed)
    exact = {"method": "DP-FP, any noise", "error": 0, "share": last["exact_steps"].sum() / last["steps"].sum()}
    shares = frame(errors).groupby(["method", "error"], sort=False, as_index=False)["share"].sum()
    shares["share"] /= draws * len(subjects[-1].steps)
    guesses = frame([row for epsilon, sigma in sigmas.items() for row in bounds(epsilon, sigma, stages, delta, draws, seed)])
    return {"counts": counts, "errors": pd.concat([frame([exact]), shares]), "guesses": guesses, "verdicts": judged(counts, guesses)}


def sigma_of(stages: Stages, epsilon: float, delta: float) -> float:
    """Returns the noise multiplier of DP-SGD for neighbours that differ in one row."""
    from dpx.privacy import solve

    return solve.noise_multiplier(stages, epsilon=epsilon, delta=delta, adjacency="replace_one")


def of_dp_fp(
    classifier: NoisyClassifier, params: Any, subject: Steps, noise_multipliers: Sequence[float | int], seed: int
) -> list[dict[str, Any]]:
    """Returns one row for each head and noise: by the bias gradient alone for a head of zeros, with the noisy rows for a random one."""
    import jax

    gradient = jax.jit(jax.grad(lambda head, rest, *given: classifier.loss(rest | {"classifier": head}, *given)))
    probabilities = jax.jit(classifier.probabilities)
    zeros = jax.tree.map(jax.numpy.zeros_like, params["classifier"])
    heads = (("new, zeros", zeros, "the bias gradient"), ("new, random", params["classifier"], "the bias gradient and the noisy rows"))
    rows = []
    for name, head, known in heads:
        for sigma in noise_multipliers:
            found = []
            for number, step in enumerate(subject.steps):
                given = (step.batch, batches.noise_of(classifier, seed, number, step).astype(np.float32), float(sigma))
                bias_K = np.asarray(gradient(head, params, *given)["bias"], np.float64)
                # A head of zeros gives every row the same output, so the attack needs only the number of rows.
                answers = None if head is zeros else probabilities(params | {"classifier": head}, *given)
                found.append(counts_of(bias_K, len(step.labels), None if answers is None else np.asarray(answers, np.float64)))
            row = {"batch": subject.name, "encoder": classifier.model.name, "head": name, "adversary_knows": known}
            rows.append(row | {"noise_multiplier": float(sigma)} | _exactness(found, subject))
    return rows


def _errors_of(label_B: np.ndarray, total_K: np.ndarray, sigmas: Mapping[float, float], draws: int, seed: int) -> list[dict[str, Any]]:
    """Returns how many draws have each error of the last class's count in one step, by the same attack on the noisy sum of DP-SGD."""
    classes, rows = len(total_K), []
    for epsilon, sigma in sigmas.items():
        noisy_NK = total_K + sigma * np.random.default_rng([seed, 1, 2]).standard_normal((draws, classes))
        # The true sums over classes add up to zero, so their mean is noise alone.
        counts_N = np.round(len(label_B) / classes - (noisy_NK - noisy_NK.mean(axis=1, keepdims=True)))[:, -1]
        off_N = np.clip(counts_N - np.sum(label_B == classes - 1), -MOST, MOST)
        for error in range(-MOST, MOST + 1):
            rows.append({"method": f"DP-SGD, epsilon {epsilon:g}", "error": error, "share": int(np.sum(off_N == error))})
    return rows


def _clipped_bias(classifier: NoisyClassifier, params: Any, subject: Steps) -> list[np.ndarray]:
    """Returns the bias's part [K] of each step's sum of clipped head gradients, at clipping norm 1 and a head of zeros on rows of
    norm 1."""
    import jax
    import jax.numpy as jnp

    from dpx_papers.du2021.forward import clipped_rows, head_losses

    zeros = jnp.zeros((classifier.model.width, subject.classes)), jnp.zeros(subject.classes)

    def one(h_H: Any, label: Any, is_row: Any) -> Any:
        kernel_HK, bias_K = jax.grad(lambda head: head_losses(head[0], head[1], h_H[None], label[None])[0])(zeros)
        norm = jnp.sqrt(jnp.sum(jnp.square(kernel_HK)) + jnp.sum(jnp.square(bias_K)))
        return jnp.where(is_row, bias_K / jnp.maximum(norm, 1.0), 0.0)

    @jax.jit
    def total(batch: Any) -> Any:
        return jax.vmap(one)(clipped_rows(classifier.pooled(params, batch), 1.0), batch["label"], batch["is_row"]).sum(axis=0)

    return [np.asarray(total(step.batch), np.float64) for step in subject.steps]


def bounds(epsilon: float, sigma: float, stages: Stages, delta: float, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields the success of the best adversary on a whole run and on one step, with the bounds by epsilon and by the whole profile."""
    from dpx.privacy import accounting, closed_form

    composed = accounting.compose(accounting.charges_of(stages, sigma), "pld", "replace_one")
    # A changed label moves the sum by twice the clipping norm, and the rows of the batch are known here.
    alone = closed_form.epsilon(2 / sigma, delta)
    for guessed, own, profile, told in (
        ("one label, from the whole run", epsilon, composed.delta(0.0), _told_of_a_run(sigma, stages, draws, seed)),
        ("neighbouring counts of a known batch", alone, closed_form.delta(2 / sigma, 0.0), _told_of_a_step(sigma, draws, seed)),
    ):
        row = {"epsilon": epsilon, "noise_multiplier": sigma, "guessed": guessed, "epsilon_of_it": own}
        row |= {"bound_by_epsilon": accuracy_bound(own, delta), "bound_by_profile": (1 + profile) / 2}
        share = float(np.mean(told))
        yield row | {"accuracy": share, "error": math.sqrt(share * (1 - share) / len(told))}


def _told_of_a_step(sigma: float, draws: int, seed: int) -> np.ndarray:
    """Returns whether each of `draws` guesses is right: the other label reverses the clipped gradient, of norm 1."""
    return 1.0 + sigma * np.random.default_rng([seed, 2, 2]).standard_normal(draws) > 0


def _told_of_a_run(sigma: float, stages: Stages, draws: int, seed: int) -> np.ndarray:
    """Returns the same over all steps; the row takes part in each step with probability q, and nobody sees when."""
    ((q, steps),) = stages
    random = np.random.default_rng([seed, 3, 2])
    shift = random.random((draws, steps)) < q
    z = (shift + sigma * random.standard_normal((draws, steps))) / sigma
    # The log-likelihood of z / sigma under a shift of +1 / sigma or -1 / sigma in a share q of the steps.
    plus, minus = (np.log1p(q * np.expm1(sign * z / sigma - 0.5 / sigma**2)).sum(axis=1) for sign in (1, -1))
    return plus > minus


def counts_of(bias_gradient_K: np.ndarray, rows: int, probabilities_BK: np.ndarray | None = None) -> np.ndarray:
    """Returns label counts [K], recovered from the gradient of the mean loss by the head's bias, before rounding to whole numbers.

    `probabilities_BK` are the head's outputs on the noisy rows; without them every output is taken to be 1/K, as of a head of zeros.
    """
    classes = len(bias_gradient_K)
    answered_K = np.full(classes, rows / classes) if probabilities_BK is None else probabilities_BK[:rows].sum(axis=0)
    return answered_K - rows * bias_gradient_K


def accuracy_bound(epsilon: float, delta: float) -> float:
    """Returns the largest share of right guesses between two equally likely neighbours under (epsilon, delta).

    It is (e^epsilon + delta) / (e^epsilon + 1).
    """
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def _exactness(found: Sequence[np.ndarray], subject: Steps) -> dict[str, int | float]:
    """Returns the number of steps, of rows and of steps whose rounded counts are all right, and the largest error before rounding."""
    true = [np.bincount(step.labels, minlength=subject.classes) for step in subject.steps]
    errors = [float(np.abs(a - b).max()) for a, b in zip(found, true, strict=True)]
    rows, exact = sum(len(step.labels) for step in subject.steps), sum(error < 0.5 for error in errors)
    return {"steps": len(found), "rows": rows, "exact_steps": exact, "largest_error": max(errors)}


def judged(counts: Any, guesses: Any) -> list[Part]:
    """Returns the verdicts: exact counts for DP-FP at every noise, and DP-SGD's guesses within their bounds."""
    steps, exact = counts["steps"].sum(), counts["exact_steps"].sum()
    over = (guesses["accuracy"] - guesses["bound_by_profile"] - 3 * guesses["error"]).max()
    ordered = (guesses["bound_by_profile"] <= guesses["bound_by_epsilon"] + 1e-9).all()
    claims = "the label counts of every step are recovered exactly from DP-FP's head gradient"
    return [
        Part.of(claims, exact == steps, f"{exact} of {steps} steps"),
        Part.of(
            "no guess on DP-SGD's head beats its bound by more than three standard errors",
            over <= 0 and ordered,
            f"largest excess {over:.2g}",
        ),
    ]
