"""Starting parameters as they lie on disk: read to the host, and checked against the model's shapes and the checksums they carry.

Released weights carry a checksum of each parameter and the names of those that were trained (`facts`), so that a damaged copy is found, and
so is a file that holds another run's weights under the name of public ones. A parameter that was changed by a bit is not.
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

from dpx.claim.agreement import METADATA
from dpx.declaration import ConfigError, require

Shapes = Mapping[str, tuple[int, ...]]
Leaves = dict[str, np.ndarray]
PARAMS = "params"


def by_path(tree: Any, path: str = "") -> Leaves:
    """Leaves of nested dicts, on the host, each under its path."""
    if isinstance(tree, Mapping):
        return {name: leaf for key, part in tree.items() for name, leaf in by_path(part, f"{path}/{key}".lstrip("/")).items()}
    return {path: np.asarray(tree)}


def nested(leaves: Leaves) -> dict[str, Any]:
    """Nested dicts with each leaf at its path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = leaf
    return tree


def checksums(leaves: Leaves) -> dict[str, str]:
    """A checksum of the values of each leaf."""
    return {path: hashlib.sha256(np.ascontiguousarray(leaf).data).hexdigest() for path, leaf in sorted(leaves.items())}


def checksum(leaves: Leaves) -> str:
    """One checksum of all leaves and their paths."""
    return "sha256:" + hashlib.sha256(json.dumps(checksums(leaves), sort_keys=True).encode()).hexdigest()


def facts(params: Any, trained: Iterable[str]) -> dict[str, Any]:
    """The checksums that released weights carry, and the paths of `trained` leaves among them. A leaf of one constant is not listed as
    trained: it would identify no run."""
    leaves = by_path(params)
    telling = [path for path in sorted(trained) if path in leaves and leaves[path].size and np.ptp(leaves[path]) > 0]
    return {"weights": checksums(leaves), "trained": telling}


def facts_beside(params: Path) -> dict[str, Any]:
    """What was written beside released weights; empty where nothing was."""
    try:
        # What is no file, such as a named pipe in a folder from elsewhere, may never come to an end.
        told = json.loads((params / METADATA).read_text()) if (params / METADATA).is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    facts = told.get("custom_metadata") if isinstance(told, dict) else None
    return facts if isinstance(facts, dict) else {}


def require_shapes(place: str, expected: Shapes, given: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    """Raises `ConfigError` naming the first parameter that is missing, unknown, of another shape, or not float32."""
    fix = "Name the model that these weights are of, or other weights"
    for path in sorted({*expected, *given}):
        require(path in given, place, f"lacks {path} of this model", fix)
        require(path in expected, place, f"holds {path}, which this model does not have", fix)
        (shape, dtype), own = given[path], tuple(expected[path])
        require(tuple(shape) == own, place, f"holds {path} of shape {tuple(shape)}, where this model has {own}", fix)
        require(np.dtype(dtype) == np.float32, place, f"holds {path} as {np.dtype(dtype)}", "Write it as float32")


def require_finite(place: str, leaves: Leaves) -> None:
    """Raises `ConfigError` naming the first parameter that holds a value that is not finite."""
    for path, leaf in sorted(leaves.items()):
        require(bool(np.isfinite(leaf).all()), place, f"holds values of {path} that are not finite", "Give other weights")


def of_file(file: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """`{name: (shape, dtype)}` of the arrays in an .npz file, read from their headers without loading them.

    Raises `ConfigError` where the file is missing, damaged or no .npz."""
    shapes = {}
    with _reading(file), zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
            shapes[name.removesuffix(".npy")] = (shape, dtype)
    return shapes


def read_file(file: Path) -> Leaves:
    """The arrays of an .npz; nothing in it is executed. Raises `ConfigError` where it is cut short."""
    with _reading(file), np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises `ConfigError` for a file that is no .npz, or that fails to be read as one here."""
    asked = f"init.file={file}"
    is_release = any((place / METADATA).is_file() for place in (file, file / PARAMS, file / "release" / PARAMS))
    fix = f"Begin from that run, with what it cost: init=run init.run={file}"
    require(not is_release, asked, "holds weights that a run of dpx released", fix)
    require(file.exists(), asked, "no such file", "Name an .npz of float32 arrays by path")
    require(file.is_file(), asked, "is a folder", "Name an .npz of float32 arrays by path")
    try:
        yield
    # zipfile says RuntimeError of an encrypted member, and NotImplementedError of one packed in a way that it does not know.
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        fix = "Write it with numpy.savez, each parameter under its path"
        raise ConfigError(asked, "is cut short, or no .npz of arrays", fix) from error


def require_no_known_release(asked: str, leaves: Leaves, outputs: Iterable[Path]) -> None:
    """Raises `ConfigError` where what was asked for holds a parameter that a run in one of the folders `outputs` trained and released, or
    would release if it had won its search."""
    held = {digest: path for path, digest in checksums(leaves).items()}
    places = ("*/release", "*/private/withheld", "studies/*/release/winner")
    released = {metadata.parent for folder in outputs for place in places for metadata in folder.glob(f"{place}/{PARAMS}/{METADATA}")}
    for params in sorted(released):
        known = facts_beside(params)
        # A run's folder, and that of a search's winner or of what it withholds.
        place = params.parents[1] if params.parent.name == "release" else params.parent
        run = place if place != params.parent else params.parents[2]
        for path in known.get("trained", ()):
            digest = (known.get("weights") or {}).get(path, "")
            require(
                digest not in held,
                asked,
                f"holds, as {held.get(digest)}, what the run {run.name} released as {path}",
                f"Begin from that run, with what it cost: init=run init.run={place}",
            )
