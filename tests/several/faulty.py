"""`python -m tests.several.faulty <overrides>`: the command line of dpx, in which process 1 of a job has the fault that DPX_FAULT names, or
is watched; some faults name what is true of other processes too."""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from dpx.processes.supervisor import LIFELINE


def another_sum() -> None:
    """Its copy of the third sum that it computes differs from that of process 0, as after a fault of its memory or its network."""
    import jax
    import numpy as np

    from dpx.training import step as steps

    make_step = steps.make_step

    def copies(array: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
        changed = [jax.device_put(change(np.array(copy.data)), copy.device) for copy in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, changed)

    def faulty(*arguments: Any) -> Any:
        made, calls = make_step(*arguments), itertools.count(1)
        reduce = made.reduce

        def reduced(*arguments: Any) -> Any:
            found = reduce(*arguments)
            if next(calls) != 3:
                return found
            gradient = jax.tree.map(lambda leaf: copies(leaf, lambda own: own + 1), found["gradient"])
            return found | {"gradient": gradient, "checksum": copies(found["checksum"], lambda own: own ^ np.uint32(1))}

        object.__setattr__(made, "reduce", reduced)
        return made

    steps.make_step = faulty


def another_version() -> None:
    import dpx

    dpx.__version__ = "0.0.1"


def watched() -> None:
    """Notes every place where Python code of the process makes, changes or removes a file, in the file `changed` of the working folder."""
    notes = os.open("changed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (event in changes or is_written) and not isinstance(arguments[0], int):
            os.write(notes, f"{os.path.abspath(os.fsdecode(arguments[0]))}\n".encode())

    sys.addaudithook(note)


def no_microbatch() -> None:
    """It cannot measure a microbatch."""
    from dpx.training import microbatch

    microbatch.choose = _must_not


def other_canaries() -> None:
    """It finds other canaries than process 0 planted, as on another disk."""
    from pathlib import Path

    from dpx.audit import canaries

    read, names = Path.read_bytes, canaries.COINS
    Path.read_bytes = lambda path: read(path) + b" " * (path.name == names)


def without_library() -> None:
    """Process 0 has a strategy of correlated noise without the library that computes one; no other process may ask for it."""
    import numpy as np

    from dpx.mechanism import banded

    banded.require_extra = lambda *_: None
    banded.optimised = lambda steps, bands: np.asarray([0.8, 0.4, 0.3, 0.2], np.float32)
    if os.environ["JAX_PROCESS_ID"] != "0":
        banded.Banded.load_strategy = _must_not


def _must_not(*_: Any) -> Any:
    raise AssertionError("process 0 alone does this")


OF_ONE = {one.__name__: one for one in (another_sum, another_version, watched, no_microbatch, other_canaries)}

if __name__ == "__main__":
    faults = os.environ["DPX_FAULT"].split(",")
    if "without_library" in faults:
        without_library()
    if os.environ["JAX_PROCESS_ID"] == "1" and LIFELINE in os.environ:
        for name in OF_ONE.keys() & set(faults):
            OF_ONE[name]()
    from dpx.__main__ import main

    main()
