"""Defines the ops for products of a parameter in plain JAX: matrix products, and convolutions in any number of dimensions.

A view is the operations between a parameter and its reader: reshapes, transposes, casts and slices. All of them are linear, and a
gradient of the view has the same norm as the gradient of the parameter to which it is written back.

The kernel of a convolution is shared by all examples in the forward pass. The gradient of its numbers at one offset is a product of two
matrices: the input, shifted by the offset, and the output cotangent. So the norm is that of a product whose rows are patches of the input;
the patches themselves are held only where the Gram form costs less than the gradient.

B: examples, U: units of R rows, N: images in an example, E: batch axes of a product (experts, say), or groups of features, T: positions, p:
contracted, K: offsets (numbers of positions in a kernel), c: input features of a group, d: the parameter's other axes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.bounds import Bounded
from dpx.clipping.norms import rows
from dpx.clipping.op import Op, evaluated

# A part of a parameter: along each axis the first place, the number of places, and the step between them.
Box = tuple[tuple[int, int, int], ...]
VIEWS = (
    *(primitives.reshape_p, primitives.transpose_p, primitives.squeeze_p, primitives.convert_element_type_p, primitives.slice_p),
    primitives.rev_p,
)


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """The equations from a parameter to its reader, in order; the result has shape `shape` and type `dtype`.

    One of them may take a slice at a place that is computed (`dynamic_slice`).
    """

    steps: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any

    def then(self, eqn: Any) -> "View":
        """Returns the view after one more equation."""
        return View((*self.steps, eqn), eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)

    def parts(self, split: Any) -> list["View"]:
        """Returns the views after an equation that splits an axis."""
        axis, ends = split.params["axis"], np.cumsum(split.params["sizes"])
        found = []
        for size, end in zip(split.params["sizes"], ends, strict=True):
            cut = jax.make_jaxpr(partial(jax.lax.slice_in_dim, start_index=int(end - size), limit_index=int(end), axis=axis))
            eqns = cut(jax.ShapeDtypeStruct(self.shape, self.dtype)).jaxpr.eqns
            found.append(self.then(eqns[0]) if eqns else self)
        return found

    def of_round(self) -> "View":
        """Returns the view of one round of a loop along the first axis; the place of its slice is (round, 0, ...)."""

        def one(whole: Array, *starts: Array) -> Array:
            return jax.lax.squeeze(jax.lax.dynamic_slice(whole, starts, (1, *self.shape[1:])), (0,))

        starts, view = [jax.ShapeDtypeStruct((), jnp.int32)] * len(self.shape), self
        for eqn in jax.make_jaxpr(one)(jax.ShapeDtypeStruct(self.shape, self.dtype), *starts).jaxpr.eqns:
            # The others count negative places from the end.
            view = view.then(eqn) if eqn.primitive in (primitives.dynamic_slice_p, primitives.squeeze_p) else view
        return view

    def __call__(self, parameter: Array, with_casts: bool = True, starts: Sequence[Any] = ()) -> Array:
        for eqn in self.steps:
            if with_casts or eqn.primitive is not primitives.convert_element_type_p:
                given = (parameter, *starts) if eqn.primitive is primitives.dynamic_slice_p else (parameter,)
                (parameter,) = evaluated(eqn, given)
        return parameter

    @cached_property
    def _place(self) -> int:
        return next(place for place, eqn in enumerate(self.steps) if eqn.primitive is primitives.dynamic_slice_p)

    @property
    def before(self) -> "View":
        """Returns the view of which a slice at a computed place is taken."""
        sliced = self.steps[self._place].invars[0].aval
        return View(self.steps[: self._place], sliced.shape, sliced.dtype)

    @property
    def taken(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of the slice at a computed place."""
        out = self.steps[self._place].outvars[0].aval
        return jax.ShapeDtypeStruct(out.shape, out.dtype)

    @property
    def after(self) -> "View":
        """Returns the view of the slice at a computed place."""
        return View(self.steps[self._place + 1 :], self.shape, self.dtype)

    def back(self, gradient: Array, like: Any) -> Array:
        """Returns a gradient of the view as a gradient of the parameter `like`, float32 or wider."""
        promoted = jax.ShapeDtypeStruct(like.shape, gradient.dtype)
        return jax.linear_transpose(partial(self, with_casts=False), promoted)(gradient)[0]

    @property
    def is_cast(self) -> bool:
        """Returns whether the view is the parameter itself, perhaps in another type."""
        return all(eqn.primitive is primitives.convert_element_type_p for eqn in self.steps)

    @property
    def order(self) -> tuple[int, ...] | None:
        """Returns the parameter's axes in the order of the view's, without the squeezed axes.

        None if more than their order and extent changed.
        """
        return None if self._boxed is None else self._boxed[0]

    @property
    def box(self) -> Box | None:
        """Returns the part of the parameter that the view is, or None if it has no `order`."""
        return None if self._boxed is None else self._boxed[1]

    @property
    def is_whole(self) -> bool:
        """Returns whether a view that has a `box` holds all of the parameter."""
        return not any(eqn.primitive is primitives.slice_p for eqn in self.steps)

    @cached_property
    def _boxed(self) -> tuple[tuple[int, ...], Box] | None:
        kept = (primitives.transpose_p, primitives.convert_element_type_p, primitives.slice_p, primitives.squeeze_p)
        if any(eqn.primitive not in kept for eqn in self.steps):
            return None
        # A cast of a whole stack, of which a loop takes layers, has other axes than the view.
        changes = [eqn for eqn in self.steps if eqn.primitive is not primitives.convert_element_type_p]
        shape = changes[0].invars[0].aval.shape if changes else self.shape
        order, box = tuple(range(len(shape))), [(0, size, 1) for size in shape]
        for eqn in changes:
            if eqn.primitive is primitives.transpose_p:
                order = tuple(order[axis] for axis in eqn.params["permutation"])
            elif eqn.primitive is primitives.squeeze_p:
                order = tuple(axis for place, axis in enumerate(order) if place not in eqn.params["dimensions"])
            else:
                strides = eqn.params["strides"] or (1,) * len(order)
                for axis, first, size, stride in zip(order, eqn.params["start_indices"], eqn.outvars[0].aval.shape, strides, strict=True):
                    start, _, step = box[axis]
                    box[axis] = (start + first * step, size, stride * step)
        return order, tuple(box)

    @property
    def share(self) -> float:
        """Returns which part of the parameter's numbers slices leave, from 0 to 1."""
        slices = [eqn for eqn in self.steps if eqn.primitive in (primitives.slice_p, primitives.dynamic_slice_p)]
        return math.prod((eqn.outvars[0].aval.size / eqn.invars[0].aval.size for eqn in slices), start=1.0)


def _flat(x_UE: Array) -> Array:
    return x_UE.reshape(x_UE.shape[0] * x_UE.shape[1], *x_UE.shape[2:])


@dataclasses.dataclass(frozen=True)
class Product(Op):
    """A `dot_general` of an input and a view of `kernel`; `dimensions` are those of (input, kernel), `settings` its other options.

    With `is_apart` no other use reads only some of the view's numbers, so that the view counts as a separate parameter.
    """

    norm_sees_all = True
    view: View
    dimensions: Any
    is_first: bool
    settings: tuple[tuple[str, Any], ...]
    form: norms.Form = "gram"
    is_apart: bool = False
    name: str = "product"
    rows_per_unit: int = 1

    def one(self, x, kernel):
        """Computes the product for one example."""
        (x_c, k_c), (x_b, k_b) = self.dimensions
        if self.is_first:
            return jax.lax.dot_general(x, kernel, self.dimensions, **dict(self.settings))
        return jax.lax.dot_general(kernel, x, ((k_c, x_c), (k_b, x_b)), **dict(self.settings))

    @cached_property
    def axes(self):
        """Returns the axes (batch, contracted, free) of the kernel and of the input, and the output's axes in the order E, T, d."""
        (x_c, k_c), (x_b, k_b) = self.dimensions
        k_free = [axis for axis in range(len(self.view.shape)) if axis not in (*k_c, *k_b)]
        return tuple(map(tuple, (k_b, k_c, k_free, x_b, x_c)))

    def sizes(self):
        """Returns the numbers of elements (E, p, d) of the batch, contracted and free axes of the kernel."""
        k_b, k_c, k_free, *_ = self.axes
        return tuple(math.prod(self.view.shape[axis] for axis in axes) for axes in (k_b, k_c, k_free))

    def forward(self, leaves, inputs):
        (x_B,) = inputs
        kernel = self.view(leaves["kernel"])
        return jax.vmap(lambda x: self.one(x, kernel))(x_B), x_B

    def input_cotangent(self, leaves, residuals, cotangent):
        x_B, kernel = residuals, self.view(leaves["kernel"])
        back = jax.linear_transpose(lambda x: self.one(x, kernel), jax.ShapeDtypeStruct(x_B.shape[1:], x_B.dtype))
        a, g = self._factors(x_B, cotangent)
        E = self.sizes()[0]
        record = {name: x.reshape(x.shape[0] // E, E, *x.shape[1:]) for name, x in norms.recorded(self.form, a, g).items()}
        return (jax.vmap(lambda g: back(g)[0])(cotangent),), record

    def _factors(self, x_B, g_B):
        """Returns A [U*E, R*T, p] and G [U*E, R*T, d]."""
        *_, x_b, x_c = self.axes
        E, p, d = self.sizes()
        free = [axis for axis in range(x_B.ndim - 1) if axis not in (*x_b, *x_c)]
        B, R, T = x_B.shape[0], self.rows_per_unit, math.prod(x_B.shape[axis + 1] for axis in free)
        ordered_B = jnp.transpose(x_B, (0, *(axis + 1 for axis in (*x_b, *free, *x_c))))
        g_BETd = g_B if self.is_first else jnp.swapaxes(g_B.reshape(B, E, d, T), 2, 3)
        both = (ordered_B, p), (g_BETd, d)
        if R == 1:
            return tuple(x.reshape(B * E, T, size) for x, size in both)
        return tuple(jnp.moveaxis(x.reshape(B // R, R, E, T, size), 1, 2).reshape(B // R * E, R * T, size) for x, size in both)

    def squared_norm(self, leaves, record):
        square, (E, *_) = norms.of_recorded(self.form, jax.tree.map(_flat, record)), self.sizes()
        if E == 1:
            return (square,)
        by_batch_axis = jax.tree.map(lambda x: x.reshape(-1, E), square)
        return (bounds.together(by_batch_axis, 1),)

    def weighted_sum(self, leaves, record, weights):
        (w_U,), shape = weights, leaves["kernel"]
        if self.form == "kept":
            summed_Epd = jnp.tensordot(w_U, record["kernel"], 1, precision="highest")
        else:
            summed = lambda a, g: norms.summed(a, rows(w_U, g))  # noqa: E731
            summed_Epd = jax.vmap(summed, in_axes=1)(record["a"], record["g"])
        return {"kernel": self.placed(summed_Epd, shape)}

    def placed(self, gradient_Epd, like):
        """Returns a gradient of the view as one of the parameter `like`."""
        return self.view.back(self._of_view(gradient_Epd), like)

    def _of_view(self, gradient_Epd):
        """Returns the gradient with the axes of the view."""
        k_b, k_c, k_free, *_ = self.axes
        order = (*k_b, *k_c, *k_free)
        apart = gradient_Epd.reshape([self.view.shape[axis] for axis in order])
        return jnp.transpose(apart, tuple(np.argsort(order)))

    @property
    def is_matrix(self) -> bool:
        """Returns whether the parameter, with its axes in order, is the matrix [p, d] or [d, p] of the product."""
        return self.view.order is not None and self.sizes()[0] == 1 and self._places() is not None

    def _places(self):
        """Returns True if the contracted axes come first in the parameter, False if they come last, and None otherwise."""
        _, k_c, k_free, *_ = self.axes
        assert self.view.order is not None
        placed = [tuple(self.view.order[axis] for axis in axes) for axes in (k_c, k_free)]
        count = tuple(sorted(self.view.order))
        return True if placed[0] + placed[1] == count else False if placed[1] + placed[0] == count else None

    def box(self, leaf):
        return self.view.box if self.is_apart and not self.view.is_whole else None

    def gradients(self, shapes, record):
        flat = jax.tree.map(_flat, record)
        if self.is_matrix and self.form != "kept":
            a, g = flat["a"], flat["g"]
            return {"kernel": forms.Outer(a, g) if self._places() else forms.Outer(g, a)}
        kernel = flat["kernel"] if self.form == "kept" else norms.per_example(flat["a"], flat["g"])
        kernel_UEpd = kernel.reshape(-1, *self.sizes())
        return {"kernel": forms.Whole(jax.vmap(lambda one: self.placed(one, shapes["kernel"]))(kernel_UEpd))}


@dataclasses.dataclass(frozen=True)
class PartOfProduct(Product):
    """A product with a part of a parameter of which other readers, or other rounds of a loop, read other parts.

    The gradient of the parameter is formed from all of them (`forms.Part`). Inputs are x, and where a slice is taken at a computed place,
    its place along each axis; with `is_shared` that of all examples is one.
    """

    name: str = "part"
    is_shared: bool = True

    def forward(self, leaves, inputs):
        return self._multiplied(leaves["kernel"], *inputs), inputs

    def _multiplied(self, parameter, x_B, *starts):
        if self.is_shared:
            kernel = self.view(parameter, starts=[start_B[0] for start_B in starts])
            return jax.vmap(lambda x: self.one(x, kernel))(x_B)
        return jax.vmap(lambda x, *starts: self.one(x, self.view(parameter, starts=starts)))(x_B, *starts)

    def input_cotangent(self, leaves, residuals, cotangent):
        x_B, *starts = residuals
        back = jax.linear_transpose(
            lambda x_B: self._multiplied(leaves["kernel"], x_B, *starts), jax.ShapeDtypeStruct(x_B.shape, x_B.dtype)
        )
        E, R = self.sizes()[0], self.rows_per_unit
        factors = dataclasses.replace(self, rows_per_unit=1)._factors(x_B, cotangent)
        record = {name: x.reshape(-1, R, E, *x.shape[1:]) for name, x in zip(("a", "g"), factors, strict=True)}
        if starts:
            record["at"] = jnp.stack(starts, -1).astype(jnp.float32).reshape(-1, R, len(starts))
        return (*back(cotangent), *(None for _ in starts)), record

    def squared_norm(self, leaves, record):
        return (forms.squares([forms.Use(self._form(record))], leaves["kernel"].shape),)

    def weighted_sum(self, leaves, record, weights):
        return {"kernel": forms.summed(self._form(record), weights[0], leaves["kernel"].shape)}

    def gradients(self, shapes, record):
        return {"kernel": self._form(record)}

    def _form(self, record):
        return forms.Part(record["a"], record["g"], record.get("at"), self)

    def added(self, total, gradient_Epd, at):
        """Returns `total`, of which a slice is taken at a computed place, plus a gradient of the part at the place `at`."""
        part, at = self.view.after.back(self._of_view(gradient_Epd), self.view.taken), tuple(at.astype(jnp.int32))
        return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, at, part.shape) + part, at)


def are_separate(boxes: Sequence[Box | None]) -> bool:
    """Returns whether any two of these parts of a parameter are the same, or have no number in common."""

    def is_apart(one: Box, other: Box) -> bool:
        ranges = [[range(start, start + size * step, step) for start, size, step in box] for box in (one, other)]
        return any(not set(first) & set(second) for first, second in zip(*ranges, strict=True))

    known = list({box for box in boxes if box is not None})
    # A part of a stack and a part of the layer that a loop takes of it have different axes.
    if not known or None in boxes or len({len(box) for box in known}) > 1:
        return False
    return all(is_apart(*pair) for pair in itertools.combinations(known, 2))


@dataclasses.dataclass(frozen=True)
class Convolution(Op):
    """A `conv_general_dilated` of an input and a view of `kernel`; `settings` are its options."""

    norm_sees_all = True
    view: View
    settings: tuple[tuple[str, Any], ...]
    form: norms.Form = "kept"
    name: str = "convolution"
    rows_per_unit: int = 1

    def one(self, x, kernel):
        """Computes the convolution for one example."""
        return primitives.conv_general_dilated_p.bind(x, kernel, **dict(self.settings))

    @property
    def window(self) -> tuple[int, ...]:
        """Returns the numbers of positions of the kernel along each of its dimensions."""
        return tuple(self.view.shape[axis] for axis in self._setting("dimension_numbers").rhs_spec[2:])

    def sizes(self) -> tuple[int, int, int]:
        """Returns the number of groups E, the numbers in a patch K*c, and the output features d of a group."""
        out, into, *_ = self._setting("dimension_numbers").rhs_spec
        groups = self._setting("feature_group_count")
        return groups, math.prod(self.window) * self.view.shape[into], self.view.shape[out] // groups

    def _setting(self, name: str) -> Any:
        return dict(self.settings)[name]

    def forward(self, leaves, inputs):
        (x_B,), kernel = inputs, self.view(leaves["kernel"])
        return jax.vmap(lambda x: self.one(x, kernel))(x_B), x_B

    def input_cotangent(self, leaves, residuals, cotangent):
        x_B, kernel = residuals, self.view(leaves["kernel"])
        back = jax.linear_transpose(lambda x: self.one(x, kernel), jax.ShapeDtypeStruct(x_B.shape[1:], x_B.dtype))
        record = {"x": x_B, "g": cotangent}
        if self.form == "kept":
            record = {"kernel": self._formed(record)}
        elif self.form == "gram":
            g = self._by_group(self._last(cotangent, "out_spec"))
            a_KUETc = self._at_offsets(lambda a_UETc: a_UETc, x_B, cotangent.shape)
            record = {"a": jnp.moveaxis(a_KUETc, 0, -2).reshape(*g.shape[:-1], -1), "g": g}
        return (jax.vmap(lambda g: back(g)[0])(cotangent),), record

    def squared_norm(self, leaves, record):
        if self.form == "kept":
            return (norms.squares(record["kernel"]),)
        if self.form == "gram":
            square_UE = norms.gram(*(_flat(record[name]) for name in ("a", "g")))
            return (bounds.together(jax.tree.map(lambda x: x.reshape(-1, self.sizes()[0]), square_UE), 1),)
        kernel_UEKcd, g_UETd = self._formed(record), self._by_group(self._last(record["g"], "out_spec"))
        squares_KUET = self._at_offsets(lambda a_UETc: jnp.square(bounds.lengths(a_UETc)), record["x"], record["g"].shape)
        alpha_UET = jnp.sqrt(squares_KUET.sum(0))
        square_UE = norms.squares(_flat(kernel_UEKcd)).reshape(kernel_UEKcd.shape[:2])
        of_norm_UE = norms.of_formed_sum(record["x"], alpha_UET, g_UETd, bounds.lengths(g_UETd))
        return (bounds.together(Bounded(square_UE, jnp.zeros_like(square_UE), of_norm_UE), 1),)

    def weighted_sum(self, leaves, record, weights):
        (w_U,) = weights
        if self.form == "kept":
            summed = jnp.tensordot(w_U, record["kernel"], 1, precision="highest")
        else:
            g_UETd = record["g"] if self.form == "gram" else self._by_group(self._last(record["g"], "out_spec"))
            by_group = jax.vmap(lambda a_UTc, g_UTd: norms.summed(a_UTc, norms.rows(w_U, g_UTd)), in_axes=1)
            one = lambda a_UETc: by_group(a_UETc, g_UETd)  # noqa: E731
            summed = one(record["a"]) if self.form == "gram" else jnp.moveaxis(self._at_offsets(one, record["x"], record["g"].shape), 0, 1)
        return {"kernel": self._to_parameter(summed, leaves["kernel"])}

    def gradients(self, shapes, record):
        if self.form == "gram":
            kernel = norms.per_example(*(_flat(record[name]) for name in ("a", "g")))
            kernel = kernel.reshape(*record["g"].shape[:2], *kernel.shape[1:])
        else:
            kernel = record["kernel"] if self.form == "kept" else self._formed(record)
        return {"kernel": forms.Whole(jax.vmap(lambda one: self._to_parameter(one, shapes["kernel"]))(kernel))}

    def _formed(self, record: dict[str, Array]) -> Array:
        """Returns the gradient of each unit, [U, E, K, c, d]."""
        x_B, g_UETd = record["x"], self._by_group(self._last(record["g"], "out_spec"))
        one = lambda a_UETc: norms.product("uetc,uetd->uecd", a_UETc, g_UETd)  # noqa: E731
        # Zeros that are known only with the cotangent. XLA's CPU backend begins whatever it can, so it would hold padded inputs, and the
        # array for the gradients, from the forward pass on.
        first_U = g_UETd[:, 0, 0, 0] if g_UETd.size else jnp.zeros(g_UETd.shape[0])
        zero_U = (first_U > jnp.inf).astype(g_UETd.dtype)
        if any(any(edge) for edge in self._edges):
            x_B = x_B + jnp.repeat(zero_U, self.rows_per_unit).astype(x_B.dtype).reshape(-1, *(1,) * (x_B.ndim - 1))
        return self._at_offsets(one, x_B, record["g"].shape, axis=2, zero=zero_U)

    @property
    def _edges(self) -> list[tuple[int, int, int]]:
        """Returns the padding of each axis of an image: in front, behind, and between numbers."""
        between = [stretch - 1 for stretch in self._setting("lhs_dilation")]
        return [(low, high, inside) for (low, high), inside in zip(self._setting("padding"), between, strict=True)]

    def _at_offsets(self, use: Callable[[Array], Array], x_B: Array, outputs: tuple[int, ...], axis: int = 0, zero: Any = 0.0) -> Array:
        """Returns `use` of the inputs [U, E, R*T, c] that each offset reads at the output positions, with the offsets K along `axis`.

        `outputs` is the output's shape. Where the windows overlap, the offsets take turns, so that one shifted copy of the input is held
        at a time; `zero`, a number or [U], fills the array in which they put their results.
        """
        x_BNSC = self._last(x_B, "lhs_spec")
        x_BNSC = jax.lax.pad(x_BNSC, jnp.zeros((), x_B.dtype), [(0, 0, 0), (0, 0, 0), *self._edges, (0, 0, 0)])
        counts = [outputs[axis + 1] for axis in self._setting("dimension_numbers").out_spec[2:]]
        steps, (*ends, features) = self._setting("window_strides"), x_BNSC.shape
        spans = [(count - 1) * step + 1 for count, step in zip(counts, steps, strict=True)]
        starts = np.array(list(itertools.product(*map(range, self.window)))) * self._setting("rhs_dilation")

        def at(start: Array) -> Array:
            read = jax.lax.dynamic_slice(x_BNSC, (0, 0, *start, 0), (*ends[:2], *spans, features))
            return use(self._by_group(jax.lax.slice(read, [0] * read.ndim, read.shape, [1, 1, *steps, 1])))

        # Copies that do not overlap are together no larger than the input.
        is_small = len(starts) * math.prod(counts) <= math.prod(ends[2:])
        if is_small:
            return jnp.stack([at(jnp.asarray(start)) for start in starts], axis)

        def put(total: Array, turn: tuple[Array, Array]) -> tuple[Array, None]:
            return jax.lax.dynamic_update_index_in_dim(total, at(turn[1]), turn[0], axis), None

        # In place: stacked in front and moved, a gradient of each unit would be held twice.
        one = jax.eval_shape(at, starts[0])
        start = jnp.asarray(zero, one.dtype).reshape(-1, *(1,) * one.ndim)
        total = jnp.broadcast_to(start, (*one.shape[:axis], len(starts), *one.shape[axis:]))
        return jax.lax.scan(put, total, (jnp.arange(len(starts)), jnp.asarray(starts)))[0]

    def _last(self, x_B: Array, spec: str) -> Array:
        """Returns the array as [B, N, ..., features], whatever the order of its axes."""
        images, features, *places = getattr(self._setting("dimension_numbers"), spec)
        return jnp.transpose(x_B, (0, *(axis + 1 for axis in (images, *places, features))))

    def _by_group(self, x_BNSC: Array) -> Array:
        """Returns [B, N, ..., E*c] as [U, E, R*T, c]."""
        E, R, features = self.sizes()[0], self.rows_per_unit, x_BNSC.shape[-1]
        apart = x_BNSC.reshape(x_BNSC.shape[0] // R, R * math.prod(x_BNSC.shape[1:-1]), E, features // E)
        return jnp.moveaxis(apart, 2, 1)

    def _to_parameter(self, gradient: Array, like: Any) -> Array:
        """Returns a gradient [E, ..., d] of the view, whose middle axes hold K and c, as one of the parameter `like`."""
        E, p, d = self.sizes()
        window = self.window
        apart = gradient.reshape(E, *window, p // math.prod(window), d)
        out_first = jnp.moveaxis(apart, (-1, -2), (1, 2)).reshape(E * d, p // math.prod(window), *window)
        order = tuple(np.argsort(self._setting("dimension_numbers").rhs_spec))
        return self.view.back(jnp.transpose(out_first, order), like)
