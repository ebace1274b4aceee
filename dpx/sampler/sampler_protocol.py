"""Defines the interface of a sampler: a draw, and the kind of release that describes it correctly.

`name` is the kind of release (`dpx.privacy.events`), so that a ledger alone determines the cost of its steps. `assumed` names the sampler
whose epsilon a paper quotes: that value is reported as unsupported, and a target epsilon is met under it. A new sampler is a file with a
`draw` and its facts, a YAML that names its class, and a test; if no known release describes its draw, also a row of the table of events.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpx.declaration import require
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.processes.place import WHOLE, Part

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# `generator_for(step, shard)` for a draw at each step; for what is fixed for an epoch, `generator_for("pass", number)` for an order and
# `generator_for("allocation", number, block)` for places.
GeneratorFor = Callable[..., np.random.Generator]
Assumed = Literal["poisson", "random_allocation"] | None


def share(drawn: np.ndarray, part: Part) -> np.ndarray:
    """Returns an equal share of what all processes drew."""
    return drawn if part.count == 1 else np.array_split(drawn, part.count)[part.index]


class Sampler:
    """The base class of samplers, which decide which rows or units take part in a step.

    A sampler must define `draw` and `explanation`; one of a package also `ledger_fields` or `event`. N is the number of rows (or units)
    that it draws from, B the expected batch size, q = B/N.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def name(self) -> str: ...
        @property
        def assumed(self) -> Assumed: ...

    # Whether its draw is valid only for a constant batch size.
    needs_one_batch_size: ClassVar[bool] = False
    # Whether it counts steps, and epochs, from the first step of each stretch of equal batch sizes.
    restarts_with_batch_size: ClassVar[bool] = False
    # Whether its event depends on N, so that the claim needs the true N.
    depends_on_size: ClassVar[bool] = False
    # Whether its proof needs all other units to have the same numbers below N in both neighbours, in addition to what the table of events
    # requires for its kind of release: settings that would move them are then refused (`dpx.mechanism.declared_mechanism`).
    needs_fixed_numbers: ClassVar[bool] = False
    # Whether its bounds are proved for integer noise too.
    covers_integer_noise: ClassVar[bool] = True
    # Whether its bounds are proved for mechanisms of other packages too.
    covers_packages: ClassVar[bool] = True
    # Which units take part in a step, as text; `{drawn}` is replaced by the name of what is drawn.
    explanation: ClassVar[str]

    @property
    def steps_apart(self) -> int | None:
        """Returns the length, in steps, of the window in which a row is drawn at most once.

        It is `None` if a row may be drawn again in the next step.
        """
        return None

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        """Draws the batch of one step. Time and memory should be proportional to the batch, not to `size`.

        Args:
            size: N.
            sampling_probability: q.
            generator_for: `generator_for(step, purpose)` returns the NumPy generator of that step and purpose, from the run's secret.
            step: The number of the step, from 0.

        Returns:
            Distinct int64 indices below N, in any order.
        """
        raise NotImplementedError

    def draw_part(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part) -> np.ndarray:
        """Returns the share of one process in the draw of a step; the shares of all processes are the whole draw, each index once.

        By default every process draws everything and takes its share. A sampler whose draws of different rows are independent may draw
        its share alone.
        """
        return share(self.draw(size, sampling_probability, generator_for, step), part)

    def largest_batch(self, size: int) -> int:
        """Returns the largest expected batch size for N = `size`."""
        return size

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        """Raises `ConfigError` for declarations that the sampler's proof does not cover."""

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        """Returns the sampler's fields of a ledger entry (`dpx.privacy.segments.LedgerEntry`): which event of the table describes the draw.

        Args:
            size: N.
            batch: B.

        Returns:
            A dict of `sampler`, a kind that the table of events has (`dpx.privacy.events`), of `q`, and of its other parameters.
        """
        return {"sampler": self.name, "q": batch / size}

    def event(self, noisy: "DpEvent", size: int, batch: int, adjacency: str) -> "DpEvent | None":
        """Returns the dp-accounting event of one whole step, for a draw that the table of events does not have.

        Args:
            noisy: The event of a step in which every example takes part.
            size: N.
            batch: B.
            adjacency: The neighbouring relation.

        Returns:
            The event, or `None` if `ledger_fields` names a kind of the table. For a mechanism with its own event the table knows Poisson
            sampling alone (`dpx.claim.calibration`).
        """
        return None


def draw(
    sampler: Sampler,
    size: int,
    sampling_probability: float,
    generator_for: GeneratorFor,
    step: int = 0,
    part: Part = WHOLE,
    stretch: int = 0,
) -> np.ndarray:
    """Returns `sampler.draw`, or the `part` of it that one of several processes reads.

    `stretch` is the first step of the stretch of equal batch sizes that `step` is in. Raises `ConfigError` for a sampling probability
    outside 0..1.
    """
    require(
        0 <= sampling_probability <= 1,
        f"q={sampling_probability}",
        "a sampling probability must be between 0 and 1",
        "Use a batch size of at most N",
    )
    if sampler.restarts_with_batch_size and stretch:
        step, whole = step - stretch, generator_for
        generator_for = lambda *place: whole(*place, "from", stretch)  # noqa: E731
    if part.count > 1:
        return sampler.draw_part(size, sampling_probability, generator_for, step, part)
    return sampler.draw(size, sampling_probability, generator_for, step)
