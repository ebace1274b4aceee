"""The record of a measured step, which `plan.json` holds where it was asked for (`plan.measure=true`).

The records of a compiled step, which `plan.json` holds where it was asked for (`plan.compile=true`).
"""

from dpx.files.records import described, record


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
