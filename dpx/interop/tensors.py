"""Reads and writes safetensors files, one or several: names and shapes from their headers, values as float32."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dpx.checkpoint_folder import weight_files
from dpx.declaration import ConfigError, require

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
        for name, promised in weight_files(folder).items():
            self._read_header(folder / name, promised)

    def _read_header(self, file: Path, promised: list[str]) -> None:
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
