"""Defines the ops of which a model is composed.

With bare parameters they are ordinary jax; with wrapped ones (probes.py) they make records.

Ops that read a table are in table_ops.py.

B: examples, T: tokens (all middle axes flattened), p: inputs, d: outputs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.op import Formed, Op
from dpx.clipping.probes import apply, check, session_of
from dpx.clipping.table_ops import add_rows as add_rows
from dpx.clipping.table_ops import decode as decode
from dpx.clipping.table_ops import is_in as is_in
from dpx.clipping.table_ops import lookup as lookup
from dpx.clipping.table_ops import small_lookup as small_lookup
from dpx.clipping.table_ops import tied_lookup as tied_lookup


@dataclasses.dataclass(frozen=True)
class Dense(Op):
    """The product x @ kernel (+ bias) in the type of x; the last `axes` axes of x are contracted with the first axes of the kernel."""

    norm_sees_all = True
    form: norms.Form = "gram"
    axes: int = 1
    name: str = "dense"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def matrix(self, kernel):
        """Returns the kernel as one matrix [p, d]: its first `axes` axes (inputs) flattened to p, the others (outputs) to d."""
        return kernel.reshape(math.prod(kernel.shape[: self.axes]), math.prod(kernel.shape[self.axes :]))

    def flat(self, x, axes):
        kept = x.shape[: x.ndim - axes]
        return x.reshape(*kept, math.prod(x.shape[len(kept) :]))

    def forward(self, leaves, inputs):
        (x,), kernel = inputs, leaves["kernel"]
        y = self.flat(x, self.axes) @ self.matrix(kernel).astype(x.dtype)
        y = y.reshape(*y.shape[:-1], *kernel.shape[self.axes :])
        return y + leaves["bias"].astype(x.dtype) if "bias" in leaves else y, x

    def input_cotangent(self, leaves, residuals, cotangent):
        x, kernel = residuals, leaves["kernel"]
        g = self.flat(cotangent, kernel.ndim - self.axes)
        a_BTp, g_BTd = self.tokens(self.flat(x, self.axes)), self.tokens(g)
        record = norms.recorded(self.form, a_BTp, g_BTd) if self.trains("kernel") else {}
        if "bias" in leaves and self.trains("bias"):
            record["sum"] = norms.at_least_float32(g_BTd).sum(1)
        return ((g @ self.matrix(kernel).astype(x.dtype).T).reshape(x.shape),), record

    def squared_norm(self, leaves, record):
        bias_B = norms.squares(record["sum"]) if "sum" in record else 0.0
        return (bounds.plus(norms.of_recorded(self.form, record), bias_B) if self.trains("kernel") else bias_B,)

    def weighted_sum(self, leaves, record, weights):
        shape = leaves["kernel"].shape
        shapes = {"kernel": shape, "bias": shape[self.axes :]}
        return {name: forms.summed(form, weights[0], shapes[name]) for name, form in self.gradients(leaves, record).items()}

    def gradients(self, shapes, record):
        by_leaf: dict[str, forms.Form] = {"bias": forms.Whole(record["sum"])} if "sum" in record else {}
        if not self.trains("kernel"):
            return by_leaf
        kernel = forms.Whole(record["kernel"]) if self.form == "kept" else forms.Outer(record["a"], record["g"])
        return by_leaf | {"kernel": kernel}


def dense(x: Array, kernel: Any, bias: Any = None) -> Array:
    """Returns x @ kernel + bias for x [B, ..., p].

    The form of the norm follows from the shapes and from the memory that the session may use.
    """
    shape = tuple(kernel.shape)
    check((kernel, bias), len(shape) == 2, f"kernel{shape}", "is not a matrix", "Give a kernel [p, d], or use dense_general")
    if session_of((kernel, bias)) is None:
        y = x @ kernel.astype(x.dtype)
        return y if bias is None else y + bias.astype(x.dtype)
    return dense_general(x, kernel, bias)


def dense_general(x: Array, kernel: Any, bias: Any = None, axes: int = 1) -> Array:
    """Contracts x [B, ..., *inputs] with a kernel [*inputs, *outputs], which has `axes` axes of inputs.

    Returns [B, ..., *outputs]; a bias has the shape of the outputs.
    """
    inputs = tuple(kernel.shape[:axes])
    shape, ends = tuple(kernel.shape), x.ndim > axes and x.shape[-axes:] == inputs
    reason = f"has no outputs, or no inputs, at axes={axes}"
    check(kernel, 0 < axes < len(shape), f"kernel{shape}", reason, "Give a kernel [*inputs, *outputs]")
    check(kernel, ends, f"x{x.shape}", f"does not end in a kernel's inputs {inputs}", "Give x [B, ..., *inputs]")
    if bias is not None:
        # Widened to a bias, an output has cotangents of another width than the kernel's.
        is_narrow = all(have in (1, wanted) for have, wanted in zip(bias.shape[::-1], shape[: axes - 1 : -1], strict=False))
        check(bias, is_narrow, f"bias{tuple(bias.shape)}", f"is wider than the outputs {shape[axes:]}", "Use the same shape")
    leaves = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    matrix = (math.prod(inputs), math.prod(shape[axes:]))
    return apply(Dense(form_of(x.shape[0], math.prod(x.shape[1:]) // matrix[0], kernel, matrix), axes), leaves, (x,))


def form_of(B: int, T: int, kernel: Any, matrix: tuple[int, int]) -> norms.Form:
    """Returns the norm form of `kernel`, a matrix [p, d], at B examples of T tokens.

    For a stacked kernel the form is that of all its layers.
    """
    session = session_of(kernel)
    return "gram" if session is None else session.form(kernel.path, B, T, matrix)


@dataclasses.dataclass(frozen=True)
class Normalise(Formed):
    """Normalises over the last axis, in float32 or wider; the result has the input's type.

    It is LayerNorm (`centred`) or RMSNorm, with or without a bias.
    """

    eps: float
    centred: bool = True
    # What is added to the scale, where the parameter is the scale less a constant.
    offset: float = 0.0
    name: str = "layer_norm"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    @property
    def is_recomputed(self):
        # Private steps of BERT are compared with autodiff, whose LayerNorm stays as autodiff makes it.
        return not self.centred

    def forward(self, leaves, inputs):
        x = norms.at_least_float32(inputs[0])
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        normalised = x * scale
        y = normalised * (leaves["scale"] + self.offset)
        return (y + leaves["bias"] if "bias" in leaves else y).astype(inputs[0].dtype), (normalised, scale)

    def input_cotangent(self, leaves, residuals, cotangent):
        normalised, scale = residuals
        g = norms.at_least_float32(cotangent)
        record = {"scale": self.tokens(g * normalised).sum(1)} | ({"bias": self.tokens(g).sum(1)} if "bias" in leaves else {})
        g_x = normalise_cotangent(g * (leaves["scale"] + self.offset), normalised, scale, self.centred).astype(cotangent.dtype)
        return (g_x,), self.trained(record)


def normalise_cotangent(g: Array, normalised: Array, scale: Array, centred: bool = True) -> Array:
    """Computes the cotangent of the input from the cotangent of the normalised value."""
    along = normalised * (g * normalised).mean(-1, keepdims=True)
    return scale * (g - g.mean(-1, keepdims=True) - along if centred else g - along)


@dataclasses.dataclass(frozen=True)
class LowRank(Formed):
    """The product x @ a @ b for a [p, r] and b [r, d] of a small rank.

    Per-example gradients of both factors are formed: p r and r d numbers.
    """

    name: str = "low_rank"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def forward(self, leaves, inputs):
        (x,) = inputs
        h = x @ leaves["a"].astype(x.dtype)
        return h @ leaves["b"].astype(x.dtype), (x, h)

    def input_cotangent(self, leaves, residuals, cotangent):
        x, h = residuals
        g_h = cotangent @ leaves["b"].astype(x.dtype).T
        factors = self.trained({"a": (x, g_h), "b": (h, cotangent)})
        record = {name: norms.per_example(*map(self.tokens, pair)) for name, pair in factors.items()}
        return (g_h @ leaves["a"].astype(x.dtype).T,), record


def low_rank(x: Array, a: Any, b: Any) -> Array:
    """Returns x @ a @ b for x [B, ..., p].

    Added to `dense`, it is an adapter of the kernel (LoRA: Hu et al. 2022). Either factor may be frozen.
    """
    shapes = tuple(a.shape), tuple(b.shape)
    fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][0] and x.shape[-1] == shapes[0][0]
    check((a, b), fits, f"factors{shapes}", f"are not [p, r] and [r, d] for x{x.shape}", "Give matrices whose inner sizes agree")
    return apply(LowRank(), {"a": a, "b": b}, (x,))


def layer_norm(x: Array, scale: Any, bias: Any, eps: float) -> Array:
    """Applies LayerNorm over the last axis; `bias` may be None (Ba et al. 2016)."""
    return apply(Normalise(eps), {"scale": scale} | ({} if bias is None else {"bias": bias}), (x,))


def rms_norm(x: Array, scale: Any, eps: float, offset: float = 0.0) -> Array:
    """Applies RMSNorm over the last axis, times `scale + offset` (Zhang and Sennrich 2019)."""
    return apply(Normalise(eps, centred=False, offset=offset, name="rms_norm"), {"scale": scale}, (x,))


@dataclasses.dataclass(frozen=True)
class AddBias(Formed):
    """Adds a bias over the last axis: x + bias."""

    name: str = "add_bias"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] + leaves["bias"].astype(inputs[0].dtype), ()

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent,), {"bias": norms.at_least_float32(self.tokens(cotangent)).sum(1)}


def add_bias(x: Array, bias: Any) -> Array:
    """Returns x + bias over the last axis."""
    _check_last(x, bias)
    return apply(AddBias(), {"bias": bias}, (x,))


def _check_last(x: Array, parameter: Any) -> None:
    have, reason = tuple(parameter.shape), f"does not have one number for each entry along the last axis of x{x.shape}"
    check(parameter, have == x.shape[-1:], f"parameter{have}", reason, "Use that shape")


@dataclasses.dataclass(frozen=True)
class Scale(Formed):
    """Multiplies the last axis by a parameter: x * scale."""

    name: str = "scale"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"].astype(inputs[0].dtype), inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        per_example = norms.at_least_float32(self.tokens(cotangent)) * norms.at_least_float32(self.tokens(residuals))
        return (cotangent * leaves["scale"].astype(cotangent.dtype),), {"scale": per_example.sum(1)}


def scale(x: Array, scale: Any) -> Array:
    """Returns x * scale over the last axis."""
    _check_last(x, scale)
    return apply(Scale(), {"scale": scale}, (x,))
