"""The records of a compiled step, which `plan.json` holds where it was asked for (`plan.compile=true`)."""

from dpx.records import described, record


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
