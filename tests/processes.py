"""The environment of a process that a test starts: this checkout, one device, programs compiled as quickly as those of the tests."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """Of this process, less the simulated devices, with `more`."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": path} | more
