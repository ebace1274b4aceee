"""Declares the devices that a run uses, and makes their jax mesh."""

import os
import sys
from typing import Any, Literal

from dpx.declaration import ConfigError, declaration, require


@declaration
class Mesh:
    """The devices of a run and how they share its work.

    A plan uses `flops_per_s` and `memory_bytes`; a run asks the device itself (`usable_bytes`).

    Attributes:
        name: Name of the mesh in plans and reports.
        platform: Kind of device: cpu, gpu, tpu, or any.
        data: Devices that share the examples.
        fsdp: Devices that share the examples and the stored parameters.
        tensor: Devices within a layer; the compiler decides how.
        simulated_devices: Devices into which one CPU is split, for tests; in each of several processes its share.
        processes: Processes that share the devices equally; auto is the number that the launcher started.
        deadline_s: Seconds without progress after which a process is ended; none sets no limit.
        restarts: Times that a job which lost a process is started again, at most.
        flops_per_s: Assumed rate of a well-tuned step on one device, for plans.
        float32_flops_per_s: The same for products of float32 numbers as the device computes them by default; none means `flops_per_s`.
        highest_flops_per_s: The same for products of float32 numbers at full precision; none means `float32_flops_per_s`.
        memory_bytes: Memory of one device, for plans.
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu", "any"] = "any"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    simulated_devices: int | None = None
    processes: int | Literal["auto"] = "auto"
    deadline_s: float | None = None
    restarts: int = 0
    flops_per_s: float
    float32_flops_per_s: float | None = None
    highest_flops_per_s: float | None = None
    memory_bytes: int

    def __post_init__(self) -> None:
        require(
            min(self.data, self.fsdp, self.tensor) >= 1,
            f"mesh={self.data}x{self.fsdp}x{self.tensor}",
            "every axis needs at least one device",
            "Use 1 or more",
        )
        require(
            self.deadline_s is None or self.deadline_s >= 5,
            f"mesh.deadline_s={self.deadline_s}",
            "a process tells its progress about once a second",
            "Use at least 5, and more than the longest step takes",
        )
        require(self.restarts >= 0, f"mesh.restarts={self.restarts}", "is a number of times", "Use 0 or more")
        require(
            self.simulated_devices is None or self.simulated_devices >= self.devices,
            f"mesh.simulated_devices={self.simulated_devices}",
            f"the mesh needs {self.devices}",
            f"Use at least {self.devices}",
        )

    def simulated_here(self, processes: int) -> int | None:
        """Returns the number of simulated devices of each of several processes."""
        return None if self.simulated_devices is None else self.simulated_devices // processes

    def rate(self, kind: Literal["bfloat16", "float32", "float32_highest"]) -> float:
        """Returns the assumed FLOP/s of products of one kind on one device (`dpx.cost.memory.by_type`)."""
        default = self.float32_flops_per_s or self.flops_per_s
        return {"bfloat16": self.flops_per_s, "float32": default, "float32_highest": self.highest_flops_per_s or default}[kind]

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def shards(self) -> int:
        """The number of devices that share one copy of parameters and moments: `fsdp` times `tensor`."""
        return self.fsdp * self.tensor

    def usable_bytes(self) -> int:
        """Returns the bytes of one device that this process may use: what the device reports, or `memory_bytes` if it reports nothing."""
        import jax

        # A CPU reports nothing; on a GPU it is the share of the memory that XLA_PYTHON_CLIENT_MEM_FRACTION leaves to jax.
        reported = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        return reported or self.memory_bytes

    def make(self):
        """Returns the `jax.sharding.Mesh` with automatic axis types; raises `ConfigError` if the machine has too few devices."""
        import jax
        import numpy as np

        devices = self._used(jax.devices(), jax.process_count())
        # jax.sharding.Mesh gives Auto axes; jax.make_mesh would give Explicit ones, under which a plain gather raises.
        return jax.sharding.Mesh(np.asarray(devices).reshape(self.data, self.fsdp, self.tensor), ("data", "fsdp", "tensor"))

    def _used(self, devices: list[Any], processes: int) -> list[Any]:
        """Returns the devices of the mesh in order: of each process as many, those of one process beside each other."""
        require(
            len(devices) >= self.devices,
            f"mesh={self.name}",
            f"needs {self.devices} devices, but this {'machine has' if processes == 1 else 'job has'} {len(devices)}",
            "Use mesh=single, or set mesh.simulated_devices on a CPU",
        )
        if processes == 1:
            return devices[: self.devices]
        each = self.devices // processes
        require(
            each * processes == self.devices and each % self.tensor == 0,
            f"mesh={self.name}",
            f"its {self.data}x{self.fsdp}x{self.tensor} devices cannot be shared equally by {processes} processes, layers undivided",
            f"Use a number of processes that divides {self.data * self.fsdp}",
        )
        of_process = [[one for one in devices if one.process_index == index][:each] for index in range(processes)]
        require(
            all(len(own) == each for own in of_process),
            f"mesh={self.name}",
            f"needs {each} devices in each of {processes} processes, but one has {min(map(len, of_process))}",
            "Use a mesh of as many devices as the processes have",
        )
        return [one for own in of_process for one in own]


THREADS_PER_DEVICE = 4


def simulate_devices(mesh: Mesh, devices: int | None) -> None:
    """Sets the number of devices that jax makes of one CPU, before jax looks for devices; `None` leaves the number unchanged.

    Raises `ConfigError` if jax has already looked for another number.
    """
    if devices is None:
        return
    # A simulated device may wait for others in several collectives at once, each on a thread. XLA makes one thread per device, so all can
    # be waiting while the operation that they wait for has none, and XLA ends the process after 40 seconds.
    os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flag in flags:
        return
    if "jax" in sys.modules:
        import jax

        try:
            jax.config.update("jax_num_cpu_devices", devices)
        except RuntimeError as error:
            # It has already looked for devices.
            reason = "this process already uses another number of devices"
            raise ConfigError(f"mesh={mesh.name}", reason, "Run each mesh in its own process") from error
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")
    kept = [other for other in flags if not other.startswith(flag.partition("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*kept, flag])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
