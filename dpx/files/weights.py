"""Reads starting parameters from disk to the host, and checks them against the model's shapes and their stored checksums.

Released weights include a checksum of each parameter and the names of the trained parameters (`facts`). So a damaged copy is detected, and
so is a file that presents another run's weights as public ones. In such a file, a parameter that was changed by one bit is not detected.

A checkpoint is a folder with a declaration (`config.json`) and one or several safetensors files. Nothing in it is executed: names and
shapes come from the files' headers, and values are read as float32.
"""

import contextlib
import hashlib
import importlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dpx.declaration import ConfigError, require
from dpx.durable import seal
from dpx.files.run_folder import read_json
from dpx.packages import is_installed

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


WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
# What `generate` of transformers reads there, or in `config.json` where that file is missing.
OF_GENERATION = ("sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens")
OF_GENERATION += ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "num_beams", "do_sample")
OF_GENERATION += ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "max_new_tokens")
OF_GENERATION += ("max_length", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale", "stop_strings")
OF_GENERATION += ("exponential_decay_length_penalty", "length_penalty", "early_stopping", "renormalize_logits", "num_beam_groups")
OF_GENERATION += ("diversity_penalty", "penalty_alpha", "watermarking_config", "constraints", "force_words_ids", "dola_layers")
_COPY = "Copy the file again"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
# The files that a model and its tokenizer are read from.
_DOWNLOADED = ["*.json", "*.txt", "*.jinja", "*.safetensors", "README.md"]


def folder_of(path: str, key: str = "init.path") -> Path:
    """Returns the folder that `path` names: the path itself, or the copy of a hub id's files that `huggingface_hub` keeps on this
    machine.

    Raises `ConfigError`, naming the `key` that it was declared under, if the folder does not exist.
    """
    asked = f"{key}={path}"
    try:
        place = Path(path).expanduser()
        is_file, is_folder = place.is_file(), place.is_dir()
    except (OSError, RuntimeError):  # a name that no file can have, or the home of a user who does not exist
        raise ConfigError(asked, "no such folder", "Name a folder that holds config.json") from None
    said = "is a file that can run code when it is read" if place.name.endswith(_PICKLES) else "is a file"
    require(not is_file, asked, said, "Name the folder that holds config.json and model.safetensors")
    if is_folder:
        return place
    require(is_hub_id(path) and is_installed("huggingface_hub"), asked, "no such folder", "Name a folder that holds config.json")
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(path, allow_patterns=_DOWNLOADED))
    except Exception as error:  # the library raises whatever its storage and network layers raise
        reason = f"is not a folder, and dpx could not download it as a hub id ({type(error).__name__})"
        raise ConfigError(asked, reason, "Name a folder, or check the id and the network") from error


def is_hub_id(path: str) -> bool:
    """Returns whether a path that does not exist has the form of a hub id."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) is not None


def hub_name(path: str) -> str | None:
    """Returns the hub id of a checkpoint, also for a copy in the hub's cache; `None` for another folder."""
    cached = re.search(r"models--([^/]+)", path)
    if cached is not None:
        return cached.group(1).replace("--", "/")
    return path if is_hub_id(path) and not Path(path).exists() else None


def called(path: str) -> str:
    """Returns the hub id of a checkpoint, for a folder only its last name: the folders above it are private to the user."""
    # A path of Windows also separates at `/`; `.` has no last name.
    return hub_name(path) or PureWindowsPath(path).name or Path(path).resolve().name


def config_of(folder: Path) -> dict[str, Any]:
    """Returns the config of the checkpoint in `folder`. Raises `ConfigError` if it is missing or is not a JSON object."""
    require((folder / CONFIG).is_file(), folder, f"contains no {CONFIG}", "Name the folder of a checkpoint")
    return read_json(folder / CONFIG, _COPY)


def ends_of(folder: Path) -> tuple[int, ...]:
    """Returns the tokens at which transformers ends a text: those of `generation_config.json`, or of `config.json` if it names none."""
    for file in (folder / GENERATION, folder / CONFIG):
        named = read_json(file, _COPY).get("eos_token_id") if file.is_file() else None
        ids = named if isinstance(named, list) else [named]
        if ends := tuple(one for one in ids if isinstance(one, int) and not isinstance(one, bool)):
            return ends
    return ()


def weight_files(folder: Path) -> dict[str, list[str]]:
    """Returns the weight files, each with the names of its tensors from the index, or without names if the index is missing.

    Raises `ConfigError` for pickles.
    """
    # As in transformers: an index beside a single weight file is left over from an earlier save.
    if (folder / WEIGHTS).is_file():
        return {WEIGHTS: []}
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX, _COPY).get("weight_map")
        is_map = isinstance(names, dict) and bool(names) and all(isinstance(file, str) for file in names.values())
        require(is_map, folder / INDEX, "does not name the file of any tensor", _COPY)
        by_file: dict[str, list[str]] = {}
        for name, file in (names or {}).items():
            reason, fix = f"names {file}, which is not a safetensors file in the same folder", "Copy the checkpoint again"
            require(Path(file).name == file and file.endswith(".safetensors"), folder / INDEX, reason, fix)
            require((folder / file).is_file(), folder / file, f"is missing, but {INDEX} names it", fix)
            by_file.setdefault(file, []).append(name)
        return by_file
    pickles = sorted(file.name for file in folder.glob("*") if file.name.endswith(_PICKLES))
    if pickles:
        reason = f"stores its weights in {pickles[0]}, and such a file can run code when it is read"
        raise ConfigError(folder, reason, "Convert it to safetensors: model.save_pretrained(folder, safe_serialization=True)")
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    raise ConfigError(
        folder, f"contains no {WEIGHTS}" + (f", only {others[0]}" if others else ""), f"Name the weights {WEIGHTS}, or its index"
    )


_FLOATS = ("F32", "F16", "BF16")


class Tensors:
    """Reads the weights in a folder.

    Raises `ConfigError` for a file that is cut short, for a tensor that two files hold, and for an index that does not fit its files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for of_file, promised in weight_files(folder).items():
            file = folder / of_file
            with _open(file) as opened:
                there = list(opened.keys())
                for name in promised:
                    require(name in there, file, f"does not contain {name}, which its index names", "Copy the checkpoint again")
                for name in there:
                    reason = f"contains {name}, which {self._file.get(name, file).name} also contains"
                    require(name not in self._file, file, reason, "Keep one of them, or copy the checkpoint again")
                    part = opened.get_slice(name)
                    self._file[name], self.shapes[name], self._types[name] = file, tuple(part.get_shape()), str(part.get_dtype())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, values as float32) of each tensor, file by file."""
        wanted = set(names)
        for file in sorted({self._file[name] for name in wanted}):
            with _open(file) as opened:
                for name in sorted(name for name in wanted if self._file[name] == file):
                    kind = self._types[name]
                    require(kind in _FLOATS, file, f"has {name} as {kind}", "Give weights as float32, float16 or bfloat16")
                    yield name, np.asarray(opened.get_tensor(name)).astype(np.float32)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(file, f"is not a complete safetensors file ({str(error).splitlines()[0]})", "Copy it again") from None


def write(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes float32 tensors, by name, as one file."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(values) for name, values in sorted(tensors.items())}, file, metadata={"format": "pt"})
