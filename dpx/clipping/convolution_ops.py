"""Defines the op for a convolution of an input with a parameter, in any number of dimensions.

The kernel is shared by all examples in the forward pass. The gradient of the kernel's numbers at one offset is a product of two matrices:
the input, shifted by the offset, and the output cotangent. So the norm is that of a product whose rows are patches of the input; the
patches themselves are held only where the Gram form costs less than the gradient.

B: examples, U: units of R rows, N: images in an example, E: groups of features, T: output positions in all images, K: offsets (numbers of
positions in the kernel), c: input features of a group, d: output features of a group.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.bounds import Bounded
from dpx.clipping.op import Op
from dpx.clipping.reader_ops import View


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
            return (self._over_groups(norms.gram(*(self._flat(record[name]) for name in ("a", "g")))),)
        kernel_UEKcd, g_UETd = self._formed(record), self._by_group(self._last(record["g"], "out_spec"))
        squares_KUET = self._at_offsets(lambda a_UETc: jnp.square(bounds.lengths(a_UETc)), record["x"], record["g"].shape)
        alpha_UET = jnp.sqrt(squares_KUET.sum(0))
        square_UE = norms.squares(self._flat(kernel_UEKcd)).reshape(kernel_UEKcd.shape[:2])
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
            kernel = norms.per_example(*(self._flat(record[name]) for name in ("a", "g")))
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

    def _flat(self, x_UE: Array) -> Array:
        return x_UE.reshape(x_UE.shape[0] * x_UE.shape[1], *x_UE.shape[2:])

    def _over_groups(self, square: Bounded) -> Array | Bounded:
        return bounds.together(jax.tree.map(lambda x: x.reshape(-1, self.sizes()[0]), square), 1)

    def _to_parameter(self, gradient: Array, like: Any) -> Array:
        """Returns a gradient [E, ..., d] of the view, whose middle axes hold K and c, as one of the parameter `like`."""
        E, p, d = self.sizes()
        window = self.window
        apart = gradient.reshape(E, *window, p // math.prod(window), d)
        out_first = jnp.moveaxis(apart, (-1, -2), (1, 2)).reshape(E * d, p // math.prod(window), *window)
        order = tuple(np.argsort(self._setting("dimension_numbers").rhs_spec))
        return self.view.back(jnp.transpose(out_first, order), like)
