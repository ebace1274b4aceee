"""Reads corpora through the `datasets` library (extra `hub`): names on the hub, or folders that it saved on this machine."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpx.data.declared_data import Hub
from dpx.data.documents import Document
from dpx.data.hub_rows import content_of, load
from dpx.data.unit_names import unit_name
from dpx.declaration import ConfigError


class HubSource:
    """Yields the documents of several corpora, one after another; with `streaming` only the current block is downloaded."""

    def __init__(self, declared: Hub):
        self._declared = declared

    def fingerprint(self) -> str:
        """Returns a hash of the declaration, and of the content of folders on this machine.

        A hub corpus is identified by its name and `revision` alone, so a prepared store opens again without a network.
        """
        whole = hashlib.sha256(json.dumps([dict(corpus) for corpus in self._declared.corpora], sort_keys=True).encode())
        for corpus in self._declared.corpora:
            folder = Path(str(corpus["name"]))
            whole.update(content_of(folder) if folder.is_dir() else b"")
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the documents. Raises `ConfigError` if a corpus cannot be loaded, or a record lacks the declared field."""
        for corpus in self._declared.corpora:
            text_field = corpus.get("text_field") or "text"
            named = {"split": corpus.get("split") or "train", "config": corpus.get("config"), "revision": corpus.get("revision")}
            loaded = load(str(corpus["name"]), asked="data=hub", streaming=self._declared.streaming, **named)
            for number, record in enumerate(loaded):
                yield _document(record, f"{corpus['name']}[{number}]", text_field, corpus.get("unit_field"))


def _document(record: Mapping[str, Any], place: str, text_field: str, unit_field: str | None) -> Document:
    for field in filter(None, (text_field, unit_field)):
        if record.get(field) is None:
            raise ConfigError(
                place, f"has no value under {field!r}; its fields are {sorted(record)}", "Correct the corpus in data.source.corpora"
            )
    fix = "Give every record this field, or correct data.source.corpora"
    unit_id = unit_name(place, record[unit_field], unit_field, fix) if unit_field else None
    paragraphs = tuple(part for part in str(record[text_field]).split("\n") if part.strip())
    return Document(paragraphs=paragraphs, unit_id=unit_id)
