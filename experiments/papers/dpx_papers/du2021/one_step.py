"""Computes one step of DP-FP on a few rows, for the demonstrations. The forward pass is in `dpx_papers.du2021.forward`.

B: rows, T: tokens, H: width, K: classes, V: vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.tokenizer import TextTokenizer
from dpx.declaration import ConfigError
from dpx.models.checkpoint_shape import OfCheckpoint
from dpx.models.shape import Bert


@dataclasses.dataclass(frozen=True)
class NoisyClassifier:
    """Has an encoder, its pooler, the noise of DP-FP on the pooled rows, and a linear head of `classes` outputs.

    Parameters are those of `dpx.task.classification` with `classifier=pooler`, so a checkpoint's encoder and pooler can be loaded.
    """

    model: Bert
    vocabulary_size: int
    classes: int

    @property
    def _objective(self) -> Any:
        from dpx.task.classification import Objective
        from dpx.task.declared_task import Classification

        return Objective(
            dataclasses.replace(self.model, classifier="pooler", pool="cls"), Classification(classes=self.classes), self.vocabulary_size
        )

    def parameters(self, init: RandomStart | FromCheckpoint, seed: int) -> dict[str, Any]:
        """Returns float32 parameters: random, or those of a checkpoint with a random head (and pooler, if the checkpoint has none)."""
        import jax

        from dpx.files import weights
        from dpx.interop.checkpoint import Checkpoint

        objective = self._objective
        params = jax.jit(objective.init)(np.asarray(jax.random.key_data(jax.random.key(seed))))
        if isinstance(init, RandomStart):
            return params
        leaves = weights.by_path(params)
        checkpoint = Checkpoint(init.path)
        selected = checkpoint.select({path: leaf.shape for path, leaf in leaves.items()}, objective.model)
        return jax.tree.map(jax.numpy.asarray, weights.nested(leaves | checkpoint.leaves(selected)))

    def pooled(self, params: Any, batch: Any) -> Any:
        """Returns the pooler's output of each row, [B,H]."""
        import jax.numpy as jnp

        z_BH = self._objective.features(params, batch)
        return jnp.tanh(z_BH @ params["pooler"]["kernel"] + params["pooler"]["bias"])

    def loss(self, params: Any, batch: Any, noise_BH: Any, noise_multiplier: Any, clipping_norm: float = 1.0) -> Any:
        """Returns DP-FP's loss of a step's rows under one draw of standard normal noise; `batch["is_row"]` marks rows that are not
        padding.

        It is the loss of a `dp_fp` run: the task's own, with noisy rows in place of the pooled ones.
        """
        from dpx_papers.du2021.forward import mean_over_rows

        losses_B, _ = self._objective.losses(params, batch, None, _noised(noise_BH, clipping_norm, noise_multiplier))
        return mean_over_rows(losses_B, batch["is_row"])

    def probabilities(self, params: Any, batch: Any, noise_BH: Any, noise_multiplier: Any, clipping_norm: float = 1.0) -> Any:
        """Returns the head's output probabilities [B,K] on the same noisy rows."""
        import jax

        return jax.nn.softmax(self._objective.logits(params, batch, None, _noised(noise_BH, clipping_norm, noise_multiplier)), axis=-1)


def _noised(noise_BH: Any, clipping_norm: float, noise_multiplier: Any) -> Any:
    from dpx_papers.du2021.forward import noisy_rows

    return lambda h_BH: noisy_rows(h_BH, noise_BH, clipping_norm, noise_multiplier)


def shape_of(model: Bert | OfCheckpoint) -> Bert:
    """Returns the encoder's shape, read from the checkpoint if `model=hf`. Raises `ConfigError` for a decoder."""
    if isinstance(model, Bert):
        return model
    from dpx.interop.checkpoint import Checkpoint

    found = Checkpoint(model.path).model
    if not isinstance(found, Bert):
        raise ConfigError(f"model.path={model.path}", "is a decoder, which has no pooler", "Use a BERT checkpoint")
    return found


def batch_of(
    tokenizer: TextTokenizer, texts: Sequence[Sequence[str]], labels: Sequence[int], length: int, rows: int
) -> dict[str, np.ndarray]:
    """Returns marked rows of `texts` (one text or a pair each), padded to `rows` rows of `length` tokens; `is_row` marks the real ones."""
    from dpx.data.rows import marked_examples

    columns = marked_examples(tokenizer, [[_ids(tokenizer, segment) for segment in text] for text in texts], length)
    missing = rows - len(texts)
    # A padded row repeats the first one: that it contributes nothing follows from the mask, not from its content.
    batch = {name: np.concatenate([values, np.repeat(values[:1], missing, axis=0)]) for name, values in columns.items()}
    label_B = np.array([*labels, *[0] * missing], np.int32)
    return batch | {"label": label_B, "record": np.arange(rows, dtype=np.uint32), "is_row": np.arange(rows) < len(texts)}


def _ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def standard_normal(seed: int, draw: int, rows: int, columns: int) -> np.ndarray:
    """Returns reproducible float64 draws [rows, columns]: a demonstration has no secret to protect."""
    return np.random.default_rng([seed, draw, 1]).standard_normal((rows, columns))
