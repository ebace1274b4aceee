"""Finds out which process of a job this is, from the variables that launchers set. Starts no jax.

Every process of a job is started by the same command line. A launcher tells each one its number, how many there are, and the address at
which process 0 listens: jax's own variables, Slurm, the hosts of a TPU slice, or an indexed Kubernetes Job. Open MPI, MPICH and torchrun
give numbers without an address, which `JAX_COORDINATOR_ADDRESS` then gives.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dpx.declaration import ConfigError, require

if TYPE_CHECKING:
    from dpx.processes.mesh import Mesh

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
# An address that begins so is a Unix socket, of processes on one machine.
UNIX = "unix:"
# (variable with the number of processes, variables with the number of this process), by launcher, in the order in which they are read.
_NUMBERED = (
    ("JAX_NUM_PROCESSES", ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")),
    ("SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",)),
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("PMI_SIZE", ("PMI_RANK",)),
    ("WORLD_SIZE", ("RANK",)),
)
# The hosts of a slice of TPUs, each of which runs a process, as a list with commas.
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_HOST_NUMBER = "TPU_WORKER_ID"
_TPU_PORT = 8476
# Slurm gives no port. Ports from here on are free on most systems; jobs on one machine should not share one.
_SLURM_PORTS = range(61_440, 65_536)
_FIX = "Set JAX_COORDINATOR_ADDRESS=<host of process 0>:<port>, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or start it with dpx-launch or srun"


class Part(NamedTuple):
    """The share of process `index` of `count` in a draw."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclasses.dataclass(frozen=True)
class Place:
    """Says that this is process `index` of `count`; process 0 listens at `coordinator`, `None` for one process alone."""

    index: int
    count: int
    coordinator: str | None

    @property
    def is_owner(self) -> bool:
        """Whether this process holds the ledger, the secret and everything else that is written."""
        return self.index == 0


ALONE = Place(0, 1, None)


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Returns the place of this process in its job, from `environment` (by default that of this process).

    Raises `ConfigError` if there are several processes, but not every one can know its number and where process 0 is.
    """
    variables = os.environ if environment is None else environment
    for counted, numbered in _NUMBERED:
        value = variables.get(counted, "")
        if value.isdecimal() and int(value) > 1:
            index = _index(variables, f"{counted}={value}", int(value), numbered)
            address = variables.get(COORDINATOR) or (_of_slurm(variables) if counted.startswith("SLURM") else None)
            require(address is not None, f"{counted}={value}", "the address of process 0 is not given", _FIX)
            return Place(index, int(value), address)
    for name in _HOSTS:
        hosts = [host for host in variables.get(name, "").split(",") if host]
        if len(hosts) > 1:
            index = _index(variables, f"{name}={hosts[0]},...", len(hosts), (_HOST_NUMBER,))
            return Place(index, len(hosts), variables.get(COORDINATOR) or f"{hosts[0].partition(':')[0]}:{_TPU_PORT}")
    address = variables.get(COORDINATOR)
    # Without a number of processes, the address of a coordinator still shows that there are other processes.
    require(
        not address or variables.get("JAX_NUM_PROCESSES") == "1",
        f"{COORDINATOR}={address}",
        "the number of processes of this job is not given",
        _FIX,
    )
    return ALONE


def _index(variables: Mapping[str, str], value: str, count: int, numbered: tuple[str, ...]) -> int:
    given = next((variables[name] for name in numbered if variables.get(name)), "")
    require(given.isdecimal() and int(given) < count, value, f"{' or '.join(numbered)} does not give a number below {count}", _FIX)
    return int(given)


def _of_slurm(variables: Mapping[str, str]) -> str | None:
    """Returns the address of the first host of a Slurm step, such as `node[003-007,9]`, with a port that follows from the job's number."""
    hosts, job = variables.get("SLURM_STEP_NODELIST", ""), variables.get("SLURM_JOB_ID", "0")
    name, bracket, rest = hosts.partition("[")
    first = name + rest.replace("-", ",").replace("]", ",").partition(",")[0] if bracket and "," not in name else hosts.partition(",")[0]
    if not first:
        return None
    number = int(job) if job.isdecimal() else 0
    return f"{first}:{_SLURM_PORTS[number % len(_SLURM_PORTS)]}"


def require_processes(mesh: "Mesh", count: int) -> None:
    """Raises `ConfigError` if `mesh` names another number of processes than this job has, or asks one process to be supervised."""
    if mesh.processes not in ("auto", count):
        raise ConfigError(
            f"mesh.processes={mesh.processes}",
            f"this job has {count} process{'es' if count > 1 else ''}",
            f"Start it with dpx-launch -n {mesh.processes}, srun or another launcher, or use mesh.processes=auto",
        )
    asked = f"mesh.deadline_s={mesh.deadline_s:g}" if mesh.deadline_s else f"mesh.restarts={mesh.restarts}"
    require(
        count > 1 or not (mesh.deadline_s or mesh.restarts),
        asked,
        "one process alone has no process beside it that could end it or start it again",
        "Remove it: the same command resumes the run; or start several processes",
    )
