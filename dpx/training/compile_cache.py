"""Lets jax keep compiled programs on disk, so that points of a sweep that share shapes, and a run that is resumed, compile once.

The folder is `$DPX_CACHE/compiled` or `~/.cache/dpx/compiled`, and losing it costs seconds. A program is found by all that decides on it:
its operations, the versions of jax and XLA, its flags and the device. The same program has the same bits, whether compiled or read.
"""

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

from dpx.durable import make_folder, make_private
from dpx.privacy.cache import folder
from dpx.processes import team

_OF_THE_USER = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


def keep_compiled_programs() -> None:
    """Keeps programs that take more than a second to compile (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`) from now on.

    A setting of the user wins. Nothing is kept by several processes of one job, or if the folder cannot be made.
    """
    # Its attributes are made when jax is imported.
    config: Any = jax.config
    if config.jax_compilation_cache_dir or any(name in os.environ for name in _OF_THE_USER) or not team().is_alone:
        return
    # What is read is run, so no other account may write it.
    with contextlib.suppress(OSError):
        make_private(folder() / "compiled")
        own = folder() / "compiled" / _processor()
        make_folder(own)
        config.update("jax_compilation_cache_dir", str(own))


def _processor() -> str:
    """Returns a name of the processor's model and features: a program for another one may use instructions that this one lacks."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()}-{hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()}"
