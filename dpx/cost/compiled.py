"""Counts what a compiled program does on one device: its matrix-product FLOPs, and the communication between devices in its text.

The FLOPs are what the compiler kept of the traced ones, split over the mesh. XLA's own count takes every loop once. Here a loop whose
number of rounds the compiler knows is multiplied out (the layers of a model), one whose number of rounds depends on data counts once (the
microbatches of a chunk), and of a branch the most expensive side counts.

`plan.json` holds the records of a compiled step (`plan.compile=true`) and of a measured one (`plan.measure=true`).
"""

import dataclasses
import math
import re

import numpy as np

from dpx.files.records import described, record

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
    # All computations that a loop's body or condition calls, at any depth.
    looped, waiting = set(), _LOOP.findall(text)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in looped:
            looped.add(name)
            waiting += _REACHED.findall(bodies[name])
    return [
        Collective(kind, sum(math.prod(numbers(dims)) for dims in _ARRAY.findall(shapes)), name in looped, _groups(rest))
        for name, body in bodies.items()
        for shapes, kind, rest in _COLLECTIVE.findall(body)
    ]


def computations(text: str) -> dict[str, str]:
    """Returns the bodies of a compiled module's computations by name."""
    return {match.group(1): part for part in _COMPUTATION.split(text) if (match := _NAME.match(part))}


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
        if name in known:
            return known[name]
        body = bodies[name]
        shapes = {name: numbers(dims) for name, dims in _RESULT.findall(body)}
        total = sum(
            2 * math.prod(numbers(result)) * math.prod(shapes[left][axis] for axis in numbers(contracted))
            for result, left, contracted in _DOT.findall(body)
        )
        total += sum(flops_of(called) for called in _CALLED.findall(body))
        for loop in _WHILE.finditer(body):
            rounds = _ROUNDS.search(loop.group(0))
            total += flops_of(loop.group(1)) * (int(rounds.group(1)) if rounds else 1)
        branches = [re.findall(r"%?([\w.\-]+)", names) for names in _BRANCHES.findall(body)]
        total += sum(max(flops_of(side) for side in sides) for sides in branches + [list(pair) for pair in _SIDES.findall(body)])
        known[name] = total
        return total

    return flops_of(entry)


@record
class MeasuredRun:
    """The time of a run on the machine that made the plan, from some of its steps. It has read no protected text."""

    device: str = described("Kind of the devices that ran the steps.")
    devices: int = described("Number of the devices.")
    rows: str = described("Where the rows of the steps come from: public, or synthetic (most of them full).")
    microbatch: int = described("Rows or units that were computed at once.")
    batch_size: int = described("Expected rows or units of a measured step; a step of another size takes time in proportion.")
    steps: int = described("How many steps were timed, after one that compiles.")
    step_s: float = described("Seconds of a step, padding included: the median.")
    compile_s: float = described("Seconds to compile the step and the evaluation.")
    evaluations: int = described("How often the run evaluates.")
    evaluation_s: float = described("Seconds of one evaluation.")
    read_once_s: float = described("Seconds to read every text once before the first step; 0 where the run does not do so.")
    saves: int = described("How often the run saves a checkpoint.")
    save_s: float = described("Seconds to save a checkpoint.")
    run_s: float = described("Seconds of the whole run: its sum. Preparing the data and solving for the noise are not in it.")


@record
class Crossing:
    """Equal collective operations of a program."""

    kind: str = described("Kind of the operation, as XLA names it.")
    devices: int = described("Number of devices of a group that meets; 0 where the program names no groups.")
    axes: tuple[str, ...] = described("Axes of the mesh along which they meet: data and fsdp hold examples, tensor is within a layer.")
    in_loop: bool = described("Whether a loop runs them.")
    number: int = described("How many there are.")
    elements: int = described("Numbers in their results on one device.")


@record
class CompiledStep:
    """The compiled programs of a logical batch, on each device of the declared mesh."""

    mesh: dict[str, int] = described("Number of devices along each axis of the mesh.")
    compiled_for: str = described("Kind of the devices that the programs were compiled for.")
    microbatch: int = described("Rows or units that are computed at once.")
    peak_bytes_per_device: int = described("The most bytes that are live on a device while a program runs.")
    programs: dict[str, dict[str, int]] = described("Bytes of each program: arguments, results, temporaries, and what waits meanwhile.")
    collectives: dict[str, tuple[Crossing, ...]] = described("Collective operations of each program.")
    flops_per_device_and_microbatch: int = described("Floating-point operations of matrix products, of one microbatch on one device.")
