"""Computes low-rank carriers of a weight matrix, and the gradient of the matrix from their gradients (Yu et al. 2021, algorithms 1 and 2).

A kernel W [p, d] (y = x W) is written as W = A B + (W - A B) with A [p, r] and B [r, d] of orthonormal columns and rows, and A B + a
constant is what the loss is differentiated by. In the paper a matrix maps columns: its L is B transposed, and its R is A transposed.
Kernels are stacked: L layers, p inputs, d outputs of a dense map, r: rank.

In a model's tree carriers are the factors of an adapter with factor 1 (`dpx.models.lora`) whose frozen kernel is W - A B.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from dpx.declaration import require

LAYERS = "layers"
FACTORS = f"{LAYERS}/lora"


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a nested dict by their paths."""
    return flatten_dict(tree, sep="/")


def factor_path(kernel_path: str, factor: str) -> str:
    """Returns the path of the factor `a` or `b` of the kernel at `layers/<map>/kernel`."""
    return f"{FACTORS}/{kernel_path.split('/')[1]}/{factor}"


def decomposed(
    matrix_Lpd: Float[Array, "L p d"], key: Any, rank: int, iterations: int
) -> tuple[Float[Array, "L p r"], Float[Array, "L r d"]]:
    """Returns (A, B) that span the leading singular directions of `matrix_Lpd`, by the power method from a Gaussian start.

    The start is drawn with `key`, uint32 [2]. `iterations` is the number of rounds, at least 1. A zero matrix has no directions, so it gets
    the first axes.
    """
    layers, inputs, _ = matrix_Lpd.shape
    a_Lpr = jax.random.normal(jax.random.wrap_key_data(key, impl="threefry2x32"), (layers, inputs, rank))

    def once(a_Lpr: Array) -> tuple[Array, Array]:
        b_Ldr = _orthonormal(jnp.einsum("lpd,lpr->ldr", matrix_Lpd, a_Lpr, precision="highest"))
        return _orthonormal(jnp.einsum("lpd,ldr->lpr", matrix_Lpd, b_Ldr, precision="highest")), jnp.swapaxes(b_Ldr, 1, 2)

    for _ in range(iterations - 1):
        a_Lpr, _ = once(a_Lpr)
    return once(a_Lpr)


def _orthonormal(columns_Lpr: Array) -> Array:
    """Returns an orthonormal basis of the columns.

    Householder's method gives one even if the columns are linearly dependent.
    """
    return jnp.linalg.qr(columns_Lpr)[0]


def historical_update(kernel_Lpd: Array, start_Lpd: Array) -> Array:
    """Returns what training has added to each layer's kernel, or the kernel itself if nothing was added yet, as before the first step."""
    update_Lpd = kernel_Lpd - start_Lpd
    return jnp.where(jnp.any(update_Lpd != 0, axis=(1, 2), keepdims=True), update_Lpd, kernel_Lpd)


def split(params: Any, carriers: dict[str, tuple[Array, Array]]) -> tuple[Any, Any]:
    """Returns (trained, constants): `params` with every kernel of `carriers` (by path) replaced by its two factors, and their constants.

    The constants are the rest of each kernel, W - A B, and the factor 1 of an adapter. Raises `ConfigError` for parameters that have
    adapters.
    """
    trained, constants = leaves_by_path(params), {}
    has_adapters = any(path.startswith(f"{FACTORS}/") for path in trained)
    require(not has_adapters, "mechanism=rgp", "these parameters have adapters, whose places carriers take", "Merge them first")
    for path, (a_Lpr, b_Lrd) in carriers.items():
        kernel_Lpd = trained.pop(path)
        trained |= {factor_path(path, "a"): a_Lpr, factor_path(path, "b"): b_Lrd}
        constants[path] = kernel_Lpd - jnp.einsum("lpr,lrd->lpd", a_Lpr, b_Lrd, precision="highest")
        constants[factor_path(path, "scale")] = jnp.ones(len(kernel_Lpd))
    return unflatten_dict(trained, sep="/"), unflatten_dict(constants, sep="/")


def rebuilt(noisy: Any, trained: Any) -> Any:
    """Returns the gradient of each kernel from the gradients of its carriers, in a tree like the parameters.

    `noisy` is a tree like `trained`.

    With dA and dB these are A dB + dA B - A dB B^T B, the projection of the kernel's gradient on the directions of the carriers (Yu et
    al. 2021, theorem 3.1): dL R + L dR - L L^T dL R in the paper's letters. The authors' code adds the last term instead of subtracting it
    (`_assign_full_grad`, commit 73555c8), so that L L^T G R^T R of a gradient G counts three times instead of once. Both are functions of
    the noisy sums alone, so the privacy is the same; here it is subtracted.
    """
    gradients, values = leaves_by_path(noisy), leaves_by_path(trained)
    for name in (path.split("/")[2] for path in values if path.startswith(f"{FACTORS}/") and path.endswith("/a")):
        path = f"{LAYERS}/{name}/kernel"
        (a_Lpr, d_a), (b_Lrd, d_b) = ((values[factor_path(path, leaf)], gradients.pop(factor_path(path, leaf))) for leaf in "ab")
        gradients[path] = _product(a_Lpr, d_b - _product(_product(d_b, jnp.swapaxes(b_Lrd, 1, 2)), b_Lrd)) + _product(d_a, b_Lrd)
    return unflatten_dict(gradients, sep="/")


def norms_of_rebuilt(gradient: Any, trained: Any) -> dict[str, Array]:
    """Returns the norm of every gradient that was rebuilt, as metrics by path; stacked layers have one norm each."""
    clipped, norms = leaves_by_path(trained), {}
    for path, leaf in leaves_by_path(gradient).items():
        if path not in clipped:
            axes = tuple(range(1, leaf.ndim)) if path.startswith(f"{LAYERS}/") else None
            norms[f"carriers/rebuilt/{path}"] = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axes))
    return norms


def captured(matrix_Lpd: Array, a_Lpr: Array, b_Lrd: Array) -> Float[Array, " L"]:
    """Returns the share of a matrix's squared norm that its carriers span: |A^T W B^T|^2 / |W|^2."""
    core_Lrr = _product(_product(jnp.swapaxes(a_Lpr, 1, 2), matrix_Lpd), jnp.swapaxes(b_Lrd, 1, 2))
    return jnp.sum(jnp.square(core_Lrr), (1, 2)) / jnp.sum(jnp.square(matrix_Lpd), (1, 2))


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision="highest")
