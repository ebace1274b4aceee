"""Declares `mechanism=dp_fp`: noise on each drawn row's pooled vector, in the forward pass (Du and Mi 2021, DP-FP).

A step is M micro-batches: independent Poisson draws, each with p = B / (M N). Of every drawn row i the vector h_i that the classifier's
last map reads (BERT's pooler output) is clipped and noised once,

    x_i = h_i min(1, C / ||h_i||) + N(0, sigma^2 C^2 I),

and the loss of x_i is differentiated as usual, the clip included: gradients are neither clipped nor noised. One optimiser step follows,
over the mean of the M micro-batches, each divided by its expected number of rows B / M. Evaluation and exported weights use the model as it
is.

What holds. The gradient of the last map is a function of x_i, the label and released parameters. That of every parameter below reads the
text again: it is not covered by the noise, and one step of it can show words of the batch whatever sigma is. So a run has a guarantee only
where nothing below the noise is trained. Then it is that of the released rows, each in its own place and with its label
(`dpx.privacy.gaussian_losses`): of a row's text alone, without amplification by sampling.

Rows are clipped to C (1 - m): their squared norms, at most 4096 terms in float32, are off by less than 2^-12, half of which is left of the
norm, and m is 2^-10 or more (`dpx.clipping.rounding`).

Shape legend: B rows, H width.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.mechanism.mechanism_protocol import Declared, ForwardNoise, NoisyVectors
from dpx.models.shape import Bert
from dpx.models.trained import OUTPUT, LastLayer, Matching, OutputLayer, Trained
from dpx.randomness import RootSecret

# Numbers of a vector whose squared norm is summed within the margin.
_WIDEST = 4096


@declaration
class DpFp(ForwardNoise):
    """Adds noise to the pooled vector of each row of `micro_batches` Poisson draws a step.

    `clip` gives the norm and `noise` gives sigma.

    Attributes:
        micro_batches: Poisson draws of a step, each with its own noise.
    """

    micro_batches: int = 32
    name: Literal["dp_fp"] = "dp_fp"

    # In which order rows are added up must not follow from their texts: the update would then be no function of the noisy rows.
    needs_fixed_places: ClassVar[bool] = True
    not_covered: ClassVar[tuple[str, ...]] = (
        "labels: the label of each drawn row is used as it is (mechanism=dp_fp)",
        "presence: which rows a micro-batch draws, and how many, is taken to be seen (mechanism=dp_fp)",
    )
    floating_point: ClassVar[str] = (
        "vectors and noise are float32: the low-order bits of a noisy vector are not those of a real Gaussian; no vector is longer than "
        "the clipping norm, by the margin that is left for rounding"
    )

    def __post_init__(self) -> None:
        require(
            self.micro_batches >= 1,
            f"mechanism.micro_batches={self.micro_batches}",
            "a step is at least one draw of rows",
            "Use 1 or more",
        )

    @property
    def draws_per_step(self) -> int:
        return self.micro_batches

    def check(self, declared: Declared) -> None:
        task, model, noise, privacy = declared.task, declared.model, declared.noise, declared.privacy
        of_rows = "the rows of a micro-batch are released one by one"
        require(
            isinstance(model, Bert) and task.name == "classification",
            f"mechanism=dp_fp, task={task.name}, model={model.name}",
            "noise is added to the one pooled vector of a text, and this task has no such vector",
            "Use task=classification with a BERT or RoBERTa, or mechanism=dp_sgd",
        )
        for is_met, value, reason, fix in (
            (
                model.width <= _WIDEST,
                f"model.width={model.width}",
                "the rounding of longer vectors is not bounded",
                f"Use {_WIDEST} at most",
            ),
            (
                privacy.adjacency == "zero_out_text",
                f"privacy.adjacency={privacy.adjacency}",
                f"{of_rows}, each with its label, so that only their texts can be protected",
                "Use privacy.adjacency=zero_out_text",
            ),
            (
                declared.sampler.name == "poisson",
                f"sampler={declared.sampler.name}",
                "a micro-batch is a draw of each row independently",
                "Use sampler=poisson",
            ),
            (
                privacy.rows_per_unit_max == 1,
                f"privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
                f"{of_rows}, and are accounted for units of one row",
                "Use privacy.unit=row",
            ),
            (declared.clip.kind == "flat", f"clip={declared.clip.kind}", "a vector is clipped to one constant norm", "Use clip=flat"),
            (
                not declared.telemetry.is_released,
                "telemetry=released",
                "its noise is accounted beside a noisy sum, and dp_fp has no such sum",
                "Use telemetry=secret",
            ),
            (
                noise.kind != "noise_batch_ratio",
                "noise=noise_batch_ratio",
                "noise is added to each row, whatever the batch size",
                "Use noise=multiplier or noise=target_clt",
            ),
        ):
            require(is_met, f"mechanism=dp_fp, {value}", reason, fix)
        against = self.reasons_against(declared.train, lambda: task.parameter_shapes(model, 1))
        # A target for epsilon demands a guarantee.
        require(
            noise.kind != "target_epsilon" or not against,
            f"mechanism=dp_fp, noise=target_epsilon, train={declared.train.kind}",
            f"no noise reaches a target for epsilon: {'; '.join(against)}",
            "Use train=last_layer, or noise=target_clt, which promises nothing",
        )

    def trained(self, train: Trained) -> Trained:
        """Returns the declaration of what is trained.

        Of the head only the last map can be protected: the pooler, or RoBERTa's dense map, is below the noise.
        """
        return OutputLayer() if isinstance(train, LastLayer) else train

    def reasons_against(self, train: Trained, parameters: Callable[[], Iterable[str]]) -> list[str]:
        train = self.trained(train)
        if isinstance(train, OutputLayer):
            return []
        below = "the encoder and what pools its output"
        if isinstance(train, Matching) and train.layers is None:
            below = ", ".join(path for path in parameters() if train.selection().picks(path) and not OUTPUT.picks(path))
            if not below:
                return []
        return [
            f"dp_fp: train={train.kind} trains {below} below the noise, and their gradients read the texts again: they are not covered by "
            "the noise on the pooled vectors, and can show words of a batch whatever the noise"
        ]

    def ledger_fields(self) -> dict[str, Any]:
        return {"noise": "forward_gaussian", "micro_batches": self.micro_batches}

    def row_keys(self, secret: RootSecret, step: int, draw: int, rows: int) -> np.ndarray:
        keys = [secret.key("forward_noise", step, draw, row) for row in range(rows)]
        return np.stack(keys) if keys else np.zeros((0, 2), np.uint32)

    def noisy_vectors(self, vectors: Any, keys: Any, deviation: Any, limit: Any) -> NoisyVectors:
        import jax
        import jax.numpy as jnp

        from dpx.mechanism.noise import gaussian

        clipped_BH, norms_B, is_finite_B = clipped(vectors.astype(jnp.float32), limit)
        noise_BH = jax.vmap(lambda key: gaussian(key, 1, vectors.shape[1])[0])(keys)
        noisy_BH = clipped_BH + deviation * noise_BH
        return NoisyVectors(noisy_BH.astype(vectors.dtype), clipped_BH, norms_B, is_finite_B)

    def noise_facts(self, clipping_norm: float, count_parameters: Any) -> dict[str, Any]:
        facts = {
            "micro_batches": self.micro_batches,
            "noised": "each drawn row's pooled vector, in the forward pass",
            "noise_batch_ratio": None,
        }
        return super().noise_facts(clipping_norm, count_parameters) | facts

    def explanation(self) -> list[str]:
        return [
            f"A step is {self.micro_batches} micro-batches, drawn independently; a row in two of them is noised twice.",
            "Each noisy vector stays in its own place beside its label, so everyone sees who is drawn: sampling amplifies nothing.",
            "Gradients are neither clipped nor noised. Evaluation adds no noise.",
        ]


def clipped(vectors_BH: Any, limit: Any) -> tuple[Any, Any, Any]:
    """Returns h min(1, `limit` / ||h||) of each row (float32 [B, H]), its norm [B] before clipping, and whether that is finite, bool [B].

    A row whose norm is not finite becomes zero.

    Its derivative is exact: of a row that is clipped limit / ||h|| (I - h h^T / ||h||^2), of another the identity.
    """
    import jax
    import jax.numpy as jnp

    is_finite_B = jnp.isfinite(jnp.sum(jnp.square(vectors_BH), axis=1))
    # Neither 0 nor infinity may meet a root or a quotient, whose derivative would be NaN also for rows that do not use it.
    vectors_BH = jnp.where(is_finite_B[:, None], vectors_BH, 0)
    squares_B = jnp.sum(jnp.square(vectors_BH), axis=1)
    is_long_B = squares_B > limit * limit
    factor_B = jnp.where(is_long_B, limit / jnp.sqrt(jnp.where(is_long_B, squares_B, 1)), 1)
    return vectors_BH * factor_B[:, None], jnp.sqrt(jax.lax.stop_gradient(squares_B)), is_finite_B
