"""Reads starting parameters from disk to the host, and checks them against the model's shapes and their stored checksums.

Released weights include a checksum of each parameter and the names of the trained parameters (`facts`). So a damaged copy is detected, and
so is a file that presents another run's weights as public ones. In such a file, a parameter that was changed by one bit is not detected.
"""

import contextlib
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import ConfigError, require
from dpx.files.file_checksums import seal

# Prefix of the name of a damaged checkpoint that training moved aside.
DAMAGED = "damaged-"

# Orbax stores a caller's additions to a checkpoint under this name, as JSON; read here without jax.
METADATA = "_CHECKPOINT_METADATA"
SEAL = "seal"

Shapes = Mapping[str, tuple[int, ...]]
Leaves = dict[str, np.ndarray]
PARAMS = "params"
# Under `private/`: the frozen parameters of a run, with their checksums.
FROZEN = "resting"
# Parts of a model that have the same parameters whatever it predicts; every other part is a head.
_BODY = ("embeddings", "layers", "final_norm")


def by_path(tree: Any, path: str = "") -> Leaves:
    """Returns the leaves of nested dicts, on the host, by path."""
    if isinstance(tree, Mapping):
        return {name: leaf for key, part in tree.items() for name, leaf in by_path(part, f"{path}/{key}".lstrip("/")).items()}
    return {path: np.asarray(tree)}


def nested(leaves: Leaves) -> dict[str, Any]:
    """Returns nested dicts with each leaf at its path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = leaf
    return tree


def checksums(leaves: Leaves) -> dict[str, str]:
    """Returns a checksum of the values of each leaf."""
    return {path: hashlib.sha256(np.ascontiguousarray(leaf).data).hexdigest() for path, leaf in sorted(leaves.items())}


def checksum(leaves: Leaves) -> str:
    """Returns one checksum of all leaves and their paths."""
    return "sha256:" + hashlib.sha256(json.dumps(checksums(leaves), sort_keys=True).encode()).hexdigest()


def facts(params: Any, trained: Iterable[str]) -> dict[str, Any]:
    """Returns the checksums stored with released weights, and the paths of the `trained` leaves.

    A constant leaf is not listed as trained, since it would not identify a run.
    """
    leaves = by_path(params)
    telling = [path for path in sorted(trained) if path in leaves and leaves[path].size and np.ptp(leaves[path]) > 0]
    return {"weights": checksums(leaves), "trained": telling}


def facts_beside(params: Path) -> dict[str, Any]:
    """Returns the facts written beside released weights; empty if the file is missing."""
    try:
        # Reads regular files only: a named pipe in a folder from elsewhere may never end.
        told = json.loads((params / METADATA).read_text()) if (params / METADATA).is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    facts = told.get("custom_metadata") if isinstance(told, dict) else None
    return facts if isinstance(facts, dict) else {}


def require_shapes(place: str, expected: Shapes, actual: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    """Raises `ConfigError` naming the first parameter that is missing, unknown, of another shape, or not float32."""
    fix = "Name the model of these weights, or use other weights"
    for path in sorted({*expected, *actual}):
        require(path in actual, place, f"does not contain the parameter {path} of this model", fix)
        require(path in expected, place, f"contains {path}, which this model does not have", fix)
        (shape, dtype), own = actual[path], tuple(expected[path])
        require(tuple(shape) == own, place, f"has {path} of shape {tuple(shape)}, but this model has {own}", fix)
        require(np.dtype(dtype) == np.float32, place, f"has {path} as {np.dtype(dtype)}, not float32", "Write it as float32")


def of_another_task(place: str, expected: Shapes, held: Shapes) -> tuple[str, ...]:
    """Paths of the parameters that a model takes from weights of a model with other heads: its whole body, and each head that the weights
    hold with the same shapes. Raises `ConfigError` where the bodies differ."""

    def is_of_body(path: str) -> bool:
        return path.split("/")[0] in _BODY

    body = {path: (shape, np.float32) for path, shape in held.items() if is_of_body(path)}
    require_shapes(place, {path: shape for path, shape in expected.items() if is_of_body(path)}, body)
    lacking = {path.split("/")[0] for path, shape in expected.items() if tuple(held.get(path, ())) != tuple(shape)}
    return tuple(sorted(path for path in expected if is_of_body(path) or path.split("/")[0] not in lacking))


def require_finite(place: str, leaves: Leaves) -> None:
    """Raises `ConfigError` naming the first parameter that holds a value that is not finite."""
    for path, leaf in sorted(leaves.items()):
        require(bool(np.isfinite(leaf).all()), place, f"contains values of {path} that are not finite", "Use other weights")


def of_file(file: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns `{name: (shape, dtype)}` of the arrays in an .npz file, read from their headers without loading them.

    Raises `ConfigError` if the file is missing, damaged or not an .npz.
    """
    shapes = {}
    with _reading(file), zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                version = np.lib.format.read_magic(member)
                read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read_header(member)
            shapes[name.removesuffix(".npy")] = (shape, dtype)
    return shapes


def read_file(file: Path) -> Leaves:
    """Returns the arrays of an .npz; nothing in it is executed. Raises `ConfigError` if it is cut short."""
    with _reading(file), np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises `ConfigError` for a file that is not an .npz, or cannot be read as one inside this context."""
    asked = f"init.file={file}"
    is_release = any((place / METADATA).is_file() for place in (file, file / PARAMS, file / "release" / PARAMS))
    fix = f"Begin from that run, so that its cost is included: init=run init.run={file}"
    require(not is_release, asked, "contains weights that a run of dpx released", fix)
    require(file.exists(), asked, "no such file", "Name an .npz of float32 arrays by path")
    require(file.is_file(), asked, "is a folder", "Name an .npz of float32 arrays by path")
    try:
        yield
    # zipfile raises RuntimeError for an encrypted member, and NotImplementedError for an unknown compression method.
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        fix = "Write the file with numpy.savez, with the path of each parameter as its name"
        raise ConfigError(asked, "is incomplete, or is not an .npz file of arrays", fix) from error


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns `facts` (JSON) with their checksum added, as they are saved beside a checkpoint."""
    return facts | {SEAL: seal(facts)}


def facts_of_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """Returns the facts that were saved beside a checkpoint; `None` if they are missing, cut short, or not as `sealed` made them."""
    try:
        # Reads regular files only: a named pipe in a folder from elsewhere may never end.
        facts = dict(json.loads((checkpoint / METADATA).read_text())["custom_metadata"]) if (checkpoint / METADATA).is_file() else {}
        return facts if facts.pop(SEAL) == seal(facts) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
