"""Defines a sampler: a draw, and the kind of release that describes it correctly.

`name` is the kind of release (`dpx.privacy.events`), so that a ledger alone determines the cost of its steps. `assumed` names the sampler
whose epsilon a paper quotes: that value is reported as unsupported, and a target epsilon is met under it. A new sampler is a file with a
`draw` and its facts, a YAML that names its class, and a test; if no known release describes its draw, also a row of the table of events.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpx.declaration import require
from dpx.privacy.declarations import Accountant, Privacy

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# `generator_for(step, shard)` for a draw at each step, `generator_for("pass", number)` for an order that is fixed for an epoch.
GeneratorFor = Callable[..., np.random.Generator]
Assumed = Literal["poisson"] | None


class Sampler:
    """The base of every sampler, with the defaults that most samplers share. N is the number of rows (or units) from which it draws, B is
    the expected batch size, q = B/N."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def name(self) -> str: ...
        @property
        def assumed(self) -> Assumed: ...

    # Whether its draw is valid only for a constant batch size.
    needs_one_batch_size: ClassVar[bool] = False
    # Whether its event depends on N, so that the claim needs the true N.
    depends_on_size: ClassVar[bool] = False
    # Whether its proof needs all other units to have the same numbers below N in both neighbours, in addition to what the table of events
    # requires for its kind of release: settings that would move them are then refused (`dpx.mechanism.places`).
    needs_fixed_numbers: ClassVar[bool] = False
    # Whether its bounds are proved for integer noise too.
    covers_integer_noise: ClassVar[bool] = True
    # Which units take part in a step, as text; `{drawn}` is replaced by the name of what is drawn.
    explanation: ClassVar[str]

    @property
    def steps_apart(self) -> int | None:
        """Length in steps of the window in which a row is drawn at most once; `None` where it may be drawn again in the next step."""
        return None

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        """Distinct `int64` indices below `size`: one step's batch. Time and memory are proportional to the batch, not to `size`."""
        raise NotImplementedError

    def largest_batch(self, size: int) -> int:
        """The largest expected batch that N = `size` allows."""
        return size

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        """Raises `ConfigError` for declarations that the proof of its release does not cover."""

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        """The sampler's fields in a ledger entry (`dpx.privacy.ledger.LedgerEntry`), at N and B."""
        return {"sampler": self.name, "q": batch / size}

    def event(self, noisy: "DpEvent", size: int, batch: int, adjacency: str) -> "DpEvent | None":
        """The dp-accounting event of one whole step at N and B; `noisy` is the event of a step in which every example takes part.

        `None` if `ledger_fields` names a kind that the table of events knows. For a mechanism with its own event only Poisson sampling
        is known there (`dpx.claim.calibration`).
        """
        return None


def draw(sampler: Sampler, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int = 0) -> np.ndarray:
    """`sampler.draw`; raises `ConfigError` for a sampling probability outside 0..1."""
    require(
        0 <= sampling_probability <= 1,
        f"q={sampling_probability}",
        "a sampling probability lies in 0..1",
        "Use a batch size of at most N",
    )
    return sampler.draw(size, sampling_probability, generator_for, step)
