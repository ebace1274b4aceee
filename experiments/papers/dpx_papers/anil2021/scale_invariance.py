"""Tests which weights can be scaled without a change of the output (Anil et al. 2021, section 4.3, A5).

f(alpha w) = f(w) for all alpha > 0 implies grad f(alpha w) = grad f(w) / alpha: the paper's reason for a large weight decay. This requires
that w is the whole input of a LayerNorm. It holds for the three embedding tables together, of which only the sum is normalised, unless the
output layer uses the word embeddings as well. A matrix whose product is added to a residual, x + f(x), is not invariant.

B: examples, T: tokens, M: masked positions, H: width, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpx.models.shape import Bert
from dpx.randomness import path_name
from dpx_papers.analysis import Made, analysis

TABLES = ("embeddings/word", "embeddings/position", "embeddings/segment")
ATTENTION, FEED_FORWARD = ("layers/attention_out/kernel",), ("layers/down/kernel",)
# The scaled weights, their parameter paths, the compared output, and whether the claim is valid for them.
CASES = (
    ("three tables together", TABLES, "free decoder", True),
    ("three tables, tied decoder", TABLES, "tied decoder", False),
    ("word table alone", TABLES[:1], "free decoder", False),
    ("position table alone", TABLES[1:2], "free decoder", False),
    ("segment table alone", TABLES[2:], "free decoder", False),
    ("attention output matrices", ATTENTION, "free decoder", False),
    ("feed-forward output matrices", FEED_FORWARD, "free decoder", False),
    ("attention output, no residual", ATTENTION, "no residual", True),
)
Outputs = Callable[[Any], tuple[Any, Any]]


@analysis()
def anil_scale_invariance(model: Bert, alphas: Sequence[float], examples: int, tokens: int, vocabulary_size: int) -> Made:
    """Scales weights of a newly initialised model on random tokens, in float64 and in float32. Errors are relative to the largest entry.

    Attributes:
        model: The model whose weights are scaled.
        alphas: Factors of the weights.
        examples: Rows of random tokens.
        tokens: Tokens of a row.
        vocabulary_size: Rows of the word table.
    """
    import jax

    from dpx.models.networks import BertForPreTraining

    network, rows = BertForPreTraining(model, vocabulary_size, True), []
    for numbers in ("float64", "float32"):
        with jax.enable_x64(numbers == "float64"):
            batch = _batch(examples, tokens, vocabulary_size)
            texts = (batch["token"], batch["segment"], batch["length"], batch["masked_positions"])
            params = jax.jit(network.init)(jax.random.key(2), *texts)["params"]
            params = jax.tree.map(lambda leaf, dtype=numbers: leaf.astype(dtype), params)
            for output in dict.fromkeys(case[2] for case in CASES):
                loss = jax.jit(jax.value_and_grad(_outputs(network, params, batch, output), has_aux=True))
                unscaled = loss(params)
                for case, paths, of, holds in CASES:
                    for alpha in alphas if of == output else ():
                        row = {"scaled by alpha": case, "output": output, "numbers": numbers, "alpha": alpha}
                        rows.append(
                            row | _differences(unscaled, loss(_scaled(params, paths, alpha)), paths, alpha) | {"claim holds": holds}
                        )
    return {"scale_invariance": rows}


def _batch(examples: int, tokens: int, vocabulary_size: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 2)
    token_BT = jax.random.randint(keys[0], (examples, tokens), 5, vocabulary_size)
    half_T = (jnp.arange(tokens) >= tokens // 2).astype(jnp.int32)
    return {
        "token": token_BT,
        "segment": jnp.broadcast_to(half_T, token_BT.shape),
        "length": jnp.full((examples,), tokens, jnp.int32),
        "masked_positions": jnp.broadcast_to(jnp.arange(1, 5), (examples, 4)),
        "label": jax.random.randint(keys[1], (examples, 4), 5, vocabulary_size),
    }


def _outputs(model: Any, params: Any, batch: dict[str, Any], output: str) -> Outputs:
    """Returns a function `parameters -> (loss, [logits])`: masked positions and next sentence; or a LayerNorm over one matrix product
    alone."""
    import jax
    import jax.numpy as jnp

    arguments = (batch["token"], batch["segment"], batch["length"], batch["masked_positions"])
    word_VH, answer_B = params["embeddings"]["word"], jnp.arange(len(batch["token"])) % 2

    def loss_of(masked_BMV: Any, next_B2: Any) -> tuple[Any, Any]:
        masked = -jnp.take_along_axis(jax.nn.log_softmax(masked_BMV), batch["label"][..., None], axis=-1).mean()
        next_sentence = -jnp.take_along_axis(jax.nn.log_softmax(next_B2), answer_B[:, None], axis=-1).mean()
        return masked + next_sentence, (masked_BMV, next_B2)

    def tied(scaled: Any) -> tuple[Any, Any]:
        return loss_of(*model.apply({"params": scaled}, *arguments))

    def free(scaled: Any) -> tuple[Any, Any]:
        heads = {"capture_intermediates": lambda module, _: module.path == ("mlm", "norm"), "mutable": ["intermediates"]}
        (_, next_B2), kept = model.apply({"params": scaled}, *arguments, **heads)
        h_BMH = kept["intermediates"]["mlm"]["norm"]["__call__"][0]
        return loss_of(h_BMH @ word_VH.T + scaled["mlm"]["output_bias"], next_B2)

    def no_residual(scaled: Any) -> tuple[Any, Any]:
        h_BTH = word_VH[batch["token"]] @ scaled["layers"]["attention_out"]["kernel"][0]
        centred_BTH = h_BTH - h_BTH.mean(-1, keepdims=True)
        h_BTH = centred_BTH / jnp.sqrt(jnp.square(centred_BTH).mean(-1, keepdims=True) + model.model.layer_norm_eps)
        return loss_of(h_BTH[:, 1:5] @ word_VH.T, h_BTH[:, 0, :2])

    return {"tied decoder": tied, "free decoder": free, "no residual": no_residual}[output]


def _differences(unscaled: Any, scaled: Any, paths: Sequence[str], alpha: float) -> dict[str, float]:
    """Returns the changes of outputs and loss, alpha times the gradient's norm over the unscaled norm, and its largest error by entry."""
    import numpy as np

    (loss, outputs), gradient = unscaled
    (scaled_loss, scaled_outputs), scaled_gradient = scaled
    before, after = (np.concatenate([np.ravel(array) for array in arrays]) for arrays in (outputs, scaled_outputs))
    expected, actual = _entries(gradient, paths), alpha * _entries(scaled_gradient, paths)
    return {
        "relative change of the output": float(np.max(np.abs(after - before)) / np.max(np.abs(before))),
        "relative change of the loss": abs(float(scaled_loss - loss)) / abs(float(loss)),
        "alpha * gradient norm / unscaled": float(np.linalg.norm(actual) / np.linalg.norm(expected)),
        "largest error of alpha * gradient": float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected))),
    }


def _scaled(params: Any, paths: Sequence[str], alpha: float) -> Any:
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * alpha if path_name(path) in paths else leaf, params)


def _entries(tree: Any, paths: Sequence[str]) -> Any:
    import jax
    import numpy as np

    return np.concatenate([np.ravel(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if path_name(path) in paths])
