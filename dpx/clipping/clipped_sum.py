"""Computes the clipped sum of one microbatch, with one interface for several methods: of a batch's loss, or of the loss of one example.

The loss of one example, in any JAX code, becomes a loss of a batch that is made of ops (`ByExample`): what `dpx.clipped_grad` and
`clipping_method=traced` run. A clipped sum uses no collectives and no Python state, so it may be called inside `shard_map`, `fori_loop` and
`jit`.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping import groups, joint, norms
from dpx.clipping.example_loss import Evaluation, Reader, Route
from dpx.clipping.groups import (
    KEPT_BYTES,
    ClippedSum,
    LossesFn,
    Units,
    batch_size,
    check_losses,
    check_rows,
    flags,
    of_no_rows,
    with_counts,
)
from dpx.clipping.joint import RouteCost, beside_vmap, by_ghost, of_parameter
from dpx.clipping.methods import check_untracked, sum_by
from dpx.clipping.op import ProbeSession, is_probed, session_of, shapes_of, trained_shapes
from dpx.clipping.program import check_program, traced, zero_sums
from dpx.clipping.reader_ops import are_separate
from dpx.clipping.readers import bound, check_reached, check_trained_reached, has_narrow
from dpx.clipping.separate import check_separate
from dpx.declaration import ConfigError, require

# The most that all rounds of a loop may copy of a parameter, as a share of it.
MOST_COPIED = 0.5
# The readers of each parameter, by path.
Readers = Mapping[str, list[Reader]]


@dataclasses.dataclass(frozen=True)
class Taken:
    """How one parameter's per-example gradients are computed.

    It holds the route, the primitives that read the parameter, the bytes kept for one example, what each exact way costs for one unit, how
    many units are computed at once, and the cost of the ways that are taken divided by the cost of `vmap`.
    """

    path: str
    route: Route
    readers: tuple[str, ...]
    bytes_per_example: int
    costs: tuple[RouteCost, ...]
    units_at_once: int
    beside_vmap: float


class _Plan(NamedTuple):
    """How many units are computed at once, the bytes of their gradients that may be kept, and the ways of each parameter, by path."""

    units: int
    kept_bytes: int
    costs: dict[str, tuple[RouteCost, ...]]
    # Bytes of all gradients that are better kept.
    wanted: int
    bytes_per_example: dict[str, int]


@dataclasses.dataclass(frozen=True)
class ByExample:
    """A traced loss of one example, turned into a loss of a batch that is made of ops, with the readers of each parameter."""

    losses: Any
    params: Any
    batch: Any
    readers: Readers
    is_narrow: bool

    @classmethod
    def trace(cls, loss: Any, params: Any, batch: Any, frozen: Any = None) -> "ByExample":
        """Traces `loss(params, example)`, which returns a number or (number, counts).

        `example` is one row of `batch`, without the first axis.

        Raises `ConfigError` for a loss that is not one floating-point number, for parameters that are not floating-point, and for
        operations that could carry data from one example to another; with `frozen` (which may be empty) also for a parameter that is in
        both trees, or that no path from the loss reaches.
        """
        if frozen is not None:
            check_trained_reached(loss, params, frozen, _row(batch))
        loss, example = bound(loss, frozen), _row(batch)
        trained_shapes(params)
        jaxpr, out = jax.make_jaxpr(lambda params, example: with_counts(loss(params, example)), return_shape=True)(params, example)
        is_number = out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating)
        returned = f"loss of shape {out[0].shape} and type {out[0].dtype}"
        require(is_number, returned, "is not one floating-point number for each example", "Return a scalar")
        check_program(jaxpr)
        check_program(jax.make_jaxpr(jax.grad(lambda *given: with_counts(loss(*given)), has_aux=True))(params, example))
        one = _One(jaxpr, jax.tree.structure(out))
        readers, by_round = _readers(one, params, batch), frozenset[str]()
        mixed = frozenset(path for path, reads in readers.items() if len({reader.layers for reader in reads}) > 1)
        if mixed:
            readers, by_round = _readers(one, params, batch, mixed), mixed
        copied = frozenset(path for path, reads in readers.items() if _is_copied(reads))
        shared = frozenset(path for path, reads in readers.items() if len(reads) > 1 or any(reader.is_repeated for reader in reads))
        parted = frozenset(path for path, reads in readers.items() if path in shared and are_separate([reader.box for reader in reads]))
        joined = frozenset(path for path in shared - parted if not all(reader.is_matrix for reader in readers[path]))
        evaluation = partial(Evaluation, copied=copied, shared=shared, parted=parted, joined=joined, by_round=by_round)

        def losses(wrapped: Any, batch: Any) -> Any:
            """Computes the losses of a batch, by ops if its parameters are wrapped."""
            session = session_of(wrapped)
            if session is None:
                return jax.vmap(lambda example: with_counts(loss(wrapped, example)))(batch)
            values = [leaf.value for leaf in jax.tree.leaves(wrapped, is_leaf=is_probed)]

            def of_one(example: Any, tick: Any) -> Any:
                results = one.run(evaluation(session, tick), readers, values, jax.tree.leaves(example))
                return jax.tree.unflatten(one.outputs, results)

            return jax.vmap(of_one)(batch, jnp.zeros(batch_size(batch)))

        return cls(losses, params, batch, readers, has_narrow(jaxpr.jaxpr))

    @property
    def routes(self) -> dict[str, Route]:
        """Returns the route that computes each parameter's per-example gradients, by path."""
        found: dict[str, Route] = {}
        for path, readers in self.readers.items():
            routes = {reader.route for reader in readers}
            if not routes or routes == {"elementwise"}:
                found[path] = "elementwise"
            elif _is_copied(readers) or "copies" in routes:
                found[path] = "copies"
            else:
                found[path] = next(route for route in ("lookup", "convolution", "product") if route in routes)
        return found

    def check_no_copies(self) -> None:
        """Raises `ConfigError` for the first parameter that needs a copy for each example."""
        for path, route in self.routes.items():
            if route == "copies":
                reason = f"is read by {', '.join(_names(self.readers[path]))} in a way that needs a gradient for each example"
                raise ConfigError(path, reason, "Leave out strict, or use the parameter in products and lookups only")

    def summed(self, method: str, is_by_unit: bool = False, kept_bytes: int | None = None, **options: Any) -> ClippedSum:
        """Computes the clipped sum by a method of `sum_by`, with its options.

        With `is_by_unit` the weight of a unit depends on its norm alone, so that book-keeping may take fewer units at once where that is
        cheaper. Without `kept_bytes` dpx chooses how many bytes of gradients are kept.
        """
        rows, is_padding_B = options["rows_per_unit"], options["is_padding_B"]
        units = Units(rows, is_padding_B).is_padding_U.shape[0]

        may_keep = KEPT_BYTES if kept_bytes is None else kept_bytes
        all_gradients = 4 * units * sum(leaf.size for leaf in jax.tree.leaves(self.params))

        def run(batch: Any, is_padding_B: Any, kept: int = may_keep) -> ClippedSum:
            own = options | {"kept_bytes": kept, "is_padding_B": is_padding_B}
            return sum_by(method, self.losses, self.params, batch, **own)

        try:
            if method != "book_keeping" or all_gradients <= may_keep:
                return run(self.batch, is_padding_B)
            plan = self._planned(kept_bytes, rows, is_by_unit)
            again = partial(run, kept=plan.kept_bytes)
            if plan.units < units:
                return groups.summed_by_turns(again, self.batch, is_padding_B, rows, plan.units)
            return again(self.batch, is_padding_B)
        except NotImplementedError as error:
            reason = f"cannot be mapped over examples ({str(error).strip().splitlines()[0]})"
            raise ConfigError("the loss", reason, "Use functions that jax.vmap has a rule for") from error

    def routes_taken(self, method: str, kept_bytes: int | None, rows_per_unit: int, is_by_unit: bool) -> list[Taken]:
        """Returns the route of every parameter by this method without computing anything."""
        Units(rows_per_unit, flags(None, batch_size(self.batch), "is_padding"))
        if method == "book_keeping":
            plan = self._planned(kept_bytes, rows_per_unit, is_by_unit)
        else:
            # Ghost clipping keeps no gradients.
            plan = self._at_once(0, rows_per_unit)
        found, routes = [], self.routes
        for path, reads in self.readers.items():
            size, costs = plan.bytes_per_example[path], plan.costs[path]
            if method == "vmap":
                costs = tuple(cost._replace(is_taken=cost.way == "vmap") for cost in costs)
                size = costs[-1].bytes // rows_per_unit
            elif method == "ghost":
                costs = by_ghost(costs)
            found.append(Taken(path, routes[path], _names(reads), size, costs, plan.units, beside_vmap(costs)))
        return found

    def _planned(self, kept_bytes: int | None, rows_per_unit: int, is_by_unit: bool) -> _Plan:
        """Returns the plan for all units at once, unless a parameter then costs more than by `vmap`.

        Then it is for fewer units. Where weights may depend on all norms together, gradients are kept instead, as `vmap` keeps them, unless
        the user has said how many bytes may be kept.
        """
        is_chosen = kept_bytes is None
        kept_bytes = KEPT_BYTES if kept_bytes is None else kept_bytes
        plan = self._at_once(kept_bytes, rows_per_unit)
        if plan.wanted <= kept_bytes or all(beside_vmap(costs) <= 1 for costs in plan.costs.values()):
            return plan
        if not is_by_unit:
            return self._at_once(plan.wanted, rows_per_unit) if is_chosen else plan
        of_one = -(-plan.wanted // plan.units)
        units = groups.units_at_once(plan.units, max(1, kept_bytes // of_one))
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((units * rows_per_unit, *leaf.shape[1:]), leaf.dtype), self.batch)
        # `vmap` holds more than the gradients of one unit.
        return dataclasses.replace(self, batch=rows)._at_once(max(kept_bytes, units * of_one), rows_per_unit)

    def _at_once(self, kept_bytes: int, rows_per_unit: int) -> _Plan:
        options = {"kept_bytes": kept_bytes, "rows_per_unit": rows_per_unit}
        program = traced(self.losses, self.params, self.batch, options, batch_size(self.batch))
        sources = joint.norms_of(program, False, kept_bytes=program.session.kept_bytes)
        size = dict.fromkeys(self.readers, 0)
        for site in program.sites:
            size[site.first] += sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(site.record))
        return _Plan(
            units=program.examples // rows_per_unit,
            kept_bytes=kept_bytes,
            costs={path: of_parameter(path, program, sources) for path in self.readers},
            wanted=sum(program.session.wanted.values()) + sources.wanted_bytes,
            bytes_per_example={path: bytes_ // program.examples for path, bytes_ in size.items()},
        )


def _names(readers: list[Reader]) -> tuple[str, ...]:
    return tuple(sorted({reader.primitive for reader in readers}))


@dataclasses.dataclass(frozen=True)
class _One:
    """The traced loss of one example: its program, and the tree of its outputs."""

    jaxpr: Any
    outputs: Any

    def run(self, evaluation: Evaluation, paths: Iterable[str], values: list[Any], example: list[Any]) -> list[Any]:
        """Returns the outputs as a flat list; `evaluation` follows the parameters `paths`, which have these values."""
        followed = [evaluation.parameter(path, value) for path, value in zip(paths, values, strict=True)]
        results = evaluation.run(self.jaxpr.jaxpr, self.jaxpr.consts, [*followed, *example])
        return [evaluation.plain(value, "return") for value in results]


def _row(batch: Any) -> Any:
    """Returns the shapes of one row, without the example's axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def _readers(one: _One, params: Any, batch: Any, by_round: frozenset[str] = frozenset()) -> Readers:
    """Returns the readers of each parameter without computing anything."""
    shapes = shapes_of(params)
    by_place: dict[str, dict[tuple, Reader]] = {path: {} for path in shapes}

    def run(values: list[Any], example: list[Any], tick: Any) -> None:
        one.run(Evaluation(ProbeSession(shapes), tick, by_round=by_round, readers=by_place), shapes, values, example)

    jax.eval_shape(run, jax.tree.leaves(params), jax.tree.leaves(_row(batch)), jax.ShapeDtypeStruct((), jnp.float32))
    return {path: list(reads.values()) for path, reads in by_place.items()}


def _is_copied(readers: list[Reader]) -> bool:
    """Returns whether the parameter is copied for each example, instead of becoming an op at each of its readers."""
    if len(readers) == 1 and not readers[0].is_repeated or are_separate([reader.box for reader in readers]):
        return False
    if not readers or not all(reader.is_matrix or reader.is_part or reader.copied for reader in readers):
        return True
    return sum(reader.copied for reader in readers if not reader.is_matrix) > MOST_COPIED


def clipped_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Any,
    frozen: Any = None,
    is_padding_B: Any = None,
    method: Any = "book_keeping",
    kept_bytes: int | None = None,
    fused: bool = True,
    rows_per_unit: Any = 1,
    checked: bool = True,
) -> ClippedSum:
    """Computes the clipped sum of the gradients of a batch, sum_b c_b grad_b with c = weights(norms).

    This is the batched form, for losses made of ops (`dpx.clipping.ops`) and for models of dpx; `dpx.clipped_grad` takes the loss of one
    example in any JAX code.

    Args:
        losses_fn: `(params, batch) -> (losses_B, counts)`, with losses float [B] and counts a dict of arrays [B]. `losses_B[b]` must
            depend on row b alone.
        params: The trained parameters, a nested dict of arrays.
        batch: A tree of arrays [B, ...], whose first axis is the example.
        weights: A function of the norms, float32 [U], to factors of the same shape. It runs under jit.
        frozen: A nested dict of parameters that are not trained; the loss gets it merged with `params`. Nothing is recorded or summed for
            it, and nothing below the lowest trained parameter is differentiated.
        is_padding_B: bool [B]; true for rows that contribute exactly zero. `None` if no row is padding.
        method: "book_keeping" or "ghost", for a loss whose parameters all go through ops; "vmap" or "traced" (row by row), for any loss.
        kept_bytes: The most bytes of per-example weight gradients that are kept, less what a fused stack of layers keeps; 72 MiB if not
            given. "traced" then keeps all gradients where the other ways cost more than "vmap".
        fused: Whether models may use their hand-scheduled blocks.
        rows_per_unit: R. Every R consecutive rows are one unit: its loss is the sum of its rows' losses, and the norm of the sum of their
            gradients is clipped. A unit with a gradient that is not finite contributes zero as a whole.
        checked: Whether to test on random rows that no example depends on another (`dpx.clipping.separate`).

    Returns:
        The sum, float32 even if parameters are bfloat16, and the facts of each unit, as `ClippedSum`.

    Raises:
        ConfigError: For an unknown method, for a parameter that no op claims or whose uses have no joint rule, and for an op that has no
            rule for units of several rows. With `frozen` (which may be empty) also for a parameter that is in both trees, or that no path
            from the loss reaches.
    """
    options: dict[str, Any] = dict(weights=weights, rows_per_unit=rows_per_unit)

    def run(params: Any, batch: Any, frozen: Any, is_padding_B: Any) -> ClippedSum:
        if method != "traced":
            own = {"frozen": frozen, "is_padding_B": is_padding_B, "fused": fused, "check": check_separate if checked else None}
            own["kept_bytes"] = KEPT_BYTES if kept_bytes is None else kept_bytes
            return sum_by(method, losses_fn, params, batch, **own, **options)
        is_padding_B = flags(is_padding_B, batch_size(batch), "is_padding_B")
        check_rows(rows_per_unit)
        check_untracked(params, frozen, batch)
        own = {"is_padding_B": is_padding_B, "kept_bytes": kept_bytes, "is_by_unit": getattr(weights, "is_by_unit", False)}

        def loss_of_one(params: Any, row: Any) -> Any:
            losses_1, counts = with_counts(losses_fn(params, jax.tree.map(lambda leaf: leaf[None], row)))
            check_losses(losses_1, 1)
            return losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts)

        return ByExample.trace(loss_of_one, params, batch, frozen).summed("book_keeping", **own, **options)

    return groups.on_explicit_mesh(run, ClippedSum, params, batch, rows_per_unit, params, batch, frozen, is_padding_B)


def plain_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    is_padding_B: Any = None,
    *,
    frozen: Any = None,
    fused: bool = True,
    rows_per_unit: Any = 1,
) -> ClippedSum:
    """Computes the sum of the gradients of a batch without clipping, for a step without privacy.

    Args:
        losses_fn: As for `clipped_sum`, and so are all arguments that are not listed here.
        fused: Whether models run the same hand-scheduled blocks as under book-keeping, so that the plain step is a fair baseline.

    Returns:
        A `ClippedSum` over the rows that are not padding, with `norms_B` None.
    """

    run = lambda *given: _plain_sum(losses_fn, *given, fused=fused, rows_per_unit=rows_per_unit)  # noqa: E731
    return groups.on_explicit_mesh(run, ClippedSum, params, batch, rows_per_unit, params, batch, frozen, is_padding_B)


def _plain_sum(
    losses_fn: LossesFn, params: Any, batch: Any, frozen: Any, is_padding_B: Any, *, fused: bool, rows_per_unit: Any
) -> ClippedSum:
    examples = batch_size(batch)
    check_untracked(params, frozen, batch)
    check_rows(rows_per_unit)
    trained_shapes(params)
    is_padding_B = flags(is_padding_B, examples, "is_padding_B")
    units, is_real_B = Units(rows_per_unit, is_padding_B), ~is_padding_B
    if examples == 0:
        run = partial(_plain_sum, losses_fn, params, frozen=frozen, fused=fused, rows_per_unit=rows_per_unit)
        return of_no_rows(lambda batch, is_padding_B: run(batch, is_padding_B=is_padding_B), batch, rows_per_unit)
    program = traced(losses_fn, params, batch, {"kept_bytes": KEPT_BYTES}, examples, frozen) if fused else None
    if program is None:
        check_trained_reached(losses_fn, params, frozen, batch)
    elif frozen is not None:
        check_reached(program.closed.jaxpr, program.paths)

    def total_loss(leaves):
        run = bound(losses_fn, frozen)(leaves, batch) if program is None else program(lambda _: "plain", {}, leaves)
        losses_B, counts = with_counts(run)
        return jnp.sum(jnp.where(is_real_B, losses_B, 0)), (losses_B, counts)

    leaves = jax.tree.map(norms.at_least_float32, params) if program is None else zero_sums(params)
    total, (losses_B, counts) = jax.grad(total_loss, has_aux=True)(leaves)
    losses_U, counts = units.summed((losses_B, counts))
    return ClippedSum(total, None, losses_U, counts, ~units.is_padding_U)
