"""Requires that one process trains a run: several processes of one job would each draw separate noise for one sum, or clip the same rows
twice.

`dpx.mesh` distributes a run over the devices of one process. A run cannot be divided among several processes yet. So a job that trains
raises an error if it is one of several processes, which it detects from the variables that launchers set. All code that draws rows or noise
raises an error if jax runs in several processes.
"""

import os
import sys

from dpx.declaration import require, several

# Variables with the number of processes of one job, by launcher: jax's own convention, srun, mpirun of two kinds, torchrun.
_COUNTS = ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
# The machines of a slice of TPUs, each of which runs a process, as a list with commas.
_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_COORDINATOR = "JAX_COORDINATOR_ADDRESS"
_REASON = "each process of one job would draw its own noise for the same rows"
_FIX = "Start one process, such as srun --ntasks=1, and spread it over its devices with mesh=..."


def require_one_process() -> None:
    """Raises `ConfigError` if this is one of several processes of one job, as far as that is known before jax starts."""
    for name in _COUNTS:
        value = os.environ.get(name, "")
        require(not value.isdecimal() or int(value) < 2, f"{name}={value}", _REASON, _FIX)
    for name in _LISTS:
        places = os.environ.get(name, "").split(",")
        require(len(places) < 2, f"{name}={several(places)}", _REASON, _FIX)
    # Without a number of processes, the address of a coordinator still shows that there are other processes.
    address = os.environ.get(_COORDINATOR)
    require(not address or os.environ.get("JAX_NUM_PROCESSES") == "1", f"{_COORDINATOR}={address}", _REASON, _FIX)
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        require_one_jax_process()


def require_one_jax_process() -> None:
    """Raises `ConfigError` if jax runs in several processes; starts jax."""
    import jax

    require(jax.process_count() == 1, f"jax.process_count()={jax.process_count()}", _REASON, _FIX)
