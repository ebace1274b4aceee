"""Text canaries: random sequences, each a unit of one row, in or out of training by its own coin, scored on the final parameters.

Under `zero_out` a canary that is out still has its place among the rows; drawn, it contributes nothing. Scores use the released
parameters alone: the mean loss of the masked tokens, lower meaning "in". Exposure is log2 of the number of canaries that are out
less log2 of the rank among them (Carlini et al. 2019).

Shape legend: M canaries, T positions, B rows of a batch.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dpx.data.store import Manifest, Store
from dpx.declaration import require
from dpx.randomness import RootSecret

BATCH_ROWS = 64


def canary_tokens(manifest: Manifest, count: int, generator: np.random.Generator) -> Int[np.ndarray, "M T"]:
    """[CLS] uniform random ordinary pieces [SEP]: nothing but memory helps to guess them."""
    special = (manifest.pad_id, manifest.unk_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    ordinary = np.setdiff1d(np.arange(manifest.pieces), special)
    tokens_MT = generator.choice(ordinary, (count, manifest.sequence_length)).astype(np.int32)
    tokens_MT[:, 0], tokens_MT[:, -1] = manifest.cls_id, manifest.sep_id
    return tokens_MT


class WithCanaries(Store):
    """`store` with M further protected rows behind its own; of those only the ones that are in are ever handed out."""

    def __init__(self, store: Store, tokens_MT: Int[np.ndarray, "M T"], is_in_M: Bool[np.ndarray, " M"]):
        self.folder, self._columns, self._store = store.folder, store._columns, store
        self._tokens_MT, self._is_in_M = tokens_MT, is_in_M
        self.first = store.manifest.rows["protected"]
        self.manifest = dataclasses.replace(store.manifest, rows=store.manifest.rows | {"protected": self.first + len(tokens_MT)})

    def rows(self, split: Any, indices: Any) -> dict[str, np.ndarray]:
        wanted_n = np.asarray(indices, dtype=np.int64)
        if split != "protected":
            return self._store.rows(split, wanted_n)
        own, canaries = wanted_n[wanted_n < self.first], wanted_n[wanted_n >= self.first] - self.first
        parts = (self._store.rows(split, own), self.canary_rows(canaries[self._is_in_M[canaries]]))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def canary_rows(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Rows of these canaries, in or out."""
        length = np.full(len(numbers), self.manifest.sequence_length, np.int32)
        one_sequence = {"segment_start": length, "length": length, "is_next": np.zeros_like(length)}
        return {"tokens": self._tokens_MT[numbers], **one_sequence, "record": (self.first + numbers).astype(np.int32)}


def scores(objective: Any, params: Any, store: WithCanaries, secret: RootSecret, masks: int) -> Float[np.ndarray, " M"]:
    """Minus each canary's mean loss under `params`, over `masks` draws of what is masked."""
    losses = jax.jit(lambda params, rows, key: objective.losses(params, objective.batch(key, rows))[0])
    count = len(store._is_in_M)
    total_M = np.zeros(count)
    for start in range(0, count, BATCH_ROWS):
        # The last batch is filled up with canaries already scored, so that one shape is compiled.
        numbers = np.arange(start, start + BATCH_ROWS) % count
        kept = min(BATCH_ROWS, count - start)
        for draw in range(masks):
            losses_B = np.asarray(losses(params, store.canary_rows(numbers), secret.key("audit_mask", draw)))
            total_M[start : start + kept] -= losses_B[:kept]
    return total_M / masks


def exposures(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " n"]:
    """Exposure of each canary that is in, against those that are out: log2(n_out + 1) - log2(rank), ties to the worse rank."""
    out = np.sort(scores_M[~is_in_M])
    require(len(out) > 0, "canaries", "none is out, so nothing is compared", "Use more canaries")
    rank = 1 + len(out) - np.searchsorted(out, scores_M[is_in_M], side="left")
    return np.log2(len(out) + 1) - np.log2(rank)


def area_under_curve(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> float:
    """Chance that a canary that is in scores above one that is out, ties counting half."""
    inside, out = scores_M[is_in_M], np.sort(scores_M[~is_in_M])
    below = (np.searchsorted(out, inside, side="left") + np.searchsorted(out, inside, side="right")) / 2
    return float(below.mean() / len(out))
