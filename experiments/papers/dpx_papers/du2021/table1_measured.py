"""Compiles and times the gradient of one step by each method of Table 1, on small encoders (Du and Mi 2021).

A program is what a step computes on m rows, with the parts of a run: RGP's carriers, the sum, clipped where the method clips, the noise,
and RGP's rebuilt gradient. The optimiser, which all methods share, is left out.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dpx.clipping import ClippingMethod
from dpx.declaration import require
from dpx.mechanism.clip import Flat
from dpx.mechanism.dp_fp import DpFp
from dpx.mechanism.dp_sgd import DpSgd, NoPrivacy
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism, Reparametrisation
from dpx.mechanism.rgp import Rgp
from dpx.models.trained import Everything, Matching, Trained
from dpx.randomness import RootSecret
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.du2021.table1_complexity import require_slope, sides

_NORM, _DEVIATION = 1.0, 1.0
# What Yu et al. train: the weight matrices and the head.
_CARRIED = Matching(paths=("layers/*/kernel", "pooler/*", "classifier/*"))


class Method(NamedTuple):
    """A row of Table 1: what is trained and how, and the published orders; `None` for a variant that the table does not have."""

    mechanism: Mechanism
    clipping: Literal["vmap", "book_keeping"] = "book_keeping"
    train: Trained = Everything()
    memory: str | None = None
    time: str | None = None


class _Program(NamedTuple):
    """A compiled gradient of one step: its bytes beyond parameters and rows, its FLOPs, and a call that runs it."""

    bytes: int
    flops: int
    call: Callable[[], Any]


def _require_rounds(declared: Any) -> None:
    require_slope(declared)
    require(declared.rounds >= 1, f"analysis.rounds={declared.rounds}", "no time would be measured", "Use 1 or more")


def methods(rank: int, power_iterations: int, micro_batches: int) -> dict[str, Method]:
    """Returns the methods by name, SGD first."""
    carriers = Rgp(rank=rank, decomposes="weight", power_iterations=power_iterations)
    return {
        "SGD": Method(NoPrivacy(), memory="O(d)", time="O(md)"),
        "DP-SGD": Method(DpSgd(), "vmap", memory="O(md)", time="O(md)"),
        "DP-SGD, book-keeping": Method(DpSgd()),
        "DP-FP": Method(DpFp(micro_batches=micro_batches), memory="O(d)", time="O(md)"),
        "RGP": Method(carriers, "vmap", _CARRIED, memory="O(mrw)", time="O(md + Krd + Kr^2 w)"),
        "RGP, book-keeping": Method(carriers, train=_CARRIED),
    }


@analysis(_require_rounds)
def dpfp_table1_measured(
    models: Sequence[str],
    batches: Sequence[int],
    sequence_length: int,
    vocabulary_size: int,
    rank: int,
    power_iterations: int,
    micro_batches: int,
    rounds: int,
) -> Made:
    """Measures models at each batch.

    Attributes:
        models: Options of the group model.
        batches: Rows of a batch; slopes are between the smallest and the largest.
        sequence_length: Tokens of a row.
        vocabulary_size: Rows of the word table.
        rank: Rank of RGP's carriers.
        power_iterations: Rounds of RGP's power method.
        micro_batches: Micro-batches of DP-FP.
        rounds: How often every program is timed, in turns.
    """
    from dpx.config import recipes

    measured, rows = methods(rank, power_iterations, micro_batches), []
    for name in models:
        subject = _Subject(recipes.option("model", name), sequence_length, vocabulary_size)
        at = {"model": name, "d": subject.parameters, "w": rank * sides(subject.objective.model)}
        for size in batches:
            programs = {method: subject.program(given, size) for method, given in measured.items()}
            seconds = _interleaved({method: program.call for method, program in programs.items()}, rounds)
            plain = programs["SGD"]
            for method, program in programs.items():
                ratios = [own / other for own, other in zip(seconds[method], seconds["SGD"], strict=True)]
                held = {"bytes": program.bytes, "numbers_beyond_SGD": (program.bytes - plain.bytes) / 4}
                held["bytes_over_SGD"] = program.bytes / plain.bytes
                took = {"published_time": measured[method].time, "flops": program.flops, "flops_over_SGD": program.flops / plain.flops}
                took |= {"seconds": statistics.median(seconds[method]), "seconds_over_SGD": statistics.median(ratios)}
                rows.append(at | {"m": size, "method": method, "published_memory": measured[method].memory} | held | took)
    step = frame(rows)
    # What one more row costs, between the smallest and largest batch; noise and results, to which no row adds, drop out.
    keys = ["model", "d", "w", "method", "published_memory", "published_time"]
    small, large = (
        step[step["m"] == size].set_index(keys)[["bytes", "numbers_beyond_SGD", "flops"]] for size in (min(batches), max(batches))
    )
    slopes = ((large - small) / (max(batches) - min(batches))).reset_index()
    slopes = slopes.assign(numbers=slopes["bytes"] / 4)
    slopes = slopes.assign(**{f"beyond_SGD_over_{name}": slopes["numbers_beyond_SGD"] / slopes[name] for name in ("d", "w")})
    shown = ["numbers", "numbers_beyond_SGD", "beyond_SGD_over_d", "beyond_SGD_over_w", "published_time", "flops"]
    return {"step": step, "slopes": slopes[[*keys[:-1], *shown]]}


class _Subject:
    """A classifier of random weights, and random rows."""

    def __init__(self, model: Any, length: int, vocabulary: int):
        from dpx.task.classification import Objective
        from dpx.task.declared_task import Classification

        self.task = Classification(classes=2)
        self.objective, self.length = Objective(model, self.task, vocabulary), length

    @functools.cached_property
    def parameters(self) -> int:
        import jax

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.objective.init, jax.random.PRNGKey(0))))

    def program(self, method: Method, size: int) -> _Program:
        """Returns the compiled gradient of one step of `method` on `size` rows."""
        import jax

        from dpx.cost.traced import matmul_flops
        from dpx.training import frozen
        from dpx.training.microbatch import synthetic_rows

        rows = synthetic_rows(self.task, size, self.length, self.objective.vocabulary_size)
        batch = jax.jit(self.objective.batch)(np.zeros(2, np.uint32), rows)
        params, beside = jax.jit(lambda key: frozen.draw(method.train, self.objective, key))(jax.random.PRNGKey(0))
        secret, mechanism = RootSecret.from_seed(0), method.mechanism
        first = mechanism.draw_first(secret, 0, params) if isinstance(mechanism, Reparametrisation) else None
        by, _ = jax.eval_shape(functools.partial(_differentiated_by, mechanism), params, first)
        is_forward = isinstance(mechanism, ForwardNoise)
        drawn = mechanism.row_keys(secret, 0, 0, size) if is_forward else mechanism.draw(secret, 0, by, 1.0, _NORM, None)
        arguments = (params, beside, first, drawn, batch)
        gradient = functools.partial(_gradient, self.objective, method)
        compiled: Any = jax.jit(gradient).lower(*arguments).compile()
        memory: Any = compiled.memory_analysis()
        flops = matmul_flops(gradient, *arguments, platform=jax.default_backend())
        held = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return _Program(held, flops, lambda: jax.block_until_ready(compiled(*arguments)))


def _differentiated_by(mechanism: Mechanism, params: Any, first: Any) -> tuple[Any, Any]:
    """Returns (the arrays by which the loss is differentiated, what replaces the rest of the parameters)."""
    if not isinstance(mechanism, Reparametrisation):
        return params, {}
    by = mechanism.reparametrised(params, mechanism.kept_from_start(params), first)
    return by.trained, by.constants


def _gradient(objective: Any, method: Method, params: Any, beside: Any, first: Any, drawn: Any, batch: Mapping[str, Any]) -> Any:
    """Computes the noisy gradient of one step, as a run does; `drawn` are keys of rows with noise in the forward pass."""
    import jax.numpy as jnp

    from dpx.clipping.groups import no_factor
    from dpx.clipping.readers import merged
    from dpx.training.gradient_sum import GradientSum

    mechanism = method.mechanism
    by, constants = _differentiated_by(mechanism, params, first)
    clip = Flat(clipping_norm=_NORM) if mechanism.clips_gradients else None
    factor = mechanism.gradient_factor if isinstance(mechanism, Reparametrisation) else no_factor
    gradient_sum = GradientSum(clip, ClippingMethod(name=method.clipping), 1, factor)
    noised = None
    if isinstance(mechanism, ForwardNoise):
        noised = lambda vector_BH: mechanism.noisy_vectors(vector_BH, drawn, _DEVIATION, _NORM).noisy  # noqa: E731
    losses = lambda params, batch: objective.losses(params, batch, None, noised)  # noqa: E731
    total = gradient_sum(losses, by, batch, _NORM, frozen=merged(constants, beside)).total
    noisy = mechanism.noisy_sum(total, drawn, jnp.float32(_DEVIATION), None, _NORM).noisy
    return mechanism.rebuilt(noisy, by) if isinstance(mechanism, Reparametrisation) else noisy


def _interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every call in every round; one round before warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}
