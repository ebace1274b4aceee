"""What must be unchanged for a restarted run to repeat the same bits (design: replay or fork)."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import dpx
from dpx.experiment import Experiment

# Reporting and evaluation do not reach the parameters; the rest of the declaration does.
_WITHOUT_EFFECT = ("schedule", "name", "tune")
# These change how bits are computed, never what is claimed.
_COMPUTATION = ("mesh", "clipping", "microbatch")

# Settings of jax and its compiler that change results without being configured here.
_ENVIRONMENT = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUM_CPU_DEVICES")


def code_of(package: Path) -> str:
    """A checksum of a package's own source: in a checkout the version stays while the code, and so the sum, changes."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def claim_of(experiment: Experiment) -> dict[str, Any]:
    """The declaration as plain data, less reporting and the way it is computed."""
    plain = dataclasses.asdict(experiment)
    plain["data"].pop("directory")
    return {key: value for key, value in plain.items() if key not in _WITHOUT_EFFECT + _COMPUTATION}


def fingerprint(experiment: Experiment, data_checksum: str, microbatch: int) -> dict[str, Any]:
    """Declaration, data, code, versions, device kind, mesh, threads and microbatch, as JSON-ready values."""
    import jax

    packages = ("dpx", "jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
    plain = dataclasses.asdict(experiment)
    return {
        "claim": hashlib.sha256(json.dumps(claim_of(experiment), sort_keys=True, default=str).encode()).hexdigest(),
        "data": data_checksum,
        "code": code_of(Path(dpx.__file__).parent),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "mesh": {axis: plain["mesh"][axis] for axis in ("data", "fsdp", "tensor", "simulated_devices")},
        "clipping": plain["clipping"],
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "microbatch": microbatch,
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the fields that differ."""
    return [name for name in new if old.get(name) != new[name]]
