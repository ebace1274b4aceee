"""`sampler=coins`: a coin for every unit. The release is that of Poisson sampling, so no separate event is needed."""

from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration
from dpx.sampler import Sampler
from dpx.sampler.sampler_protocol import GeneratorFor


@declaration
class Coins(Sampler):
    """Each unit independently with probability q_t, in time proportional to N rather than to the batch."""

    name: str = "coins"
    assumed: Literal["poisson"] | None = None
    explanation: ClassVar[str] = "a coin is tossed for each {drawn} at each step"

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return np.flatnonzero(generator_for(step, "coins").random(size) < sampling_probability).astype(np.int64)

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        return {"sampler": "poisson", "q": batch / size}
