"""Rows that a grown tokenizer adds to the table of a checkpoint, as parameters of their own, so that they alone may be trained.

The rows of new tokens follow the old ones: a table of V rows is `embeddings/word` [V - N, H] and `embeddings/new` [N, H], and an untied
head is `decoder` and `decoder_new` alike. So clipping sees a small table whose gradient is exact by the usual rules, tied or not. An export
joins both. No jax.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpx.declaration import require

# New rows, by path, and the rows that they follow.
NEW_ROWS = {"embeddings/new": "embeddings/word", "decoder_new": "decoder"}


def grown(count: int, rows: int) -> dict[str, int]:
    """Returns the fields of a model whose table has a row for each of `count` tokens, `rows` of them a checkpoint's.

    Raises `ConfigError` without a new token.
    """
    reason = f"the tokenizer has {count} tokens, and the checkpoint's table already has {rows} rows"
    require(count > rows, "model.new_tokens=mean", reason, "Leave it out, and train the rows that the tokens have")
    return {"vocabulary_size": count, "new_rows": count - rows}


def with_means(leaves: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns a checkpoint's parameters with the new rows that `shapes` has, each the mean of the rows before them."""
    new = {path: np.mean(leaves[old], axis=0, dtype=np.float64) for path, old in NEW_ROWS.items() if path in shapes}
    return {**leaves, **{path: np.tile(mean.astype(np.float32), (shapes[path][0], 1)) for path, mean in new.items()}}


def joined(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters in which each table has its new rows."""
    whole = {old: np.concatenate([leaves[old], leaves[path]]) for path, old in NEW_ROWS.items() if path in leaves}
    return {path: leaf for path, leaf in leaves.items() if path not in NEW_ROWS} | whole
