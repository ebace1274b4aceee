"""Anil et al. 2021, section 4.3: which weights can be scaled without changing the output (A5).

f(alpha w) = f(w) implies gradient f(alpha w) = gradient f(w) / alpha, the reason given for large weight decay. It needs w to reach a
LayerNorm with nothing added on the way. That holds for the three embedding tables together, whose sum alone is normalised, and
there only for outputs that do not decode with the word table; it does not hold for matrices whose output joins a residual sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpx.analysis.table import Table
from dpx.declaration import declaration
from dpx.experiment import Experiment

# What is scaled, by parameter path; and whether the claim holds for it.
TABLES = ("embeddings/word", "embeddings/position", "embeddings/segment")
CASES = (
    ("three embedding tables", TABLES, "next_sentence", True),
    ("three embedding tables, tied decoder", TABLES, "masked", False),
    ("word table alone", TABLES[:1], "next_sentence", False),
    ("position table alone", TABLES[1:2], "next_sentence", False),
    ("attention output matrices", ("layers/attention_out/kernel",), "next_sentence", False),
    ("feed-forward output matrices", ("layers/down/kernel",), "next_sentence", False),
)


@declaration
class AnilScaleInvariance:
    """A freshly initialised model on random tokens: change of the loss, and alpha times the gradient's norm over the unscaled one's."""

    alphas: Sequence[float]
    examples: int
    tokens: int
    vocabulary_size: int

    def __call__(self, experiment: Experiment) -> list[Table]:
        import jax

        model, params, batch = self._made(experiment)
        graded = {output: jax.jit(jax.value_and_grad(_loss(model, batch, output))) for output in ("next_sentence", "masked")}
        rows = []
        for case, paths, output, invariant in CASES:
            value, gradient = graded[output](params)
            for alpha in self.alphas:
                scaled_value, scaled_gradient = graded[output](_scaled(params, paths, alpha))
                change = abs(float(scaled_value - value)) / abs(float(value))
                ratio = alpha * _norm(scaled_gradient, paths) / _norm(gradient, paths)
                rows.append((case, output, alpha, change, ratio, invariant))
        columns = ("scaled by alpha", "loss", "alpha", "relative change of the loss", "alpha * gradient norm / unscaled", "claim holds")
        notes = (
            "where the claim holds the change is rounding and the ratio is 1",
            "single matrices are not invariant: BERT normalises x + f(x), so what is scaled is one term of a sum",
        )
        return [Table("scale_invariance", columns, tuple(rows), "scaling weights before a LayerNorm", notes)]

    def _made(self, experiment: Experiment) -> tuple[Any, Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        from dpx.models.bert import BertForPreTraining

        keys = jax.random.split(jax.random.key(0), 3)
        tokens = jax.random.randint(keys[0], (self.examples, self.tokens), 5, self.vocabulary_size)
        batch = {
            "token": tokens,
            "segment": jnp.broadcast_to(jnp.arange(self.tokens) >= self.tokens // 2, tokens.shape).astype(jnp.int32),
            "length": jnp.full((self.examples,), self.tokens, jnp.int32),
            "slot": jnp.broadcast_to(jnp.arange(1, 5), (self.examples, 4)),
            "label": jax.random.randint(keys[1], (self.examples, 4), 5, self.vocabulary_size),
        }
        model = BertForPreTraining(experiment.model, self.vocabulary_size, True)
        params = model.init(keys[2], batch["token"], batch["segment"], batch["length"], batch["slot"])["params"]
        return model, params, batch


def _loss(model: Any, batch: dict[str, Any], output: str) -> Callable[[Any], Any]:
    """Mean cross-entropy of the masked slots, or of the next-sentence classifier against alternating answers."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any) -> Any:
        masked, next_sentence = model.apply({"params": params}, batch["token"], batch["segment"], batch["length"], batch["slot"])
        if output == "masked":
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(masked), batch["label"][..., None], axis=-1))
        answers = jnp.arange(len(next_sentence)) % 2
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(next_sentence), answers[:, None], axis=-1))

    return loss


def _scaled(params: Any, paths: Sequence[str], alpha: float) -> Any:
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * alpha if _name(path) in paths else leaf, params)


def _norm(tree: Any, paths: Sequence[str]) -> float:
    import jax
    import jax.numpy as jnp

    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _name(path) in paths]
    return float(jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)))


def _name(path: Any) -> str:
    return "/".join(str(getattr(part, "key", part)) for part in path)
