"""Who takes part in a step: indices on the host, and what an accountant may assume of them."""

from typing import Literal

from dpx.declaration import declaration


@declaration
class Poisson:
    """Each unit independently with probability q_t."""

    name: Literal["poisson"] = "poisson"


Sampler = Poisson
