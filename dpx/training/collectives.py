"""What crosses devices, counted in the text of a compiled program."""

import dataclasses
import math
import re

_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"[a-z]+\d*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)")
_NAME = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(")
_LOOP = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_REACHED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: its kind as XLA names it, the elements of its results on one device, and whether a loop runs it."""

    kind: str
    elements: int
    is_in_loop: bool


def collectives(text: str) -> list[Collective]:
    """Every collective instruction of `compiled.as_text()`; one inside a loop's body stands once, marked."""
    bodies = _computations(text)
    looped = _reached_by_loops(text, bodies)
    return [
        Collective(kind, _elements(shapes), name in looped) for name, body in bodies.items() for shapes, kind in _COLLECTIVE.findall(body)
    ]


def _computations(text: str) -> dict[str, str]:
    """The bodies of a compiled module's computations by name."""
    return {match.group(1): part for part in _COMPUTATION.split(text) if (match := _NAME.match(part))}


def _reached_by_loops(text: str, bodies: dict[str, str]) -> set[str]:
    """Every computation that a loop's body or condition calls, however deep."""
    reached, waiting = set(), _LOOP.findall(text)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            waiting += _REACHED.findall(bodies[name])
    return reached


def _elements(shapes: str) -> int:
    return sum(math.prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(shapes))
