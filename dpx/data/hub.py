"""Corpora through the `datasets` library (extra `hub`): names on the hub, or folders it saved on this machine."""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpx.data.declarations import Hub
from dpx.data.documents import Document
from dpx.declaration import ConfigError
from dpx.extras import require_extra


class HubSource:
    """Documents of several corpora, one after another; with `streaming` nothing but the current block is downloaded."""

    def __init__(self, declared: Hub):
        self._declared = declared

    def fingerprint(self) -> str:
        """Hash of what was declared, and of the content of folders on this machine.

        A hub corpus is known by its name and `revision` alone, so a prepared store opens again without a network.
        """
        whole = hashlib.sha256(json.dumps([dict(corpus) for corpus in self._declared.corpora], sort_keys=True).encode())
        for corpus in self._declared.corpora:
            folder = Path(str(corpus["name"]))
            for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
                if file.is_file():
                    with file.open("rb") as opened:
                        whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Raises `ConfigError` where a corpus cannot be loaded, or a record lacks the declared field."""
        for corpus in self._declared.corpora:
            text_field = corpus.get("text_field") or "text"
            for number, record in enumerate(_load(corpus, streaming=self._declared.streaming)):
                yield _document(record, f"{corpus['name']}[{number}]", text_field, corpus.get("unit_field"))


def _document(record: dict[str, Any], place: str, text_field: str, unit_field: str | None) -> Document:
    for field in filter(None, (text_field, unit_field)):
        if record.get(field) is None:
            raise ConfigError(place, f"holds nothing under {field!r}, only {sorted(record)}", "Correct the corpus in data.source.corpora")
    paragraphs = tuple(part for part in str(record[text_field]).split("\n") if part.strip())
    return Document(paragraphs=paragraphs, unit_id=str(record[unit_field]) if unit_field else None)


def _load(corpus: dict[str, str | None], *, streaming: bool) -> Iterable[dict[str, Any]]:
    require_extra("data=hub", "hub")
    datasets = importlib.import_module("datasets")
    name, split = str(corpus["name"]), corpus.get("split") or "train"
    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, corpus.get("config"), split=split, revision=corpus.get("revision"), streaming=streaming)
    except Exception as error:  # the library raises whatever its storage and network layers raise
        reason = f"could not be loaded ({type(error).__name__}: {str(error)[:200]})"
        raise ConfigError(name, reason, "Check name, config, split and network") from error
