"""Defines `dpx.clipped_grad` and `dpx.weighted_grad`, which transform the loss of one example in the manner of `jax.grad`.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from dpx.clipping import groups
from dpx.clipping.clipped_sum import ByExample, Taken
from dpx.clipping.groups import batch_size, check_rows, flags
from dpx.clipping.methods import check_untracked
from dpx.clipping.norms import at_least_float32
from dpx.clipping.rounding import LARGEST_CLIPPING_NORM, MARGINS, SMALLEST_CLIPPING_NORM
from dpx.declaration import ConfigError, require
from dpx.randomness import path_name

METHODS = ("book_keeping", "ghost", "vmap")
# How far one unit can move a clipped sum, in clipping norms.
MOVES = {"zero_out": 1, "add_remove": 1, "replace_one": 2}


class ClippedGradients(NamedTuple):
    """A clipped sum of gradients, with facts about each unit.

    Every field depends on protected data. Only `total` is bounded, so only `total` may be published, after noise was added to it.

    Attributes:
        total: The sum of the clipped gradients, float32, with the structure and shapes of the arguments `argnums`.
        norms: Norms of the units' gradients before clipping, [U]; upper bounds where float32 cannot give the norm.
        losses: Losses of the units, [U]: sums over the rows of a unit.
        aux: What the loss returned beside its value (`has_aux`), each leaf [U, ...]: sums over the rows of a unit.
        is_counted: [U]; false for padding and for a gradient that is not finite. Such a unit has zeros in all other fields.
    """

    total: Any
    norms: Float[Array, " U"]
    losses: Float[Array, " U"]
    aux: Any
    is_counted: Bool[Array, " U"]


class _Arguments(NamedTuple):
    """The positional arguments of a call, sorted by their role: `loss` of one example takes `params` and `batch`."""

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    given_back: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedGrad:
    """The function that `dpx.weighted_grad` returns. Call it with the arguments of the loss, by position."""

    loss: Any
    argnums: Any
    has_aux: bool
    weights: Any
    shared_argnums: Any
    rows_per_unit: Any
    method: Any
    kept_bytes: Any
    strict: bool
    # Whether the weight of a unit depends on its norm alone. Weights that the user gives may depend on all norms together.
    is_by_unit: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(callable(self.loss), f"loss={self.loss!r}", "is not a function", "Give the loss of one example")
        trained, shared = _places("argnums", self.argnums), _places("shared_argnums", self.shared_argnums)
        require(bool(trained), "argnums=()", "names no argument to differentiate by", "Give the position of the parameters")
        _check_once((*trained, *shared))
        require(self.method in METHODS, f"method={self.method!r}", "no such method", f"Use {', '.join(METHODS)}")
        check_rows(self.rows_per_unit)
        is_size = isinstance(self.kept_bytes, int) and not isinstance(self.kept_bytes, bool) and self.kept_bytes >= 0
        is_right = is_size or self.kept_bytes is None
        require(is_right, f"kept_bytes={self.kept_bytes!r}", "is not a number of bytes", "Give 0 or more, or leave it out")

    def __call__(self, *args: Any, is_padding: Any = None, **others: Any) -> ClippedGradients:
        """Computes the weighted sum of the gradients of all rows; may be called under `jax.jit`.

        Args:
            *args: The arguments of the loss. Batched ones have the example as their first axis, [B, ...], also as a tree of arrays.
            is_padding: bool [B]; true for rows that contribute exactly zero. `None` if no row is padding.
            **others: Refused: an argument by name would be neither batched nor shared.

        Returns:
            The sum and the facts of each unit, as `ClippedGradients`.

        Raises:
            ConfigError: For arguments of other shapes or kinds, and for a loss that does not return one number for a row.
        """
        require(not others, ", ".join(others), "is given by name, so it counts neither as batched nor as shared", "Give it by position")
        split = self._split(args)
        is_padding_B = self._refused(flags(is_padding, batch_size(split.batch), "is_padding"))
        like = split.given_back(split.params)
        return groups.on_explicit_mesh(self._summed, ClippedGradients, like, split.batch, self.rows_per_unit, is_padding_B, *args)

    def _summed(self, is_padding_B: Any, *args: Any) -> ClippedGradients:
        split = self._split(args)
        traced = self._traced(split)
        if self.strict:
            traced.check_no_copies()
        options: dict[str, Any] = {"kept_bytes": self.kept_bytes, "rows_per_unit": self.rows_per_unit, "is_by_unit": self.is_by_unit}
        try:
            found = traced.summed(self.method, weights=self._weights(traced.is_narrow), is_padding_B=is_padding_B, **options)
        except ConfigError as error:
            if "clipping_method=" not in error.fix and "dpx.clipped_" not in error.fix:
                raise
            # Written for a loss made of ops.
            raise ConfigError(error.value, error.reason, "Use method='vmap'") from error
        assert found.norms_B is not None
        return ClippedGradients(split.given_back(found.total), found.norms_B, found.losses_B, found.counts, found.is_counted_B)

    def explain(self, *args: Any) -> list[Taken]:
        """Lists how the gradients of each parameter would be computed, without computing anything.

        Args:
            *args: Arguments as for a call; `jax.ShapeDtypeStruct`s are enough.

        Returns:
            For each parameter its path, its route, the primitives that read it, the bytes that are kept for one example, `costs`: FLOPs,
            bytes and the cost of both for each exact way to its norm and sum for one unit, and which one `method` takes
            (`dpx.clipping.joint`), how many units are computed at once, and `beside_vmap`: the cost of what is taken divided by the
            cost of `method="vmap"`. It is at most 1, unless you chose `method="ghost"` or, in `dpx.weighted_grad`, `kept_bytes`.
        """
        leaves, tree = jax.tree.flatten(args)
        # Those without values, in which a loss can use shared arguments too, or whose place on a mesh does not matter here.
        are_shapes = [isinstance(leaf, jax.ShapeDtypeStruct) or groups.is_explicit(leaf) for leaf in leaves]
        found: list[Taken] = []

        def run(shapes: list[Any]) -> None:
            rest = iter(shapes)
            given = [next(rest) if is_shape else leaf for leaf, is_shape in zip(leaves, are_shapes, strict=True)]
            split = self._split(jax.tree.unflatten(tree, given))
            if batch_size(split.batch) == 0:
                unit = lambda leaf: jax.ShapeDtypeStruct((self.rows_per_unit, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
                split = split._replace(batch=jax.tree.map(unit, split.batch))
            found.extend(self._traced(split).routes_taken(self.method, self.kept_bytes, self.rows_per_unit, self.is_by_unit))

        pairs = zip(leaves, are_shapes, strict=True)
        jax.eval_shape(run, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf, is_shape in pairs if is_shape])
        return found

    def _refused(self, is_padding_B: Any) -> Any:
        """Returns which rows contribute nothing: padding, or all if a traced setting has a value that would be refused."""
        return is_padding_B

    def _weights(self, is_narrow: bool) -> Any:
        return self.weights

    def _traced(self, split: _Arguments) -> ByExample:
        check_untracked(split.params, split.batch)
        return ByExample.trace(split.loss, split.params, split.batch)

    def _split(self, args: tuple[Any, ...]) -> _Arguments:
        names = _names(self.loss, len(args))
        trained = _places("argnums", self.argnums, len(args))
        shared = _places("shared_argnums", self.shared_argnums, len(args))
        _check_once((*trained, *shared))
        batched = [place for place in range(len(args)) if place not in (*trained, *shared)]
        fix = "Give arrays whose first axis is the example; name the arguments that all examples share in shared_argnums"
        require(bool(batched), "the arguments", "contain no batched array", fix)
        for place in batched:
            require(bool(jax.tree.leaves(args[place])), names[place], "contains no array", fix)
        batch = {names[place]: args[place] for place in batched}
        batch_size(batch, "", fix)
        # A single tree keeps its own paths; a bare array has none, and is called by its argument's name.
        is_tree = isinstance(self.argnums, int) and not jax.tree_util.all_leaves([args[trained[0]]])
        params = args[trained[0]] if is_tree else {names[place]: args[place] for place in trained}

        def loss(params: Any, example: Any) -> Any:
            given = list(args)
            for place in trained:
                given[place] = params if is_tree else params[names[place]]
            for place in batched:
                given[place] = example[names[place]]
            return self._number(self.loss(*given))

        def given_back(total: Any) -> Any:
            each = [total if is_tree else total[names[place]] for place in trained]
            return each[0] if isinstance(self.argnums, int) else tuple(each)

        return _Arguments(loss, params, batch, given_back)

    def _number(self, returned: Any) -> Any:
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        described = f"a {type(returned).__name__} from the loss"
        if self.has_aux:
            require(is_pair, described, "is not a pair of a number and auxiliary output", "Return (loss, aux), or leave out has_aux")
            for path, leaf in jax.tree_util.tree_leaves_with_path(returned[1]):
                name = "/".join(filter(None, ("aux", path_name(path))))
                dtype = getattr(leaf, "dtype", None)
                is_array = dtype is not None or isinstance(leaf, (bool, int, float, complex))
                require(is_array, name, f"is a {type(leaf).__name__} and not an array", "Return arrays and numbers as auxiliary output")
                is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
                reason = f"is a random key, which cannot be added up over the {self.rows_per_unit} rows of a unit"
                require(not is_key or self.rows_per_unit == 1, name, reason, "Return jax.random.key_data(key), or leave it out")
            return returned
        is_tree = isinstance(returned, (tuple, list, dict))
        require(not is_tree, described, "is not one number", "Return a scalar, or (loss, aux) with has_aux=True")
        return returned, {}


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad(WeightedGrad):
    """The function that `dpx.clipped_grad` returns. Call it with the arguments of the loss, by position.

    The contribution of a unit to the sum has at most the norm `clipping_norm`, over all of `argnums` together and with rounding included
    (proof in `dpx.clipping.rounding`).
    """

    clipping_norm: Any = None
    is_by_unit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        norm = self.clipping_norm
        is_number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        dtype = getattr(norm, "dtype", None)
        is_scalar = dtype is not None and getattr(norm, "shape", None) == () and jnp.issubdtype(dtype, jnp.floating)
        require(is_number or is_scalar, f"clipping_norm={norm!r}", "is not one real number", "Give a number above zero")
        if not isinstance(norm, Tracer):
            is_in_range = SMALLEST_CLIPPING_NORM <= float(norm) <= LARGEST_CLIPPING_NORM
            reason = f"must be at least {SMALLEST_CLIPPING_NORM:g} and at most {LARGEST_CLIPPING_NORM:g}"
            require(is_in_range, f"clipping_norm={norm}", reason, "Scale the loss and the norm")

    def sensitivity(self, adjacency: str) -> Any:
        """Returns the largest change of `total` when one unit changes, in the Euclidean norm over all of `argnums` together.

        It holds for `total` alone; norms, losses and aux are not bounded. Do not multiply noise by it: `dpx.privacy` takes the standard
        deviation divided by the clipping norm, and the adjacency separately.

        Args:
            adjacency: "zero_out", "add_remove" or "replace_one".

        Returns:
            The clipping norm, or twice the clipping norm under "replace_one".

        Raises:
            ConfigError: For another adjacency.
        """
        require(adjacency in MOVES, f"adjacency={adjacency!r}", "no such neighbouring relation", f"Use {', '.join(MOVES)}")
        return MOVES[adjacency] * self.clipping_norm

    def _refused(self, is_padding_B: Any) -> Any:
        if not isinstance(self.clipping_norm, Tracer):
            return is_padding_B
        norm = at_least_float32(self.clipping_norm)
        return is_padding_B | ~((norm >= SMALLEST_CLIPPING_NORM) & (norm <= LARGEST_CLIPPING_NORM))

    def _weights(self, is_narrow: bool) -> Any:
        # In a narrow type the margin would round away.
        norm = at_least_float32(self.clipping_norm) if isinstance(self.clipping_norm, Tracer) else float(self.clipping_norm)
        return groups.flat(norm * (1 - MARGINS["bfloat16" if is_narrow else "float32"]))


def clipped_grad(
    loss: Any,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    clipping_norm: Any,
    shared_argnums: Any = (),
    rows_per_unit: Any = 1,
    method: Any = "book_keeping",
    kept_bytes: Any = None,
    strict: bool = False,
) -> ClippedGrad:
    """Transforms the loss of one example into the sum of the clipped gradients of all examples.

    Like `jax.grad` it takes a function and returns a function. The loss may be any JAX code. Where a parameter is multiplied or looked up,
    norms are computed without forming a gradient for each example (book-keeping, Bu et al. 2023, arXiv 2210.00038).

    Args:
        loss: A function of one example that returns one number, or (number, anything) with `has_aux`.
        argnums: Places of the arguments to differentiate by, as in `jax.grad`: an int or a tuple of ints.
        has_aux: Whether the loss returns a pair, whose second part is returned as `aux`.
        clipping_norm: The largest Euclidean norm of one unit's contribution, C: a float, or a traced float [].
        shared_argnums: Places of arguments that are the same for all examples, such as frozen parameters. They must not depend on
            protected data. All other arguments are batched, [B, ...], and the loss gets one row of them, without the first axis. Random
            keys are batched too: one for each example.
        rows_per_unit: R. Every R consecutive rows are one unit, and the norm of the sum of their gradients is clipped.
        method: "book_keeping", "ghost" (two backward passes) or "vmap" (one gradient for each example).
        kept_bytes: The most bytes of per-example gradients that are kept in memory to avoid computing them again; 72 MiB if not given.
            Where the other ways cost more than `method="vmap"`, fewer units are computed at once, so that their gradients fit; at least
            one unit is.
        strict: Whether to refuse a use of a parameter that needs a gradient for each example (`explain` lists them).

    Returns:
        A function of the same arguments, in the same order, and `is_padding`: it returns `ClippedGradients`.

    Raises:
        ConfigError: For invalid arguments; the returned function raises it when it is called or traced.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpx
        >>> loss = lambda w, x: jnp.dot(w, x)
        >>> x = jnp.array([[3.0, 4.0], [0.3, 0.4]])  # the rows are the gradients: norms 5 and 0.5
        >>> found = dpx.clipped_grad(loss, clipping_norm=1.0)(jnp.zeros(2), x)
        >>> [round(float(norm), 3) for norm in found.norms]
        [5.0, 0.5]
        >>> bool(jnp.allclose(found.total, x[0] / 5 + x[1], rtol=2e-3))
        True
    """
    options = {"shared_argnums": shared_argnums, "rows_per_unit": rows_per_unit, "method": method, "kept_bytes": kept_bytes}
    return ClippedGrad(loss, argnums, has_aux, None, strict=strict, clipping_norm=clipping_norm, **options)


def weighted_grad(
    loss: Any,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    weights: Any,
    shared_argnums: Any = (),
    rows_per_unit: Any = 1,
    method: Any = "book_keeping",
    kept_bytes: Any = None,
    strict: bool = False,
) -> WeightedGrad:
    """Transforms the loss of one example into a sum of gradients with your own weights, in place of the weights of a clipping norm.

    The sum is sum_b c_b grad_b with c = weights(norms). You must bound what one unit contributes, so the result has no `sensitivity`.

    Args:
        loss: As for `dpx.clipped_grad`, and so are all arguments that are not listed here.
        weights: A function of the norms, float32 [U], to factors of the same shape. It runs under jit. It may depend on all norms, so all
            units are computed at once.
        kept_bytes: The most bytes of per-example gradients that are kept in memory to avoid computing them again, even if the other ways
            cost more than `method="vmap"`. If not given, it is 72 MiB, or all gradients where the other ways cost more.

    Returns:
        A function of the same arguments, in the same order, and `is_padding`: it returns `ClippedGradients`.

    Raises:
        ConfigError: For invalid arguments; the returned function raises it when it is called or traced.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpx
        >>> halved = dpx.weighted_grad(lambda w, x: jnp.dot(w, x), weights=lambda norms: 0.5 * jnp.ones_like(norms))
        >>> [float(number) for number in halved(jnp.zeros(2), jnp.ones((4, 2))).total]
        [2.0, 2.0]
    """
    require(callable(weights), f"weights={weights!r}", "is not a function of norms", "Give a function of norms, or use dpx.clipped_grad")
    options = {"shared_argnums": shared_argnums, "rows_per_unit": rows_per_unit, "method": method, "kept_bytes": kept_bytes}
    return WeightedGrad(loss, argnums, has_aux, weights, strict=strict, **options)


def _places(name: str, value: Any, count: int | None = None) -> tuple[int, ...]:
    """Returns the positions that an argument names; with the `count` of all arguments counted from the first one."""
    places = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    are_whole = all(isinstance(place, int) and not isinstance(place, bool) for place in places)
    require(
        are_whole,
        f"{name}={value!r}",
        "is not the position of an argument, nor a tuple of positions",
        "Give a whole number, or a tuple of whole numbers",
    )
    if count is None:
        return places
    for place in places:
        require(
            -count <= place < count, f"{name}={place}", f"is not the position of one of the {count} arguments", "Give arguments by position"
        )
    return tuple(place % count for place in places)


def _check_once(places: tuple[int, ...]) -> None:
    is_once = len(set(places)) == len(places)
    require(is_once, f"argnums and shared_argnums {sorted(places)}", "name the same argument twice", "Name each argument once")


def _names(loss: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the loss's positional arguments, or "argument 2" where the loss does not name one."""
    try:
        given = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        given = ()
    names = [one.name for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return [names[place] if place < len(names) else f"argument {place}" for place in range(count)]
