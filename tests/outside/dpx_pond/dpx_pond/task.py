"""`task=every_other`: next words, of which every other one counts."""

import dataclasses
from typing import Any

from dpx.declaration import declaration, require
from dpx.task.task_protocol import Objective, PackageTask


@declaration
class EveryOther(PackageTask):
    """Mean cross-entropy over the next tokens at even positions."""

    name: str = "every_other"
    metric: str = "every_other_accuracy"

    @property
    def counts(self) -> tuple[str, ...]:
        return ("every_other_correct", "every_other_predicted")

    @property
    def accuracy_counts(self) -> tuple[str, str | None]:
        return "every_other_correct", "every_other_predicted"

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        correct, predicted = (totals[name] for name in self.counts)
        return {"loss": totals["loss"] / max(totals["examples"], 1.0), "every_other_accuracy": correct / max(predicted, 1.0)}

    def baselines(self, answers: Any, frequent_token: int | None) -> dict[str, float]:
        """Always the token that was right most often."""
        return {"best_constant": float(answers.max()) / max(float(answers.sum()), 1.0)}

    def require_fits(self, model: Any, data: Any) -> None:
        super().require_fits(model, data)
        require(model.causal, f"model={model.name}", "can read the token that it should predict", "Use model=brook")
        require(data.pairs == "none", f"data.pairs={data.pairs}", "two segments are not running text", "Use data.pairs=none")

    def objective(self, model: Any, vocabulary_size: int, special: Any) -> Objective:
        return _Running(model, self, vocabulary_size)


@dataclasses.dataclass(frozen=True)
class _Running:
    """B examples, T tokens, V vocabulary."""

    model: Any
    task: EveryOther
    vocabulary_size: int

    def init(self, key: Any) -> Any:
        import jax.numpy as jnp

        return self.model.init(jnp.asarray(key), self.vocabulary_size, 0)

    def batch(self, key: Any, rows: Any) -> Any:
        import jax.numpy as jnp

        tokens, length = jnp.asarray(rows["tokens"]), jnp.asarray(rows["length"])
        place_T = jnp.arange(tokens.shape[1])
        has_label_BT = (place_T + 1 < length[:, None]) & (place_T % 2 == 0)
        labels = jnp.where(has_label_BT, jnp.roll(tokens, -1, axis=1), 0)
        return {"tokens": tokens, "length": length, "labels": labels, "has_label": has_label_BT, "record": jnp.asarray(rows["record"])}

    def answers(self, batch: Any) -> Any:
        return batch["labels"], batch["has_label"]

    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any:
        import jax

        return jax.vmap(lambda example: self._one(params, example))(batch)

    def _one(self, params: Any, example: Any) -> Any:
        import jax
        import jax.numpy as jnp

        logits_TV = self.model.token_logits(params, example["tokens"], example["length"]).astype(jnp.float32)
        picked_T = jnp.take_along_axis(logits_TV, example["labels"][:, None], axis=1)[:, 0]
        asked_T = example["has_label"].astype(jnp.float32)
        loss = jnp.sum((jax.nn.logsumexp(logits_TV, axis=1) - picked_T) * asked_T) / jnp.maximum(asked_T.sum(), 1)
        correct = jnp.sum((picked_T >= logits_TV.max(1)) * asked_T)
        return loss, {"every_other_correct": correct, "every_other_predicted": asked_T.sum()}
