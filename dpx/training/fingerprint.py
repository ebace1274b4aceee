"""Lists what probably must be unchanged for a restarted run to repeat the same bits. A false alarm costs only a noise epoch.

It is an early warning. No list of versions is complete, so the checksum of each step's sum makes a replay safe
(`dpx.files.array_checksums`).

The code on which a sum, its noise and its draw depend has one checksum, over the modules that the training step imports. Comments,
docstrings and formatting do not enter it, nor do modules that no module of the closure imports, such as reports and the papers'
analyses. Imports are read from the source, inside functions too, so a module counts whether or not it was imported yet.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dpx
from dpx import packages
from dpx.statement import outside_code

# The step, the loop that runs it, what a loss is made of, how rows are read and drawn, the mechanisms, and the keys.
ROOTS = (
    "dpx.training.step",
    "dpx.training.loop",
    "dpx.training.features",
    "dpx.task.objective",
    "dpx.audit.canaries",
    "dpx.audit.canaries",
    "dpx.data.store",
    "dpx.sampler",
    "dpx.mechanism.declared_mechanism",
    "dpx.randomness",
)
_TOP = Path(dpx.__file__).parent.parent


def code_checksum(modules: Iterable[str] = (), top: Path = _TOP) -> str:
    """Returns the SHA-256 of the import closure of `ROOTS` and `modules`, which are names of modules in the folder `top`."""
    digest = hashlib.sha256()
    for name in sorted(closure((*ROOTS, *modules), top)):
        digest.update(f"{name} {module_at(_file(name, top), top).code}\n".encode())
    return digest.hexdigest()


def closure(roots: Iterable[str], top: Path = _TOP) -> frozenset[str]:
    """Returns the modules of dpx in `top` that `roots` import, directly or through others; a package counts as its `__init__`."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(module_at(_file(name, top), top).imports)
    return frozenset(found)


def _file(name: str, top: Path) -> Path:
    place = top.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


class Module(NamedTuple):
    """The modules of dpx that a file imports, and a checksum of the file's syntax tree without docstrings."""

    imports: tuple[str, ...]
    code: str


@functools.cache
def module_at(file: Path, top: Path) -> Module:
    """Returns the module in `file`; its imports are looked up in `top`."""
    tree = ast.parse(file.read_bytes())
    statements = [tree, *_statements(tree)]
    # The imported modules and what is imported from them; no module of dpx has a relative import.
    imported: set[str] = set()
    for one in statements:
        if isinstance(one, ast.Import):
            imported |= {alias.name for alias in one.names}
        elif isinstance(one, ast.ImportFrom):
            imported |= {f"{one.module}.{alias.name}" for alias in one.names}
    own = {name for name in imported if name.partition(".")[0] == dpx.__name__}
    # Importing a.b.c runs the `__init__` of a and of a.b too.
    names = {".".join(name.split(".")[: count + 1]) for name in own for count in range(name.count(".") + 1)}
    for node in statements:
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return Module(tuple(sorted(name for name in names if _file(name, top).is_file())), hashlib.sha256(ast.dump(tree).encode()).hexdigest())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements inside `node`, at any depth, and their handlers and cases: an import or a docstring is in no expression."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from _statements(inner)


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


def code_of_parts(declared: Any, job: Any = None) -> dict[str, Any]:
    """Returns the checksums of the code that takes part: of dpx, and of the packages of `declared` and of the `job` that runs it."""
    modules = _modules_of(declared)
    beside = {_top(name) for name in modules} - {dpx.__name__}
    return {
        "code": code_checksum(name for name in modules if _top(name) == dpx.__name__),
        "packages": {name: _package(name) for name in outside_code.joined(beside, outside_code.packages_of(declared, job))},
    }


def fingerprint(
    computation: dict[str, Any], code: dict[str, Any], data_checksum: str, microbatch: int, strategy: np.ndarray | None = None
) -> dict[str, Any]:
    """Returns, as JSON-ready values, the facts that must be unchanged to repeat the same bits.

    They are the declaration (`Experiment.computation`), the `code` (`code_of_parts`), data, versions, device kind, threads, microbatch and
    the mechanism's strategy. The mesh and the number of processes are not among them: draws and noise do not depend on them, and a sum that
    does is found by its checksum.
    """
    import jax

    # The number of simulated devices is the mesh's.
    flags = {name: [one for one in os.environ.get(name, "").split() if not one.startswith(_SIMULATED)] for name in _ENVIRONMENT}
    return {
        **computation,
        **code,
        "data": data_checksum,
        "environment": {name: " ".join(own) or None for name, own in flags.items()},
        "versions": versions(),
        "accelerator_libraries": accelerator_libraries(),
        "processor": processor(),
        "device": jax.devices()[0].device_kind,
        "driver": getattr(jax.devices()[0].client, "platform_version", None),
        "threads": threads(),
        "microbatch": microbatch,
        "strategy": None if strategy is None else hashlib.sha256(np.asarray(strategy).tobytes()).hexdigest(),
    }


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
