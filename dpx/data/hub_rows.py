"""Reads data sets of the `datasets` library (extra `hub`): a folder that it saved on this machine, or a name on the hub."""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.packages import require_extra

# As in paths of other tools: hf://datasets/<name>, with an optional @<revision>.
HUB = "hf://datasets/"
_OF_ONE, _OF_SEVERAL = "dataset_info.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Returns whether `save_to_disk` of the library wrote the folder."""
    return (folder / _OF_ONE).is_file() or (folder / _OF_SEVERAL).is_file()


def load(
    name: str, *, asked: object, split: str = "train", config: str | None = None, revision: str | None = None, streaming: bool = False
) -> Iterable[Mapping[str, Any]]:
    """Returns the rows of a split. Raises `ConfigError`, naming the config value `asked`, without the extra, or if the split cannot be
    loaded."""
    require_extra(asked, "hub")
    datasets = importlib.import_module("datasets")
    try:
        if is_saved(Path(name)):
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # the library raises whatever its storage and network layers raise
        reason = f"could not be loaded ({type(error).__name__}: {' '.join(str(error)[:200].split())})"
        raise ConfigError(name, reason, "Check name, config, split and network") from error


def content_of(folder: Path) -> bytes:
    """Returns a hash of every file below a folder."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.digest()


@dataclass(frozen=True)
class HubRows:
    """Reads one split of the data set `name`, a folder or a name on the hub; `config` names one of several configurations of a data set."""

    name: str
    split: str
    config: str | None = None
    revision: str | None = None

    @staticmethod
    def of_path(path: str, split: str, config: str | None) -> "HubRows | None":
        """Returns the rows that a path names, if it is a data set and not a file."""
        if path.startswith(HUB):
            name, _, revision = path.removeprefix(HUB).partition("@")
            require(bool(name), path, "does not name a data set", f"Write {HUB}<name>")
            return HubRows(name, split, config, revision or None)
        folder = Path(path).expanduser()
        return HubRows(str(folder), split if (folder / _OF_SEVERAL).is_file() else "") if is_saved(folder) else None

    @property
    def identity(self) -> str:
        """The identity of the rows, equal for equal rows."""
        name = str(Path(self.name).resolve()) if is_saved(Path(self.name)) else HUB + self.name
        return json.dumps([name, self.split, self.config, self.revision])

    def digest(self) -> bytes:
        """Returns a checksum of the content of a folder, or the name and revision of a data set on the hub.

        So a prepared store opens without a network.
        """
        if is_saved(Path(self.name)):
            return hashlib.sha256(content_of(Path(self.name)) + self.split.encode()).digest()
        return hashlib.sha256(self.identity.encode()).digest()

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields each row with its place, for error messages."""
        shown = f"{self.name}[{self.split}]" if self.split else self.name
        loaded = load(self.name, asked=shown, split=self.split or "train", config=self.config, revision=self.revision)
        number = 0
        for number, record in enumerate(loaded, start=1):
            yield f"{shown} row {number}", record
        require(number > 0, shown, "contains no row", "Name another split, or remove it")
