"""Tests the claim "labels need no protection if inputs are protected" with the gradient of the head (Du and Mi 2021, section 2, F19).

The gradient of the head's bias is the mean over rows of (probability - label), so the sum of probabilities minus rows times the gradient is
the label counts. DP-FP puts no noise on it, with a trained encoder or a frozen one. DP-SGD on the head does: its noise bounds how well
anyone can distinguish a batch from the same batch with one label changed.

B: rows, K: classes, H: width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration, require
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.du2021 import batches
from dpx_papers.du2021.batches import OfSteps, Steps
from dpx_papers.du2021.one_step import shape_of
from dpx_papers.report.shape import Part, verdict_table

# Recovered counts with a larger error are plotted with the last one.
MOST = 4


@declaration
class DpfpLabelLeak(OfSteps):
    """Recovers labels from gradients of a made-up batch, and of steps of `data` if its files exist.

    DP-SGD trains the head alone, on the same features, at delta 1/(2 size), for neighbours that differ in one row's text or label.

    Attributes:
        size: Number of rows that DP-SGD protects.
        dp_sgd_batch_size: Batch size of DP-SGD.
        dp_sgd_steps: Steps of DP-SGD.
        epsilons: Epsilons of DP-SGD.
        draws: Draws of noise and simulated runs.
    """

    size: int
    dp_sgd_batch_size: int
    dp_sgd_steps: int
    epsilons: Sequence[float | int]
    draws: int

    def __post_init__(self) -> None:
        is_part = 0 < self.dp_sgd_batch_size <= self.size
        require(is_part, f"analysis.dp_sgd_batch_size={self.dp_sgd_batch_size}", "is not a part of the rows", "Give at most analysis.size")
        require(self.draws > 1, f"analysis.draws={self.draws}", "an error needs two draws", "Give thousands")

    def __call__(self) -> list[Table]:
        subjects = [batches.made_up(self.sentences, self.init, self.data)]
        large = self.drawn()
        subjects += [large] if large else []
        rows = [row for one in subjects for row in self._of_dp_fp(one)]
        exact = Table("counts", COUNTS, tuple(rows), "label counts recovered from one step of DP-FP", NOTES)
        sigmas = {float(epsilon): self._sigma(float(epsilon)) for epsilon in self.epsilons}
        errors = self._errors(subjects[-1], sigmas, [dict(zip(COUNTS, row, strict=True)) for row in rows if row[0] == subjects[-1].name])
        bounds = self._bounds(sigmas)
        return [exact, errors, bounds, verdict_table(judged(exact.as_json()["rows"], bounds.as_json()["rows"]))]

    def _sigma(self, epsilon: float) -> float:
        from dpx.privacy import solve

        return solve.noise_multiplier(self._stages, epsilon=epsilon, delta=self._delta, adjacency="replace_one")

    @property
    def _stages(self) -> list[tuple[float, int]]:
        return [(self.dp_sgd_batch_size / self.size, self.dp_sgd_steps)]

    @property
    def _delta(self) -> float:
        return 1 / (2 * self.size)

    def _of_dp_fp(self, subject: Steps) -> list[tuple[Any, ...]]:
        """Returns one row for each head and noise: by the bias gradient alone for a head of zeros, with the noisy rows for a random one."""
        import jax

        classifier = self.classifier(subject)
        params = classifier.parameters(self.init, self.seed)
        gradient = jax.jit(jax.grad(lambda head, rest, *given: classifier.loss(rest | {"classifier": head}, *given)))
        probabilities = jax.jit(classifier.probabilities)
        zeros = jax.tree.map(jax.numpy.zeros_like, params["classifier"])
        heads = (("new, zeros", zeros, "the bias gradient"), ("new, random", params["classifier"], "the bias gradient and the noisy rows"))
        rows = []
        for name, head, known in heads:
            for sigma in self.noise_multipliers:
                found = []
                for number, step in enumerate(subject.steps):
                    given = (step.batch, self.noise(number, step).astype(np.float32), float(sigma))
                    bias_K = np.asarray(gradient(head, params, *given)["bias"], np.float64)
                    # A head of zeros gives every row the same output, so the attack needs only the number of rows.
                    answers = None if head is zeros else probabilities(params | {"classifier": head}, *given)
                    found.append(counts_of(bias_K, len(step.labels), None if answers is None else np.asarray(answers, np.float64)))
                rows.append((subject.name, shape_of(self.model).name, name, known, float(sigma), *_exactness(found, subject)))
        return rows

    def _errors(self, subject: Steps, sigmas: Mapping[float, float], of_dp_fp: Sequence[Mapping[str, Any]]) -> Table:
        """Returns the error of the last class's count: by the same attack on the noisy sum of DP-SGD, and on DP-FP's gradient."""
        classes, sums = subject.classes, self._clipped_bias(subject)
        exact = sum(row["exact_steps"] for row in of_dp_fp) / sum(row["steps"] for row in of_dp_fp)
        rows = [("DP-FP, any noise", 0, exact)]
        for epsilon, sigma in sigmas.items():
            noise_NK = np.random.default_rng([self.seed, 1, 2]).standard_normal((self.draws, classes))
            off = []
            for step, total_K in zip(subject.steps, sums, strict=True):
                noisy_NK = total_K + sigma * noise_NK
                # The true sums over classes add up to zero, so their mean is noise alone.
                counts_N = np.round(len(step.labels) / classes - (noisy_NK - noisy_NK.mean(axis=1, keepdims=True)))[:, -1]
                off.append(np.clip(counts_N - np.sum(step.labels == classes - 1), -MOST, MOST))
            errors = np.concatenate(off)
            rows += [(f"DP-SGD, epsilon {epsilon:g}", error, float(np.mean(errors == error))) for error in range(-MOST, MOST + 1)]
        notes = (
            f"errors beyond {MOST} are counted with {MOST}; the adversary knows the number of rows of the batch and reads the bias alone",
            "DP-FP: the share of steps with exact counts, over all heads and noises",
        )
        return Table("errors", ("method", "error", "share"), tuple(rows), "recovered count less the true one", notes)

    def _clipped_bias(self, subject: Steps) -> list[np.ndarray]:
        """Returns the bias's part [K] of each step's sum of clipped head gradients, at clipping norm 1 and a head of zeros on rows of
        norm 1."""
        import jax
        import jax.numpy as jnp

        from dpx_papers.du2021.forward import clipped_rows, head_losses

        classifier = self.classifier(subject)
        params = classifier.parameters(self.init, self.seed)
        zeros = jnp.zeros((shape_of(self.model).width, subject.classes)), jnp.zeros(subject.classes)

        def one(h_H: Any, label: Any, is_row: Any) -> Any:
            kernel_HK, bias_K = jax.grad(lambda head: head_losses(head[0], head[1], h_H[None], label[None])[0])(zeros)
            norm = jnp.sqrt(jnp.sum(jnp.square(kernel_HK)) + jnp.sum(jnp.square(bias_K)))
            return jnp.where(is_row, bias_K / jnp.maximum(norm, 1.0), 0.0)

        @jax.jit
        def total(batch: Any) -> Any:
            return jax.vmap(one)(clipped_rows(classifier.pooled(params, batch), 1.0), batch["label"], batch["is_row"]).sum(axis=0)

        return [np.asarray(total(step.batch), np.float64) for step in subject.steps]

    def _bounds(self, sigmas: Mapping[float, float]) -> Table:
        """Returns the success of the best adversary, with the bounds by epsilon and by the whole profile."""
        from dpx.privacy import accounting, closed_form

        rows = []
        for epsilon, sigma in sigmas.items():
            composed = accounting.compose(accounting.charges_of(self._stages, sigma), "pld", "replace_one")
            run = (epsilon, sigma, "one label, from the whole run", epsilon, accuracy_bound(epsilon, self._delta))
            rows.append((*run, (1 + composed.delta(0.0)) / 2, *_accuracy(self._told_of_a_run(sigma))))
            # A changed label moves the sum by twice the clipping norm, and the rows of the batch are known here.
            alone = closed_form.epsilon(2 / sigma, self._delta)
            step = (epsilon, sigma, "neighbouring counts of a known batch", alone, accuracy_bound(alone, self._delta))
            rows.append((*step, (1 + closed_form.delta(2 / sigma, 0.0)) / 2, *_accuracy(self._told_of_a_step(sigma))))
        notes = (
            "label of one row, all other rows known: guesses of the likelihood-ratio test; from DP-FP the label follows exactly",
            "simulated for the row that is easiest to tell: its clipped gradient has norm C, and the other label reverses it",
            "bound_by_epsilon is (e^epsilon + delta) / (e^epsilon + 1), bound_by_profile is (1 + delta at epsilon 0) / 2",
            "a known batch is not hidden by sampling, so its own epsilon is that of the one step without amplification",
        )
        columns = ("epsilon", "noise_multiplier", "guessed", "epsilon_of_it", "bound_by_epsilon", "bound_by_profile", "accuracy", "error")
        return Table("guesses", columns, tuple(rows), "DP-SGD on the head: how well labels can be guessed", notes)

    def _told_of_a_step(self, sigma: float) -> np.ndarray:
        """Returns whether each of `draws` guesses is right: the other label reverses the clipped gradient, of norm 1."""
        noise = np.random.default_rng([self.seed, 2, 2]).standard_normal(self.draws)
        return 1.0 + sigma * noise > 0

    def _told_of_a_run(self, sigma: float) -> np.ndarray:
        """Returns the same over all steps; the row takes part in each step with probability q, and nobody sees when."""
        ((q, steps),) = self._stages
        random = np.random.default_rng([self.seed, 3, 2])
        shift = random.random((self.draws, steps)) < q
        z = (shift + sigma * random.standard_normal((self.draws, steps))) / sigma
        # The log-likelihood of z / sigma under a shift of +1 / sigma or -1 / sigma in a share q of the steps.
        plus, minus = (np.log1p(q * np.expm1(sign * z / sigma - 0.5 / sigma**2)).sum(axis=1) for sign in (1, -1))
        return plus > minus

    def pictures(self) -> list[Picture]:
        """Plots errors of the recovered count, and guesses of one label with their bounds."""
        run: dict[str, Any] = {"table": "guesses", "x": "epsilon", "x_scale": "category", "y_label": "share of right guesses"}
        names = (("accuracy", "best guess"), ("bound_by_profile", "bound, whole profile"), ("bound_by_epsilon", "bound, epsilon and delta"))
        shown = tuple(name for name, _ in names)
        panels = (
            Lines(
                table="errors",
                x="error",
                y=("share",),
                by="method",
                x_label="recovered count of label 1, less the true one",
                y_label="share of steps",
                title="labels of a batch counted",
            ),
            Lines(marks=shown, names=names, where=("guessed", "one label, from the whole run"), title="DP-SGD: one row's label", **run),
        )
        caption = (
            "The head's gradient of DP-FP gives the label counts of a batch exactly. DP-SGD's gives them with noise, and the label of one "
            "row no better than epsilon allows."
        )
        return [Picture("dpfp_label_counts", caption, panels)]


COUNTS = ("batch", "encoder", "head", "adversary_knows", "noise_multiplier", "steps", "rows", "exact_steps", "largest_error")
NOTES = (
    "the head's gradient is taken with encoder and pooler constant, as in the frozen case; training them too does not change it",
    "the number of rows of a step is public in DP-FP: each drawn record releases a noisy row",
)


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


def _exactness(found: Sequence[np.ndarray], subject: Steps) -> tuple[int, int, int, float]:
    """Returns the number of steps, of rows and of steps whose rounded counts are all right, and the largest error before rounding."""
    true = [np.bincount(step.labels, minlength=subject.classes) for step in subject.steps]
    errors = [np.abs(a - b).max() for a, b in zip(found, true, strict=True)]
    return len(found), sum(map(int, map(np.sum, true))), sum(bool(error < 0.5) for error in errors), float(max(errors))


def _accuracy(is_right: np.ndarray) -> tuple[float, float]:
    share = float(np.mean(is_right))
    return share, math.sqrt(share * (1 - share) / len(is_right))


def judged(counts: Sequence[Mapping[str, Any]], guesses: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: exact counts for DP-FP at every noise, and DP-SGD's guesses within their bounds."""
    steps, exact = sum(row["steps"] for row in counts), sum(row["exact_steps"] for row in counts)
    over = max(row["accuracy"] - row["bound_by_profile"] - 3 * row["error"] for row in guesses)
    ordered = all(row["bound_by_profile"] <= row["bound_by_epsilon"] + 1e-9 for row in guesses)
    shown, excess = f"{exact} of {steps} steps", f"largest excess {over:.2g}"
    return [
        Part.of("the label counts of every step are recovered exactly from DP-FP's head gradient", exact == steps, shown),
        Part.of("no guess on DP-SGD's head beats its bound by more than three standard errors", over <= 0 and ordered, excess),
    ]
