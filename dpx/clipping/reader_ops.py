"""Defines ops for the uses of a parameter in plain JAX: a product with it, a lookup of its rows, or any other use.

A view is the operations between a parameter and its reader: reshapes, transposes, casts and slices. All of them are linear, and a
gradient of the view has the same norm as the gradient of the parameter to which it is written back.

B: examples, U: units, E: batch axes of a product (experts, say), T: positions, p: contracted, d: the parameter's other axes.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.norms import rows
from dpx.clipping.op import ByRow, Op
from dpx.clipping.probes import evaluated

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

    def _flat(self, record):
        return {name: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for name, x in record.items()}

    def squared_norm(self, leaves, record):
        square, (E, *_) = norms.of_recorded(self.form, self._flat(record)), self.sizes()
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
        return {"kernel": self._to_parameter(summed_Epd, shape)}

    def _to_parameter(self, gradient_Epd, like):
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
        flat = self._flat(record)
        if self.is_matrix and self.form != "kept":
            a, g = flat["a"], flat["g"]
            return {"kernel": forms.Outer(a, g) if self._places() else forms.Outer(g, a)}
        kernel = flat["kernel"] if self.form == "kept" else norms.per_example(flat["a"], flat["g"])
        kernel_UEpd = kernel.reshape(-1, *self.sizes())
        return {"kernel": forms.Whole(jax.vmap(lambda one: self._to_parameter(one, shapes["kernel"]))(kernel_UEpd))}


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

    def placed(self, gradient_Epd, like):
        """Returns a gradient of the part as one of the parameter `like`."""
        return self._to_parameter(gradient_Epd, like)

    def added(self, total, gradient_Epd, at):
        """Returns `total`, of which a slice is taken at a computed place, plus a gradient of the part at the place `at`."""
        part, at = self.view.after.back(self._of_view(gradient_Epd), self.view.taken), tuple(at.astype(jnp.int32))
        return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, at, part.shape) + part, at)


@dataclasses.dataclass(frozen=True)
class Gathered(ByRow):
    """A `gather` of whole rows of `table`, perhaps in another type; ids outside the table are handled by the gather's mode.

    With `is_kept` the record is each unit's gradient, `table` [U, V, d], which is smaller than many cotangents.
    """

    view: View
    settings: tuple[tuple[str, Any], ...]
    is_kept: bool = False
    name: str = "gathered"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (index_B,) = inputs
        table = self.view(leaves["table"])
        one = lambda index: primitives.gather_p.bind(table, index, **dict(self.settings))  # noqa: E731
        return jax.vmap(one)(index_B), index_B

    def input_cotangent(self, leaves, residuals, cotangent):
        V = self.view.shape[0]
        id_B, U = residuals[..., 0], residuals.shape[0] // self.rows_per_unit
        is_dropped = jnp.zeros(id_B.shape, bool)
        if dict(self.settings)["mode"] != jax.lax.GatherScatterMode.CLIP:
            is_dropped = (id_B < 0) | (id_B >= V)
        g = jnp.where(is_dropped[..., None], 0, self._rows_last(cotangent, id_B.ndim))
        id_UT = jnp.clip(id_B, 0, V - 1).reshape(U, -1)
        record = forms.Rows(id_UT.astype(jnp.float32), g.reshape(U, id_UT.shape[1], -1))
        return (None,), {"table": forms.formed(record, leaves["table"].shape)} if self.is_kept else record._asdict()

    def holds_gradients(self):
        return self.is_kept

    def squared_norm(self, leaves, record):
        return (norms.squares(record["table"]),) if self.is_kept else super().squared_norm(leaves, record)

    def gradients(self, shapes, record):
        return {"table": forms.Whole(record["table"])} if self.is_kept else super().gradients(shapes, record)

    def _rows_last(self, cotangent, ids):
        """Returns the cotangent as [B, *ids, d], whatever axes the gather gives to the row."""
        offset = tuple(axis + 1 for axis in dict(self.settings)["dimension_numbers"].offset_dims)
        rest = [axis for axis in range(cotangent.ndim) if axis not in offset]
        return jnp.transpose(cotangent, (*rest, *offset)).reshape(*(cotangent.shape[axis] for axis in rest), -1)

    def weighted_sum(self, leaves, record, weights):
        form = forms.Whole(record["table"]) if self.is_kept else forms.Rows(record["id"], record["g"])
        return {"table": forms.summed(form, weights[0], leaves["table"].shape)}


@dataclasses.dataclass(frozen=True)
class Copied(Op):
    """A copy of a view for each example; autodiff forms its gradient, whatever operation uses the copy.

    With `is_repeated` it is a small part of a parameter that a loop copies in each round.
    """

    norm_sees_all = True
    is_shared = True
    view: View
    is_repeated: bool = False
    name: str = "copied"
    rows_per_unit: int = 1

    def holds_gradients(self):
        return True

    def forward(self, leaves, inputs):
        (tick_B,), parameter = inputs, self.view(leaves["parameter"])
        return jnp.broadcast_to(parameter, (tick_B.shape[0], *parameter.shape)), tick_B

    def input_cotangent(self, leaves, residuals, cotangent):
        return (jnp.zeros_like(residuals),), self.over_rows(norms.at_least_float32(cotangent))

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        summed = jnp.tensordot(weights[0], record, 1, precision="highest")
        return {"parameter": self.view.back(summed, leaves["parameter"])}

    def gradients(self, shapes, record):
        if self.is_repeated:
            # Each number is the product of one and its cotangent.
            g = record.reshape(record.shape[0], 1, -1, 1, 1)
            return {"parameter": forms.Part(jnp.ones_like(g), g, None, self)}
        return {"parameter": forms.Whole(jax.vmap(lambda one: self.view.back(one, shapes["parameter"]))(record))}

    def placed(self, gradient_E11, like):
        """Returns a gradient of the view as one of the parameter `like`."""
        return self.view.back(gradient_E11.reshape(self.view.shape), like)


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


def is_lookup(eqn: Any, view: View) -> bool:
    """Returns whether a gather takes whole rows of a table by one id each.

    An index may have further entries only if they change nothing: those of axes that are taken whole, in the mode that clips.
    """
    numbers, shape, mode = eqn.params["dimension_numbers"], view.shape, eqn.params["mode"]
    whole_rows = eqn.params["slice_sizes"] == (1, *shape[1:]) and numbers.start_index_map[:1] == (0,)
    is_plain = not numbers.operand_batching_dims and numbers.collapsed_slice_dims in ((0,), ())
    is_one_id = numbers.start_index_map == (0,) or mode == jax.lax.GatherScatterMode.CLIP
    return view.is_cast and len(shape) == 2 and shape[0] < 2**24 and whole_rows and is_plain and is_one_id
