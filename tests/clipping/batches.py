"""Small models and awkward batches, shared by the tests of clipping."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.models.shape import Bert
from dpx.task import mlm
from dpx.task.declared_task import MaskedLanguageModel

VOCABULARY = 50
# Where a program runs once or twice, the compiler's effort would cost more than it saves.
QUICKLY = {"xla_backend_optimization_level": 0}
SPECIAL = mlm.Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)


def bert(**changes) -> Bert:
    return Bert(**({"name": "test", "layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "positions": 32} | changes))


def objective(model: Bert | None = None, *, next_sentence: bool = True, max_masked_positions: int = 4) -> mlm.Objective:
    return mlm.objective(
        model or bert(), MaskedLanguageModel(next_sentence=next_sentence, max_masked_positions=max_masked_positions), VOCABULARY, SPECIAL
    )


def parameters(subject: Any, seed: int = 0, spread: float = 0.3):
    """Far from initialisation, biases and gains included, so that no term of a gradient is small by accident."""
    drawn = np.random.default_rng(seed)
    shapes = jax.eval_shape(subject.init, jax.random.PRNGKey(0))
    return jax.tree.map(lambda leaf: jnp.asarray(drawn.normal(0, spread, leaf.shape), jnp.float32), shapes)


def batch(examples: int = 5, tokens: int = 12, slots: int = 4, seed: int = 1):
    """Repeated tokens, labels that also occur in the input, padding, an example without slots and one without a second segment."""
    drawn = np.random.default_rng(seed)
    length = drawn.integers(max(3, tokens // 2), tokens + 1, examples).astype(np.int32)
    token = drawn.integers(5, 12, (examples, tokens)).astype(np.int32)
    token = np.where(np.arange(tokens) < length[:, None], token, SPECIAL.pad_id)
    token[:, 0] = SPECIAL.cls_id
    slot = np.stack([drawn.permutation(tokens)[np.arange(slots) % tokens] for _ in range(examples)]).astype(np.int32) % length[:, None]
    has_label = np.arange(slots) < drawn.integers(1, slots + 1, examples)[:, None]
    has_label[0] &= examples == 1
    label = np.where(has_label, drawn.integers(5, 12, (examples, slots)), 0)
    segment_start = np.minimum(length, drawn.integers(1, tokens + 1, examples))
    return {
        "tokens": jnp.asarray(token, jnp.int32),
        "masked_positions": jnp.asarray(slot, jnp.int32),
        "labels": jnp.asarray(label, jnp.int32),
        "has_label": jnp.asarray(has_label),
        "segment_start": jnp.asarray(segment_start, jnp.int32),
        "length": jnp.asarray(length),
        "is_next": jnp.asarray(drawn.integers(0, 2, examples), jnp.int32),
        "record": jnp.arange(100, 100 + examples, dtype=jnp.int32),
    }


def example(rows, b: int):
    """Row b of every array, as a batch of one."""
    return jax.tree.map(lambda leaf: leaf[b : b + 1], rows)


def float64_gradients(losses_fn, params, rows):
    """Each example's gradient by itself, in float64: [one pytree per example], and its losses."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), params)
        # By numpy: jax would compile a program to cut each shape.
        rows = jax.tree.map(np.asarray, rows)
        one = jax.jit(jax.value_and_grad(lambda params, example: losses_fn(params, example)[0][0]), compiler_options=QUICKLY)
        pairs = [one(wide, example(rows, b)) for b in range(rows["tokens"].shape[0])]
    return [jax.tree.map(np.asarray, gradient) for _, gradient in pairs], np.asarray([loss for loss, _ in pairs])


def squared_norm(gradient) -> float:
    return float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))


def assert_trees_close(found, expected, relative: float = 1e-5, floor: float = 1e-12, terms=()) -> None:
    """Leaf by leaf, relative to the largest entry of the leaf expected, or of the `terms` it is the sum of: where these cancel,
    float32 cannot say more. `floor` is for leaves that are zero by structure."""
    scales = jax.tree.map(lambda *leaves: max(np.max(np.abs(leaf)) for leaf in leaves), expected, *terms)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), jax.tree.leaves(scales), strict=True)
    for (path, leaf), wanted, scale in pairs:
        error = np.max(np.abs(np.asarray(leaf) - wanted))
        assert error <= relative * scale + floor, f"{jax.tree_util.keystr(path)}: off by {error}, scale {scale}"
