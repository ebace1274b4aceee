"""How clipped sums are computed. The choice never changes the claim."""

from typing import Literal

from dpx.declaration import declaration


@declaration
class Clipping:
    """`method`: `vmap`, `ghost` or `book_keeping`: one interface, one result."""

    method: Literal["vmap", "ghost", "book_keeping"]
