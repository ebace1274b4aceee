"""Which strings of a release look like digests, and what explains each: a digest of data without a key would test a guessed row exactly.

A string is explained if it can be made again from what may be known: random names, lines of a ledger under the ledger's own key, digests of
released files and values, and of public files that a test names. Every other one is returned.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from dpx.durable import seal
from dpx.files.orbax_checkpoints import on_host
from dpx.files.run_folder import CONFIG
from dpx.files.weights import by_path, checksum, checksums
from dpx.statement.seals import STATEMENT

_LIKE_A_DIGEST = re.compile(r"(?<![0-9a-zA-Z.])[0-9a-f]{8,}(?![0-9a-zA-Z])")


def unexplained(release: Path, privates: Sequence[Path], public: Sequence[str] = ()) -> dict[str, list[str]]:
    """The strings in `release`, by the place that holds them, that look like digests and nothing explains.

    `privates` are the private trees of the run and of the runs that it began from, `public` digests of public files.
    """
    known = set(public) | _random_and_keyed(privates)
    for place in (release, *(private.parent / "release" for private in privates)):
        known |= _of_released(place)
    shortened = {one[:8] for one in known}
    found: dict[str, list[str]] = {}
    for file in sorted(path for path in release.rglob("*") if path.is_file()):
        for place, text in _texts(file):
            for one in _LIKE_A_DIGEST.findall(text):
                is_number = not re.search("[a-f]", one) or not re.search("[0-9]", one)
                if not is_number and one not in known and one not in shortened:
                    found.setdefault(f"{file.relative_to(release)}: {place}", []).append(one)
    return found


def _random_and_keyed(privates: Sequence[Path]) -> set[str]:
    """Random names in ledgers and records, and the keyed digests of their lines."""
    names: set[str] = set()
    for chain in (path for private in privates for path in (private / "ledger", private / "trials") if path.is_file()):
        lines = [line.partition(" ") for line in chain.read_text().splitlines()]
        first = json.loads(lines[0][2])
        assert len(first["key"]) == 64
        names |= {digest for digest, _, _ in lines} | {first["chain"]}
        for _, _, text in lines:
            node = json.loads(text)
            if node.get("kind") == "epoch":
                names.add(node["epoch"]["name"])
    return names


def _of_released(release: Path) -> set[str]:
    """Digests of released files and values, and the random names that Orbax gives its files."""
    known: set[str] = set()
    for path in release.rglob("*"):
        if path.is_file():
            known |= {hashlib.sha256(path.read_bytes()).hexdigest(), path.name}
    for params in (path for path in release.rglob("params") if path.is_dir()):
        leaves = by_path(on_host(params))
        known |= {*checksums(leaves).values(), checksum(leaves).removeprefix("sha256:")}
    for statement in release.rglob(STATEMENT):
        known.add(seal(json.loads(statement.read_text())))
    for config in release.rglob(CONFIG):
        known.add(seal(config.read_text()))
    return known


def _texts(file: Path) -> Iterator[tuple[str, str]]:
    """Every text in a file with its place: of JSON and YAML the keys and texts, else the whole file if it is text."""
    data = file.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        documents = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else [json.loads(text)]
    except ValueError:
        documents = [yaml.safe_load(text)] if file.suffix == ".yaml" else [text]
    for document in documents:
        yield from _leaves(document, "")


def _leaves(node: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield place, str(key)
            yield from _leaves(value, f"{place}.{key}")
    elif isinstance(node, list):
        for one in node:
            yield from _leaves(one, place)
    elif isinstance(node, str):
        yield place, node


def of_data(store: Any, *sources: Path) -> set[str]:
    """Digests without a key of prepared data and of the files that it was made from, which no release may hold."""
    manifest = store.manifest
    digests = {manifest.checksum, manifest.key, *(known["sha256"] for known in manifest.files.values())}
    return digests | {hashlib.sha256(source.read_bytes()).hexdigest() for source in sources}


def held(release: Path, digests: set[str]) -> list[str]:
    """Which of `digests` are in a file of `release`: whole, as bytes, or their first 8 digits in a text."""
    found = []
    for file in (path for path in release.rglob("*") if path.is_file()):
        data = file.read_bytes()
        found += [f"{file}: {one}" for one in digests if one.encode()[:8] in data or bytes.fromhex(one[: len(one) // 2 * 2]) in data]
    return found
