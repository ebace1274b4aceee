"""Sums of clipped gradients; this module, which needs no jax, declares the methods that compute them.

The choice of a method never changes the privacy statement.
"""

from typing import Literal

from dpx.declaration import declaration


@declaration
class ClippingMethod:
    """The method that computes clipped sums: `vmap`, `ghost`, `book_keeping` or `traced`; all give the same result.

    `traced` takes a model in any JAX code. `ghost` is for comparison with papers: it needs more FLOPs and memory than `book_keeping`.

    Attributes:
        name: The method; all give the same clipped sum.
    """

    name: Literal["vmap", "ghost", "book_keeping", "traced"]
