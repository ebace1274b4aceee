"""Sums the gradients of one microbatch in a run: each example's gradient is clipped, or unchanged without privacy.

With noise in the forward pass, the rows of a step are drawn with their keys, and the gradients of the losses of their noisy vectors are
summed. There noise precedes the loss, so what it is added to are vectors and not a sum. A step's checksum covers the clipped vectors,
labels, mask and slots of all its rows. A step that is replayed is first summed with keys and noise of zero, by the same program, and its
checksum compared; only then are its keys derived (`dpx.training.loop`).

Shape legend: n rows of all draws of a step, B rows of one microbatch on one device, H width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dpx.clipping import ClippingMethod
from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.clipping.groups import ClippedSum, FactoredWeights, LossesFn, no_factor
from dpx.cost.memory import Method
from dpx.files.array_checksums import checksum
from dpx.mechanism.clip import Clip
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism, Reparametrisation
from dpx.privacy.declared_privacy import Privacy
from dpx.randomness import RootSecret
from dpx.sampler import Sampler, draw


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The function that sums the gradients of one microbatch, with its settings.

    `clip` is `None` if gradients are not clipped. `clipping_method` says how the clipped sum is computed; `rows_per_unit` rows are clipped
    as one. `factor(path)` multiplies the gradient of each array before it is clipped.
    """

    clip: Clip | None
    clipping_method: ClippingMethod
    rows_per_unit: int
    factor: Callable[[str], float] = no_factor

    @classmethod
    def build(cls, mechanism: Mechanism, clip: Clip, clipping_method: ClippingMethod, privacy: Privacy) -> "GradientSum":
        """Returns the gradient sum of a declared run."""
        clip_or_none = clip if mechanism.clips_gradients else None
        factor = mechanism.gradient_factor if isinstance(mechanism, Reparametrisation) else no_factor
        return cls(clip_or_none, clipping_method, privacy.rows_per_example, factor)

    @property
    def method(self) -> Method:
        """Returns the method that computes the clipped sum; `plain` if gradients are not clipped."""
        return self.clipping_method.name if self.clip is not None else "plain"

    def __call__(
        self, losses: LossesFn, params: Any, batch: Any, limit: Any, *, frozen: Any = None, is_padding_B: Array | None = None
    ) -> ClippedSum:
        """Returns the sum over `batch` with gradients clipped to the norm `limit`, a number or a traced float32 []. Runs under jit."""
        if self.clip is None:
            # A model in any JAX code does not use the ops for which blocks exist.
            options = {"fused": self.clipping_method.name != "traced", "rows_per_unit": self.rows_per_unit, "frozen": frozen or None}
            return plain_sum(losses, params, batch, is_padding_B, **options)
        # The tests of every family check that our own losses keep examples apart; a run does not check it again.
        options = {"method": self.clipping_method.name, "rows_per_unit": self.rows_per_unit, "checked": False, "frozen": frozen or None}
        weights = FactoredWeights(self.clip.weights(limit), self.factor)
        return clipped_sum(losses, params, batch, weights=weights, is_padding_B=is_padding_B, **options)


# Fields of a row beside those of the store: the key of its noise, uint32 [n, 2], and its slot (draw, row of the draw), int32 [n, 2].
KEY, SLOT = "noise_key", "slot"
_VECTOR, _NORM, _IS_FINITE = "vector", "vector_norm", "vector_is_finite"


def draw_rows(
    mechanism: ForwardNoise, sampler: Sampler, size: int, sampling_probability: float, secret: RootSecret, step: int, *, is_noised: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the indices of a step's rows, int64 [n], draw after draw, and their `KEY` and `SLOT`; keys are zero unless `is_noised`.

    An index may be in several draws; it has a slot and a key in each. A draw may be empty.
    """
    draws = mechanism.draws_per_step
    drawn = [
        draw(sampler, size, sampling_probability / draws, lambda *place, number=number: secret.generator("sample", *place, number), step)
        for number in range(draws)
    ]
    counts = [len(one) for one in drawn]
    slots = np.stack([np.repeat(np.arange(draws), counts), np.concatenate([np.arange(count) for count in counts])], axis=1)
    keys = np.zeros((sum(counts), 2), np.uint32)
    if is_noised:
        keys = np.concatenate([mechanism.row_keys(secret, step, number, count) for number, count in enumerate(counts)])
    return np.concatenate(drawn), {KEY: keys, SLOT: slots.astype(np.int32)}


def noisy_gradient_sum(
    objective: Any, mechanism: ForwardNoise, gradient_sum: GradientSum, deviation: Array, limit: Any, dropout_key: Array
) -> Callable[..., tuple[ClippedSum, Array]]:
    """Returns a function of (params, batch, rows_B, frozen, is_padding_B) that computes one microbatch under jit.

    The function returns the sum of the gradients of the noisy vectors' losses, and the checksum, uint32 [2], of what noise was added to.

    Norms of the sum are those of the vectors before they were clipped; a row whose vector was not finite is not counted, and is noise
    alone.
    """

    def losses(params: Any, batch: Any) -> Any:
        results = []

        def noised(vector_BH: Array) -> Array:
            results.append(mechanism.noisy_vectors(vector_BH, batch[KEY], deviation, limit))
            return results[-1].noisy

        losses_B, counts = objective.losses(params, {name: batch[name] for name in batch if name != KEY}, dropout_key, noised)
        (vectors,) = results
        beside = {_VECTOR: vectors.clipped, _NORM: vectors.norms, _IS_FINITE: vectors.is_finite}
        return losses_B, counts | jax.lax.stop_gradient(beside)

    def summed(params: Any, batch: Any, rows_B: Any, frozen: Any, is_padding_B: Array) -> tuple[ClippedSum, Array]:
        with_key = batch | {KEY: rows_B[KEY]}
        result = gradient_sum(losses, params, with_key, limit, frozen=frozen, is_padding_B=is_padding_B)
        counts = dict(result.counts)
        vector_BH, norms_B, is_finite_B = (counts.pop(name) for name in (_VECTOR, _NORM, _IS_FINITE))
        noised = (vector_BH, batch["label"], is_padding_B, batch["record"], rows_B[SLOT])
        return result._replace(counts=counts, norms_B=norms_B, is_counted_B=is_finite_B), checksum(noised)

    return summed
