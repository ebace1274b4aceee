"""Counts the matrix-product FLOPs of a compiled program on one device: what the compiler kept of the traced ones, split over the mesh.

XLA's own count takes every loop once. Here a loop whose number of rounds the compiler knows is multiplied out (the layers of a model), one
whose number of rounds depends on data counts once (the microbatches of a chunk), and of a branch the most expensive side counts.

Counts the communication between devices in the text of a compiled program.
"""

import dataclasses
import math
import re

import numpy as np

_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\((.*)")
_ARRAY = re.compile(r"[a-z]+\d*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)")
_NAME = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(")
_LOOP = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_REACHED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")


# Which devices communicate: listed, or as pairs of sender and receiver; in rows of a shape that counts them (perhaps transposed); or along
# axes of a mesh.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")

_ALONG = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}:]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    It holds the kind as XLA names it, the elements of its results on one device, whether a loop runs it, and the groups of devices that
    communicate (all devices if none is named).
    """

    kind: str
    elements: int
    is_in_loop: bool
    groups: tuple[tuple[int, ...], ...] = ()


def collectives(text: str) -> list[Collective]:
    """Returns every collective instruction of `compiled.as_text()`; an instruction inside a loop's body is listed once and marked."""
    bodies = computations(text)
    looped = _reached_by_loops(text, bodies)
    return [
        Collective(kind, sum(math.prod(numbers(dims)) for dims in _ARRAY.findall(shapes)), name in looped, _groups(rest))
        for name, body in bodies.items()
        for shapes, kind, rest in _COLLECTIVE.findall(body)
    ]


def computations(text: str) -> dict[str, str]:
    """Returns the bodies of a compiled module's computations by name."""
    return {match.group(1): part for part in _COMPUTATION.split(text) if (match := _NAME.match(part))}


def _reached_by_loops(text: str, bodies: dict[str, str]) -> set[str]:
    """Returns every computation that a loop's body or condition calls, at any depth."""
    reached, waiting = set(), _LOOP.findall(text)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            waiting += _REACHED.findall(bodies[name])
    return reached


def _groups(instruction: str) -> tuple[tuple[int, ...], ...]:
    if listed := _LISTED.search(instruction):
        return tuple(tuple(numbers(group)) for group in re.findall(r"\{([\d,]*)\}", listed.group(1)))
    if counted := _COUNTED.search(instruction):
        shape, dims, order = (numbers(part or "") for part in counted.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return tuple(tuple(row) for row in (devices.transpose(order) if order else devices).reshape(shape).tolist())
    if along := _ALONG.search(instruction):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", along.group(1))}
        meeting = re.findall(r"'([^']*)'", along.group(2))
        devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        last = np.moveaxis(devices, [list(sizes).index(name) for name in meeting], range(-len(meeting), 0))
        return tuple(tuple(row) for row in last.reshape(-1, math.prod(sizes[name] for name in meeting)).tolist())
    return ()


def numbers(text: str) -> list[int]:
    """Returns the integers of a list as HLO writes it: sizes, axes, devices."""
    return [int(number) for number in text.split(",") if number]


_RESULT = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = [a-z]+\d*\w*\[([\d,]*)\]", re.MULTILINE)
_DOT = re.compile(r"= [a-z]+\d*\w*\[([\d,]*)\]\S* dot\(%?([\w.\-]+),.*?lhs_contracting_dims=\{([\d,]*)\}")
_WHILE = re.compile(r" while\(.*?body=%?([\w.\-]+).*")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BRANCHES = re.compile(r" conditional\(.*?branch_computations=\{([^}]*)\}")
_SIDES = re.compile(r" conditional\(.*?true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CALLED = re.compile(r" (?:fusion|call)\(.*?(?:calls|to_apply)=%?([\w.\-]+)")


def compiled_matmul_flops(text: str) -> int:
    """Returns the matrix-product FLOPs, on one device, of the program whose `compiled.as_text()` is `text`."""
    bodies = computations(text)
    entry = next(name for name, body in bodies.items() if body.startswith("ENTRY"))
    known: dict[str, int] = {}

    def flops_of(name: str) -> int:
        if name not in known:
            known[name] = _own(bodies[name]) + _called(bodies[name])
        return known[name]

    def _called(body: str) -> int:
        total = sum(flops_of(name) for name in _CALLED.findall(body))
        for loop in _WHILE.finditer(body):
            rounds = _ROUNDS.search(loop.group(0))
            total += flops_of(loop.group(1)) * (int(rounds.group(1)) if rounds else 1)
        branches = [re.findall(r"%?([\w.\-]+)", names) for names in _BRANCHES.findall(body)]
        return total + sum(max(flops_of(name) for name in sides) for sides in branches + [list(pair) for pair in _SIDES.findall(body)])

    return flops_of(entry)


def _own(body: str) -> int:
    """Returns the FLOPs of the matrix products in one computation."""
    shapes = {name: numbers(dims) for name, dims in _RESULT.findall(body)}
    return sum(
        2 * math.prod(numbers(result)) * math.prod(shapes[left][axis] for axis in numbers(contracted))
        for result, left, contracted in _DOT.findall(body)
    )
