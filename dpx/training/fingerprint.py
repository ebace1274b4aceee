"""Lists what probably must be unchanged for a restarted run to repeat the same bits. A false alarm costs only a noise epoch.

It is an early warning. No list of versions is complete, so the checksum of each step's sum makes a replay safe (`dpx.training.checksum`).
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import dpx
from dpx import packages
from dpx.claim import outside_code
from dpx.declaration import identifying_values
from dpx.experiment import Experiment
from dpx.models.protocol import COMPUTATION
from dpx.training.code_checksum import code_checksum

# Reporting and evaluation do not reach the parameters; the rest of the declaration does.
_WITHOUT_EFFECT = ("schedule", "name", "tune", "profile")
# These settings change how bits are computed, never the privacy statement.
_COMPUTATION = ("mesh", "clipping_method", "microbatch", "length_buckets")

# Settings of jax, its compiler and the libraries below it that change results without being configured here.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_SIMULATED = "--xla_force_host_platform_device_count="
_ENVIRONMENT += ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TF_CUDNN_DETERMINISTIC")
# The number of threads decides the order in which numbers are added.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
# Name prefixes of the packages that contain compiled kernels of accelerators.
_ACCELERATOR_LIBRARIES = ("jax-cuda", "jax-rocm", "nvidia-", "libtpu")


def code_of(package: Path) -> str:
    """Returns a checksum of every source file of another package, whose code, and so the sum, may change while its version stays."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def claim_of(experiment: Experiment) -> dict[str, Any]:
    """Returns the declaration as plain data, without default values, reporting, and settings of how it is computed."""
    plain = identifying_values(experiment)
    plain["data"].pop("directory", None)
    for name in COMPUTATION:
        plain["model"].pop(name, None)
    # Two packages may have classes of one name.
    if outside := outside_code.parts(experiment):
        plain["outside_code"] = {part.key: part.kind for part in outside}
    return {key: value for key, value in plain.items() if key not in _WITHOUT_EFFECT + _COMPUTATION}


def claim_checksum(experiment: Experiment) -> str:
    """Returns the SHA-256 of `claim_of`, which must not change during a run."""
    return hashlib.sha256(json.dumps(claim_of(experiment), sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(
    experiment: Experiment, data_checksum: str, microbatch: int, strategy: np.ndarray | None = None, job: Any = None
) -> dict[str, Any]:
    """Returns, as JSON-ready values, the facts that must be unchanged to repeat the same bits.

    They are the declaration, data, code (that of the packages that take part, `job`'s included), versions, device kind, threads, microbatch
    and the mechanism's strategy. The mesh and the number of processes are not among them: draws and noise do not depend on them, and a sum
    that does is found by its checksum.
    """
    import jax

    modules = _modules_of(experiment)
    beside = {_top(name) for name in modules} - {dpx.__name__}
    return {
        "claim": claim_checksum(experiment),
        "data": data_checksum,
        "code": code_checksum(name for name in modules if _top(name) == dpx.__name__),
        "packages": {name: _package(name) for name in outside_code.joined(beside, outside_code.packages_of(experiment, job))},
        "environment": {name: _without_devices(os.environ.get(name)) for name in _ENVIRONMENT},
        "versions": versions(),
        "accelerator_libraries": accelerator_libraries(),
        "processor": processor(),
        "device": jax.devices()[0].device_kind,
        "driver": getattr(jax.devices()[0].client, "platform_version", None),
        "clipping_method": dataclasses.asdict(experiment)["clipping_method"],
        "model": {name: getattr(experiment.model, name) for name in COMPUTATION},
        "threads": threads(),
        "microbatch": microbatch,
        "widths": list(experiment.widths),
        "strategy": None if strategy is None else hashlib.sha256(np.asarray(strategy).tobytes()).hexdigest(),
    }


def _without_devices(value: str | None) -> str | None:
    """Returns the value of a variable without the number of simulated devices, which is the mesh's; `None` if nothing is left."""
    return " ".join(flag for flag in (value or "").split() if not flag.startswith(_SIMULATED)) or None


def versions() -> dict[str, str]:
    """Returns the versions of dpx and of the libraries that compute a step."""
    # A checkout that was never installed has no metadata.
    return {"dpx": dpx.__version__} | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def _modules_of(declared: Any) -> set[str]:
    """Returns the modules of dpx, and of packages of its distribution, in which the classes of `declared` and of its parts are defined."""
    if dataclasses.is_dataclass(declared) and not isinstance(declared, type):
        own = type(declared).__module__
        parts = [getattr(declared, field.name) for field in dataclasses.fields(declared)]
        return set().union({own} if packages.is_of_dpx(_top(own)) else (), *map(_modules_of, parts))
    if isinstance(declared, (list, tuple)):
        return set().union(*map(_modules_of, declared))
    return set()


def _top(module: str) -> str:
    return module.partition(".")[0]


def _package(name: str) -> dict[str, str | None]:
    """Returns the version and the source checksum of another package."""
    package = packages.named(name)
    folder = package.folder if package else None
    return {"version": packages.version_of(name), "code": code_of(folder) if folder else None}


def threads() -> dict[str, Any]:
    """Returns the cores that this process may use, and the environment's settings for threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores} | {name: os.environ.get(name) for name in _THREADS}


def processor() -> dict[str, str]:
    """Returns the CPU's model and a digest of its instruction set, on which compiled code depends."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return {"model": platform.processor(), "machine": platform.machine(), "instructions": "unknown"}
    known = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    instructions = " ".join(sorted((known.get("flags") or known.get("Features") or "").split()))
    digest = hashlib.sha256(instructions.encode()).hexdigest()[:16]
    return {"model": known.get("model name", "unknown"), "machine": platform.machine(), "instructions": digest}


@functools.cache
def accelerator_libraries() -> dict[str, str]:
    """Returns versions of the installed packages that hold an accelerator's kernels, read once, because loaded kernels stay loaded."""
    installed = {str(one.metadata["Name"]).lower(): one.version for one in importlib.metadata.distributions() if one.metadata["Name"]}
    return {name: version for name, version in sorted(installed.items()) if name.startswith(_ACCELERATOR_LIBRARIES)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the names of the fields that differ."""
    return [name for name in new if old.get(name) != new[name]]
