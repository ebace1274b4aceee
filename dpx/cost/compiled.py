"""Counts the matrix-product FLOPs of a compiled program on one device: what the compiler kept of the traced ones, split over the mesh.

XLA's own count takes every loop once. Here a loop whose number of rounds the compiler knows is multiplied out (the layers of a model), one
whose number of rounds depends on data counts once (the microbatches of a chunk), and of a branch the most expensive side counts.
"""

import math
import re

from dpx.cost.collectives import computations, numbers

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
