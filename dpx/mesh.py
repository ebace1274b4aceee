"""Declares the devices that a run uses, and makes their jax mesh."""

import os
import sys
from typing import Literal

from dpx.declaration import ConfigError, declaration, require


@declaration
class Mesh:
    """Has the axes `data` (examples), `fsdp` (examples; stored parameters are sharded) and `tensor` (within a layer, left to the
    compiler).

    `simulated_devices` splits one CPU into that many devices (for tests). `flops_per_s` and `memory_bytes` describe one device, for plans;
    `flops_per_s` is the assumed rate of a well-tuned step there. A run asks the device itself (`usable_bytes`).
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu", "any"] = "any"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    simulated_devices: int | None = None
    flops_per_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        require(
            min(self.data, self.fsdp, self.tensor) >= 1,
            f"mesh={self.data}x{self.fsdp}x{self.tensor}",
            "every axis needs at least one device",
            "Use 1 or more",
        )
        require(
            self.simulated_devices is None or self.simulated_devices >= self.devices,
            f"mesh.simulated_devices={self.simulated_devices}",
            f"the mesh needs {self.devices}",
            f"Use at least {self.devices}",
        )

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

        devices = jax.devices()
        require(
            len(devices) >= self.devices,
            f"mesh={self.name}",
            f"needs {self.devices} devices, but this machine has {len(devices)}",
            "Use mesh=single, or set mesh.simulated_devices on a CPU",
        )
        # jax.sharding.Mesh gives Auto axes; jax.make_mesh would give Explicit ones, under which a plain gather raises.
        return jax.sharding.Mesh(np.asarray(devices[: self.devices]).reshape(self.data, self.fsdp, self.tensor), ("data", "fsdp", "tensor"))


THREADS_PER_DEVICE = 4


def simulate_devices(mesh: Mesh, devices: int | None) -> None:
    """Sets the number of devices that jax makes of one CPU, before jax looks for devices; `None` leaves the number unchanged."""
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
        _tell_imported_jax(mesh, devices)
    kept = [other for other in flags if not other.startswith(flag.partition("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*kept, flag])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _tell_imported_jax(mesh: Mesh, devices: int) -> None:
    """Sets the number of devices in a jax that was already imported. Raises `ConfigError` if it has already looked for devices."""
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        reason = "this process already uses another number of devices"
        raise ConfigError(f"mesh={mesh.name}", reason, "Run each mesh in its own process") from error
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
