"""Tests the claim that the backward pass is "post-processing" of noisy rows, with the gradient below the noise (Du and Mi 2021, section
3, F18).

The gradient of a word's embedding row is exactly zero unless the word is in the batch. The noise of DP-FP scales the gradient that arrives
from above and does not change which rows get one, so one step of a trained encoder reveals the words of its batch, whatever the noise.

B: rows, T: tokens, V: vocabulary, H: width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.declared_data import Data
from dpx.declaration import require
from dpx.models.checkpoint_shape import OfCheckpoint
from dpx.models.shape import Bert
from dpx_papers.analysis import Made, Noted, analysis, frame
from dpx_papers.du2021 import batches
from dpx_papers.du2021.batches import Steps
from dpx_papers.du2021.one_step import NoisyClassifier, standard_normal
from dpx_papers.report.shape import Part

# Words whose gradient is exactly zero are drawn here, below every other.
FLOOR = 1e-3


def _require_noise(declared: Any) -> None:
    numbers, noise = list(declared.numbers), list(declared.noise_multipliers)
    known = set(numbers) <= {"float32", "float64"} and bool(numbers)
    require(known, f"analysis.numbers={numbers}", "are not number formats", "Use [float32, float64]")
    require(min(noise, default=0) > 0, f"analysis.noise_multipliers={noise}", "a noise must be positive", "Give one or more")


@analysis(_require_noise)
def dpfp_postprocessing_counterexample(
    model: Bert | OfCheckpoint,
    init: RandomStart | FromCheckpoint,
    data: Data,
    sentences: Sequence[Sequence[str | int]],
    other_words: Sequence[str],
    noise_multipliers: Sequence[float | int],
    dp_sgd_noise_multiplier: float,
    numbers: Sequence[str],
    steps: int,
    batch_size: int,
    micro_batches: int,
    seed: int,
) -> Made:
    """Recovers words of a made-up batch, and of rows of `data` if its files exist.

    Attributes:
        model: The model.
        init: Its initial weights.
        data: Rows whose steps are drawn, if its files exist.
        sentences: A made-up batch of (text, label).
        other_words: Words that are plotted beside those of the batch.
        noise_multipliers: DP-FP's sigma over C, each of which is measured.
        dp_sgd_noise_multiplier: Noise multiplier of the DP-SGD step drawn for comparison.
        numbers: Types of numbers in which gradients are computed.
        steps: Steps that are drawn.
        batch_size: Expected rows of a step.
        micro_batches: Poisson micro-batches of a step.
        seed: Fixes all randomness of the analysis.
    """
    small = batches.made_up(sentences, init, data, other_words)
    large = batches.drawn(data, init, steps, batch_size, micro_batches, seed)
    lines, words, floor = [], [], 0.0
    for subject in (small, *([large] if large else [])):
        classifier = batches.classifier_of(model, subject)
        params = classifier.parameters(init, seed)
        norms = _norms(classifier, params, subject, numbers, noise_multipliers, seed)
        lines += [
            {"batch": subject.name, "encoder": classifier.model.name, "numbers": one, "noise_multiplier": float(sigma)}
            | _counted(subject, by_step)
            for (one, sigma), by_step in norms.items()
        ]
        if subject is small:
            at_noise = {sigma: norms[numbers[-1], sigma][0] for sigma in noise_multipliers}
            floor = FLOOR * min(float(norms_V[norms_V > 0].min()) for norms_V in at_noise.values())
            words = _drawn(small, other_words, at_noise, _dp_sgd(classifier, params, small, dp_sgd_noise_multiplier, seed), floor)
    note = f"norms that are exactly 0 are drawn at a floor below all others ({floor:.0e}); gradients in {numbers[-1]}"
    recovery = frame(lines)
    return {"recovery": recovery, "words": Noted(words, [note]), "verdicts": judged(recovery)}


def _norms(
    classifier: NoisyClassifier, start: Any, subject: Steps, numbers: Sequence[str], noise_multipliers: Sequence[float | int], seed: int
) -> dict[tuple[str, float | int], list[np.ndarray]]:
    """Returns the norm of each row of the embedding's gradient [V], by number format and noise, one array a step."""
    import jax

    found, start = {}, jax.tree.map(np.asarray, start)
    for one in numbers:
        with jax.enable_x64(one == "float64"):
            params = jax.tree.map(lambda leaf, dtype=one: jax.numpy.asarray(leaf, dtype), start)
            gradient = jax.jit(jax.grad(lambda word, *given, params=params: _loss(classifier, params, word, *given)))
            for sigma in noise_multipliers:
                found[one, sigma] = [
                    _row_norms(gradient(params["embeddings"]["word"], step.batch, noise_BH.astype(one), float(sigma)))
                    for number, step in enumerate(subject.steps)
                    for noise_BH in [batches.noise_of(classifier, seed, number, step)]
                ]
    return found


def _counted(subject: Steps, norms: Sequence[np.ndarray]) -> dict[str, Any]:
    pairs = [(step.words, recovered(norms_V, subject)) for step, norms_V in zip(subject.steps, norms, strict=True)]
    true, read, right = (sum(map(len, sets)) for sets in zip(*((a, b, a & b) for a, b in pairs), strict=True))
    counts = {"steps": len(subject.steps), "rows": sum(len(step.labels) for step in subject.steps), "words": true, "recovered": read}
    counts |= {"wrong": read - right, "missed": true - right}
    return counts | {"precision": right / read if read else 0.0, "recall": right / true, "exact_steps": sum(a == b for a, b in pairs)}


def _drawn(
    subject: Steps, other_words: Sequence[str], norms: Mapping[float | int, np.ndarray], private_V: np.ndarray, floor: float
) -> list[dict[str, Any]]:
    """Returns, for each word of the made-up batch and of `other_words`, its row's norm at each noise and in a step of DP-SGD."""
    own_words, rows = subject.steps[0].words, []
    ids = {word: subject.tokenizer.tokenizer.token_to_id(word) for word in other_words}
    others = {word: number for word, number in ids.items() if number is not None and number not in own_words}
    for word, number in [*others.items(), *((subject.tokenizer.vocabulary[number], number) for number in sorted(own_words))]:
        at = [("DP-FP", f"sigma = {sigma:g}", float(norms_V[number])) for sigma, norms_V in norms.items() if norms_V[number] > 0]
        at = at or [("DP-FP", "exactly 0: not in the batch", floor)]
        at.append(("DP-SGD", "in the batch" if number in own_words else "not in the batch", float(private_V[number])))
        names = ("word", "in_batch", "method", "setting", "gradient_norm")
        rows += [dict(zip(names, (word, number in own_words, *one), strict=True)) for one in at]
    return rows


def _dp_sgd(classifier: NoisyClassifier, params: Any, subject: Steps, noise_multiplier: float, seed: int) -> np.ndarray:
    """Returns the row norms of a DP-SGD step at clipping norm 1: clipped gradients of all parameters, summed, with noise on every
    coordinate."""
    import jax
    import jax.numpy as jnp

    step = subject.steps[0]
    no_noise_1H = jnp.zeros((1, classifier.model.width))

    @jax.jit
    def clipped(row: Any) -> Any:
        alone = {name: values[None] for name, values in row.items()}
        gradient = jax.grad(lambda params: classifier.loss(params, alone, no_noise_1H, 0.0))(params)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))
        return gradient["embeddings"]["word"] / jnp.maximum(norm, 1.0)

    # One row at a time: a gradient of a full vocabulary is large.
    rows = ({name: values[row] for name, values in step.batch.items()} for row in range(len(step.labels)))
    noise_VH = standard_normal(seed, 1, *params["embeddings"]["word"].shape)
    return _row_norms(sum(np.asarray(clipped(row)) for row in rows) + noise_multiplier * noise_VH)


def recovered(norms_V: np.ndarray, subject: Steps) -> frozenset[int]:
    """Returns the words that the attack recovers: those whose row of the embedding's gradient is not exactly zero."""
    return frozenset(np.flatnonzero(norms_V).tolist()) - batches.marks(subject.tokenizer)


def judged(rows: Any) -> list[Part]:
    """Returns the verdicts over all batches, noises and number formats."""
    wrong, lowest = rows["wrong"].sum(), rows["noise_multiplier"].min()
    recalls = rows.groupby(["numbers", "noise_multiplier"], sort=False)["recall"].min()
    at_lowest = recalls.xs(lowest, level="noise_multiplier").min()
    shown = ", ".join(f"{numbers} {sigma:g}: {recall:.3f}" for (numbers, sigma), recall in recalls.items())
    wide, claim = rows.loc[rows["numbers"] == "float64", "recall"], "every word is recovered at every noise where no gradient underflows"
    by_format = f"recall by number format and sigma: {shown}" if len(wide) else shown
    return [
        Part.of(
            "a word whose gradient is not zero is in the batch, at every noise",
            wrong == 0,
            f"{wrong} wrong words among {rows['recovered'].sum():,} recovered",
        ),
        Part.of(f"every word of every step is recovered at sigma = {lowest:g}", at_lowest == 1.0, f"recall {at_lowest:.3f}"),
        Part.of(f"noise hides no word: {claim} (float64)", bool(wide.min() == 1.0) if len(wide) else None, by_format),
    ]


def _loss(classifier: NoisyClassifier, params: Any, word_VH: Any, batch: Any, noise_BH: Any, sigma: Any) -> Any:
    return classifier.loss(params | {"embeddings": params["embeddings"] | {"word": word_VH}}, batch, noise_BH, sigma)


def _row_norms(gradient_VH: Any) -> np.ndarray:
    """Returns row norms in float64, each row scaled by its largest entry, so that no square underflows."""
    rows_VH = np.abs(np.asarray(gradient_VH, np.float64))
    largest_V = rows_VH.max(axis=1)
    scaled_VH = rows_VH / np.where(largest_V > 0, largest_V, 1.0)[:, None]
    return largest_V * np.sqrt(np.square(scaled_VH).sum(axis=1))
