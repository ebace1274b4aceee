"""The methods that compute clipped sums. The choice never changes the claim."""

from typing import Literal

from dpx.declaration import declaration


@declaration
class ClippingMethod:
    """`name`: `vmap`, `ghost`, `book_keeping` or `traced`: one interface, one result. `traced` takes a model in any JAX code. `ghost` is
    only for comparison with papers: it needs more products and memory than `book_keeping`."""

    name: Literal["vmap", "ghost", "book_keeping", "traced"]
