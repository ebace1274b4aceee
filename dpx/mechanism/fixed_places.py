"""Lists the declarations under which one unit can move others to other places.

Every proof that assumes fixed places is checked against this list.

An example has a *number* below N, by which samplers draw it, and in a step a *place*: device, microbatch and row there. A proof compares
two neighbours, in which all other units are the same. Some proofs need more: that the others have the same numbers (groups of rows that
take turns), or the same places (sums that are rounded microbatch by microbatch). Such a sampler or mechanism declares this by
`needs_fixed_numbers` or `needs_fixed_places`, also if it comes from another package, and `check` refuses it with any setting that moves
them. A mechanism that sums its own quantity (`summand`) is assumed to need fixed places unless its class says that it does not.

Whatever a unit holds (other text, no text, a gradient that is not finite, fewer rows), it does not move another unit:

- Numbers. Under `zero_out` and `replace_one` N is public, and so is how many rows a unit has where rows are drawn singly: neighbours have
  as many. Which rows of a unit are kept follows from that unit alone (`dpx.data.prepare`).
- Draws. A sampler sees N, q, the step and keys, so it draws the same numbers; which of them a cap leaves out is drawn likewise.
- Places. Chunks and microbatches are cut by position in the draw. An example without text, one whose gradient is dropped as not finite, a
  unit with fewer rows and a canary that is out all occupy their places; so does the unit of a `zero_out` neighbour, which contributes
  zero there. `microbatch=auto` is decided on synthetic rows.

Bounds on exact sums need none of this: the order of real numbers does not change their sum. Those are the Gaussian mechanisms', whose
sums are stated to be rounded (`Mechanism.floating_point`), counts of `clip=quantile` and clamped values of `telemetry=released`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dpx.declaration import require
from dpx.mechanism.mechanism_protocol import Declared, Mechanism


class Mover(NamedTuple):
    """A declared `value` under which one unit moves others to other places and, if `moves_numbers`, to other numbers."""

    value: str
    moves_numbers: bool
    reason: str
    fix: str


def movers(adjacency: str, widths: Sequence[int]) -> list[Mover]:
    """Returns all declarations that move other units when one unit changes; `widths` are the lengths that texts are padded to."""
    found = []
    if adjacency == "add_remove":
        reason = "one more unit gives other units another number, and so another step or microbatch"
        found.append(Mover("privacy.adjacency=add_remove", True, reason, "Use privacy.adjacency=zero_out"))
    if len(widths) > 1:
        reason = "the length of one text can move other texts to another microbatch"
        found.append(Mover(f"length_buckets=[{', '.join(map(str, widths))}]", False, reason, "Use length_buckets=null"))
    return found


def needs_fixed_places(mechanism: Mechanism) -> bool:
    """Returns whether the proof of `mechanism` is assumed to need all other examples in their places."""
    kinds = type(mechanism).__mro__
    adds, says = (next(kind for kind in kinds if name in vars(kind)) for name in ("summand", "needs_fixed_places"))
    return mechanism.needs_fixed_places or (adds is not Mechanism and says is Mechanism)


def check(mechanism: Mechanism, declared: Declared) -> None:
    """Raises `ConfigError` if a declaration moves units and the proof of `mechanism`, or of `declared`'s sampler, needs fixed places."""
    sampler = declared.sampler
    for mover in movers(declared.privacy.adjacency, declared.widths):
        for name, needs_staying in (
            (f"mechanism={mechanism.name}", needs_fixed_places(mechanism)),
            (f"sampler={sampler.name}", sampler.needs_fixed_numbers and mover.moves_numbers),
        ):
            require(not needs_staying, f"{name}, {mover.value}", f"{mover.reason}, and the proof needs them to stay", mover.fix)
