"""Tests the claim that the backward pass is "post-processing" of noisy rows, with the gradient below the noise (Du and Mi 2021, section
3, F18).

The gradient of a word's embedding row is exactly zero unless the word is in the batch. The noise of DP-FP scales the gradient that arrives
from above and does not change which rows get one, so one step of a trained encoder reveals the words of its batch, whatever the noise.

B: rows, T: tokens, V: vocabulary, H: width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration, require
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.du2021 import batches
from dpx_papers.du2021.batches import OfSteps, Steps
from dpx_papers.du2021.one_step import NoisyClassifier, shape_of, standard_normal
from dpx_papers.report.shape import Part, verdict_table

COLUMNS = ("batch", "encoder", "numbers", "noise_multiplier", "steps", "rows", "words", "recovered", "wrong", "missed")
COLUMNS += ("precision", "recall", "exact_steps")
NOTES = (
    "recovered: words whose row of the embedding's gradient is not zero; marks such as [CLS] are not counted, and [PAD] is never recovered",
    "missed words are those of rows that the head classifies so surely that their loss gradient underflows to zero; no noise hides them",
    "the words of each step are counted once a step; with a frozen encoder nobody computes this gradient",
)
# Words whose gradient is exactly zero are drawn here, below every other.
FLOOR = 1e-3


@declaration
class DpfpPostprocessingCounterexample(OfSteps):
    """Recovers words of a made-up batch, and of rows of `data` if its files exist.

    Attributes:
        other_words: Words that are plotted beside those of the batch.
        dp_sgd_noise_multiplier: Noise multiplier of the DP-SGD step drawn for comparison.
        numbers: Types of numbers in which gradients are computed.
    """

    other_words: Sequence[str]
    dp_sgd_noise_multiplier: float
    numbers: Sequence[str]

    def __post_init__(self) -> None:
        known = set(self.numbers) <= {"float32", "float64"}
        require(known and bool(self.numbers), f"analysis.numbers={list(self.numbers)}", "are not number formats", "Use [float32, float64]")
        lowest = min(self.noise_multipliers, default=0)
        require(lowest > 0, f"analysis.noise_multipliers={list(self.noise_multipliers)}", "a noise must be positive", "Give one or more")

    def __call__(self) -> list[Table]:
        small = batches.made_up(self.sentences, self.init, self.data, self.other_words)
        large = self.drawn()
        norms = self._norms(small)
        rows = self._counted(small, norms) + (self._counted(large, self._norms(large)) if large else [])
        recovery = Table("recovery", COLUMNS, tuple(rows), "words of a batch, read off one step's embedding gradient", NOTES)
        words = self._drawn(small, [norms[self.numbers[-1], sigma][0] for sigma in self.noise_multipliers])
        return [recovery, words, verdict_table(judged(recovery.as_json()["rows"]))]

    def _norms(self, subject: Steps) -> dict[tuple[str, float | int], list[np.ndarray]]:
        """Returns the norm of each row of the embedding's gradient [V], by number format and noise, one array a step."""
        import jax

        classifier = self.classifier(subject)
        found, start = {}, jax.tree.map(np.asarray, classifier.parameters(self.init, self.seed))
        for numbers in self.numbers:
            with jax.enable_x64(numbers == "float64"):
                params = jax.tree.map(lambda leaf, dtype=numbers: jax.numpy.asarray(leaf, dtype), start)
                gradient = jax.jit(jax.grad(lambda word, *given, params=params: _loss(classifier, params, word, *given)))
                for sigma in self.noise_multipliers:
                    found[numbers, sigma] = [
                        _row_norms(
                            gradient(params["embeddings"]["word"], step.batch, self.noise(number, step).astype(numbers), float(sigma))
                        )
                        for number, step in enumerate(subject.steps)
                    ]
        return found

    def _counted(self, subject: Steps, norms: Mapping[tuple[str, float | int], Sequence[np.ndarray]]) -> list[tuple[Any, ...]]:
        rows = []
        for (numbers, sigma), by_step in norms.items():
            pairs = [(step.words, recovered(norms_V, subject)) for step, norms_V in zip(subject.steps, by_step, strict=True)]
            true, read, right = (sum(map(len, sets)) for sets in zip(*((a, b, a & b) for a, b in pairs), strict=True))
            shares = (right / read if read else 0.0, right / true, sum(a == b for a, b in pairs))
            counts = (len(subject.steps), sum(len(step.labels) for step in subject.steps), true, read, read - right, true - right)
            rows.append((subject.name, shape_of(self.model).name, numbers, float(sigma), *counts, *shares))
        return rows

    def _drawn(self, subject: Steps, norms: Sequence[np.ndarray]) -> Table:
        """Returns, for each word of the made-up batch and of `other_words`, its row's norm at each noise and in a step of DP-SGD."""
        private_V, own_words = self._dp_sgd(subject), subject.steps[0].words
        ids = {word: subject.tokenizer.tokenizer.token_to_id(word) for word in self.other_words}
        others = {word: number for word, number in ids.items() if number is not None and number not in own_words}
        inside = {subject.tokenizer.vocabulary[number]: number for number in sorted(own_words)}
        floor = FLOOR * min(float(norms_V[norms_V > 0].min()) for norms_V in norms)
        rows = []
        for word, number in [*others.items(), *inside.items()]:
            own = [float(norms_V[number]) for norms_V in norms]
            at = [(f"sigma = {sigma:g}", value) for sigma, value in zip(self.noise_multipliers, own, strict=True) if value > 0]
            at += [] if any(own) else [("exactly 0: not in the batch", floor)]
            is_in = number in own_words
            rows += [(word, is_in, "DP-FP", setting, value) for setting, value in at]
            rows.append((word, is_in, "DP-SGD", "in the batch" if is_in else "not in the batch", float(private_V[number])))
        columns = ("word", "in_batch", "method", "setting", "gradient_norm")
        notes = (f"norms that are exactly 0 are drawn at a floor below all others ({floor:.0e}); gradients in {self.numbers[-1]}",)
        return Table("words", columns, tuple(rows), "norm of each word's row of the embedding's gradient", notes)

    def _dp_sgd(self, subject: Steps) -> np.ndarray:
        """Returns the row norms of a DP-SGD step at clipping norm 1: clipped gradients of all parameters, summed, with noise on every
        coordinate."""
        import jax
        import jax.numpy as jnp

        classifier, step = self.classifier(subject), subject.steps[0]
        params = classifier.parameters(self.init, self.seed)
        no_noise_1H = jnp.zeros((1, shape_of(self.model).width))

        @jax.jit
        def clipped(row: Any) -> Any:
            alone = {name: values[None] for name, values in row.items()}
            gradient = jax.grad(lambda params: classifier.loss(params, alone, no_noise_1H, 0.0))(params)
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))
            return gradient["embeddings"]["word"] / jnp.maximum(norm, 1.0)

        # One row at a time: a gradient of a full vocabulary is large.
        rows = ({name: values[row] for name, values in step.batch.items()} for row in range(len(step.labels)))
        noise_VH = standard_normal(self.seed, 1, *params["embeddings"]["word"].shape)
        return _row_norms(sum(np.asarray(clipped(row)) for row in rows) + self.dp_sgd_noise_multiplier * noise_VH)

    def pictures(self) -> list[Picture]:
        """Plots DP-FP's gradient at each noise, and DP-SGD's, for the made-up batch."""
        words: dict[str, Any] = {"table": "words", "x": "gradient_norm", "marks": ("word",), "by": "setting", "y_label": " "}
        dp_sgd = f"DP-SGD, noise multiplier {self.dp_sgd_noise_multiplier:.2g}"
        panels = (
            Lines(where=("method", "DP-FP"), x_scale="log", x_label="norm of the word's gradient row", title="DP-FP, one step", **words),
            Lines(where=("method", "DP-SGD"), x_label="norm of the word's noisy gradient row", title=dp_sgd, **words),
        )
        caption = "A word's gradient is zero unless the word is in the batch: one step of DP-FP names the words at any noise."
        return [Picture("dpfp_words", caption, panels)]


def recovered(norms_V: np.ndarray, subject: Steps) -> frozenset[int]:
    """Returns the words that the attack recovers: those whose row of the embedding's gradient is not exactly zero."""
    return frozenset(np.flatnonzero(norms_V).tolist()) - batches.marks(subject.tokenizer)


def judged(rows: Sequence[dict[str, Any]]) -> list[Part]:
    """Returns the verdicts over all batches, noises and number formats."""
    wrong, lowest = sum(row["wrong"] for row in rows), min(row["noise_multiplier"] for row in rows)
    words = f"{wrong} wrong words among {sum(row['recovered'] for row in rows):,} recovered"
    recalls = {}
    for row in rows:
        key = (row["numbers"], row["noise_multiplier"])
        recalls[key] = min(row["recall"], recalls.get(key, 1.0))
    at_lowest = min(recall for (_, sigma), recall in recalls.items() if sigma == lowest)
    shown = ", ".join(f"{numbers} {sigma:g}: {recall:.3f}" for (numbers, sigma), recall in recalls.items())
    wide = [recall for (numbers, _), recall in recalls.items() if numbers == "float64"]
    claim = "noise hides no word: every word is recovered at every noise where no gradient underflows (float64)"
    return [
        Part.of("a word whose gradient is not zero is in the batch, at every noise", wrong == 0, words),
        Part.of(f"every word of every step is recovered at sigma = {lowest:g}", at_lowest == 1.0, f"recall {at_lowest:.3f}"),
        Part.of(claim, min(wide) == 1.0, f"recall by number format and sigma: {shown}") if wide else Part.of(claim, None, shown),
    ]


def _loss(classifier: NoisyClassifier, params: Any, word_VH: Any, batch: Any, noise_BH: Any, sigma: Any) -> Any:
    return classifier.loss(params | {"embeddings": params["embeddings"] | {"word": word_VH}}, batch, noise_BH, sigma)


def _row_norms(gradient_VH: Any) -> np.ndarray:
    """Returns row norms in float64, each row scaled by its largest entry, so that no square underflows."""
    rows_VH = np.abs(np.asarray(gradient_VH, np.float64))
    largest_V = rows_VH.max(axis=1)
    scaled_VH = rows_VH / np.where(largest_V > 0, largest_V, 1.0)[:, None]
    return largest_V * np.sqrt(np.square(scaled_VH).sum(axis=1))
