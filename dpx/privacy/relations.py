"""Decides under which other neighbouring relations charges may be accounted that were stated under one relation.

A run does the same whatever relation is declared: the relation only changes which other data its outputs are compared with. So steps that
ran under one relation have a bound under another if their proof does not use the first, and the table of events (`dpx.privacy.events`) has
a cell for the second.
"""

from typing import Any

from dpx.declaration import require
from dpx.privacy.events import RELATION
from dpx.privacy.segments import Segment, Segments, is_forward, rows_clipped_apart

# By kind of step and stated relation: the other relations under which it is also proved. Every draw of dpx depends on N and on positions in
# the data, never on contents. A unit that is blanked or replaced moves no other unit, and moves the sum by C or 2C, which the cells of the
# table of events know. So each of the two proofs uses the draw alone.
ALSO_UNDER: dict[tuple[str, str], tuple[str, ...]] = {}
for _kind in ("poisson", "truncated_poisson", "fixed_size", "cyclic_poisson", "shuffled", "deterministic", "balls_in_bins"):
    ALSO_UNDER[(_kind, "zero_out")] = ("zero_out_text", "replace_one")
    ALSO_UNDER[(_kind, "zero_out_text")] = ("zero_out", "replace_one")
    ALSO_UNDER[(_kind, "replace_one")] = ("zero_out", "zero_out_text")
# N was declared, so a blanked or replaced unit leaves q as it is.
ALSO_UNDER[("poisson", "add_remove")] = ("zero_out", "zero_out_text", "replace_one")
# A replaced unit may have more or fewer rows than the one before, and no event covers that.
ALSO_UNDER[("group", "add_remove")] = ("zero_out", "zero_out_text")
# Blanking a unit's text leaves as many rows as zeroing out the unit does, and moves the sum by no more.
ALSO_UNDER[("group", "zero_out")] = ("zero_out_text",)
ALSO_UNDER[("group", "zero_out_text")] = ("zero_out",)

_WHY_NOT = {
    "add_remove": "their sampling probability was computed from the counted number of units, and add_remove protects that number",
    "replace_one": "the replacement of a unit of several rows may have more or fewer rows",
}


_OF_KIND = {
    "package": "a package defines their event for that relation only",
    "slot_revealed": "each row's label and place are released beside its noisy vector",
}


def kind_of(segment: Segment) -> str:
    """Returns the kind of a charged step, which decides under which relations it is proved.

    It is the step's sampler, "group" if a unit can be in several clipped gradients, "slot_revealed" if its rows were released one by one,
    or "package" if a package defined its event.
    """
    if segment.event is not None:
        return "package"
    if is_forward(segment):
        return "slot_revealed"
    return "group" if rows_clipped_apart(segment) > 1 else segment.sampler


def require_relation(value: str, adjacency: str) -> None:
    """Raises `ConfigError` for an unknown relation; `value` is the text that the user wrote."""
    require(adjacency in RELATION, value, "is not a neighbouring relation", f"Use one of {', '.join(RELATION)}")


def require_proved(segments: Segments, stated: str, adjacency: str, source: Any, value: str = "") -> None:
    """Raises `ConfigError` if some of `segments`, which `source` states under `stated`, have no proof under `adjacency`; `value` is what
    the user wrote, `job.adjacency` unless given."""
    value = value or f"job.adjacency={adjacency}"
    if stated == adjacency:
        return
    for segment in segments:
        kind = kind_of(segment)
        why = _OF_KIND.get(kind) or _WHY_NOT.get(adjacency, "dpx knows no proof")
        require(
            adjacency in ALSO_UNDER.get((kind, stated), ()),
            value,
            f"{source} charges steps ({kind}) under {stated} that are not proved under {adjacency}: {why}",
            f"Use {value.partition('=')[0]}={stated}",
        )
