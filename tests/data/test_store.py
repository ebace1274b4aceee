import dataclasses
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dpx import durable
from dpx.data import store as stores
from dpx.data.prepare import prepare
from dpx.data.schema import as_json, classes, texts
from dpx.data.store import MANIFEST, UNIT, VERIFIED, Manifest, Store, open_store
from dpx.data.unit_names import SPLITS
from dpx.declaration import ConfigError
from dpx.privacy.declared_privacy import Privacy

from .corpora import PRIVACY, declared, records, write_records


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return prepare(declared(folder, write_records(folder / "a.jsonl", records(80)), unit_field="id"), PRIVACY)


@pytest.fixture
def copied(store: Store, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in (*store.manifest.files, MANIFEST):
        (folder / name).write_bytes((store.folder / name).read_bytes())
    return folder


@pytest.mark.parametrize("split", SPLITS)
def test_rows_have_the_declared_form(store: Store, split: str):
    manifest = store.manifest
    count = manifest.rows[split]
    rows = store.rows(split, np.arange(count))  # type: ignore[arg-type]
    assert {name: (values.dtype, values.shape) for name, values in rows.items()} == {
        "tokens": (np.int32, (count, 32)),
        **{name: (np.int32, (count,)) for name in ("segment_start", "length", "is_next", "record")},
    }
    position = np.arange(32)
    is_separator = rows["tokens"] == manifest.sep_id
    assert (rows["tokens"][:, 0] == manifest.cls_id).all()
    assert ((rows["tokens"] == manifest.pad_id) == (position >= rows["length"][:, None])).all()
    expected = (position == rows["segment_start"][:, None] - 1) | (position == rows["length"][:, None] - 1)
    assert (is_separator == expected).all()
    assert (rows["segment_start"] < rows["length"]).all() and set(rows["is_next"]) == {0, 1}
    assert rows["tokens"].max() < manifest.ids_in_use <= manifest.vocabulary_size


def test_rows_come_in_the_order_asked_for(store: Store):
    asked = np.array([5, 0, 5, 3])
    rows = store.rows("protected", asked)
    np.testing.assert_array_equal(rows["record"], asked)
    every = store.rows("protected", np.arange(6))
    np.testing.assert_array_equal(rows["tokens"], every["tokens"][asked])
    assert store.rows("protected", [])["tokens"].shape == (0, 32)


@pytest.mark.parametrize("index", [-1, 10**9])
def test_a_record_that_is_not_there_is_an_error(store: Store, index: int):
    with pytest.raises(IndexError, match="protected has records 0 to"):
        store.rows("protected", [index])


def test_units_are_kept(store: Store):
    for split in SPLITS:
        units = store.unit_of_rows(split, np.arange(store.manifest.rows[split]))
        assert set(units) == set(range(store.manifest.units[split])) and len(store.unit_ids(split)) == store.manifest.units[split]


def test_the_most_frequent_public_token_is_counted_there(store: Store):
    manifest = store.manifest
    tokens = store.rows("public", np.arange(manifest.rows["public"]))["tokens"]
    counts = np.bincount(tokens.ravel(), minlength=manifest.vocabulary_size)
    counts[[manifest.pad_id, manifest.unk_id, manifest.cls_id, manifest.sep_id, manifest.mask_id]] = 0
    assert manifest.most_frequent_public_token_id == counts.argmax()


def test_a_manifest_survives_the_disk(store: Store, tmp_path: Path):
    store.manifest.write(tmp_path / MANIFEST)
    assert Manifest.read(tmp_path) == store.manifest


def test_the_checksum_is_of_the_content_alone(store: Store):
    manifest = store.manifest
    assert dataclasses.replace(manifest, key="x", settings={}).with_checksum().checksum == manifest.checksum
    assert dataclasses.replace(manifest, rows_per_unit_max=7).with_checksum().checksum != manifest.checksum


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("protected.tokens", lambda path: path.write_bytes(path.read_bytes()[:-2]), "bytes, but its manifest says"),
        ("protected.tokens", flip_a_byte, "does not match the checksum"),
        ("heldout.is_next", flip_a_byte, "does not match the checksum"),
        ("public.units.jsonl", Path.unlink, "is missing from its store"),
        (MANIFEST, Path.unlink, "is not a finished store"),
        (MANIFEST, lambda path: path.write_text(path.read_text()[:-20]), "is not a finished store"),
        (
            MANIFEST,
            lambda path: path.write_text(path.read_text().replace('"pad_id": 0', '"pad_id": 1')),
            "was changed after it was written",
        ),
    ],
)
def test_a_harmed_store_is_refused_in_one_line(copied: Path, name: str, harm, message: str):
    harm(copied / name)
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(copied)
    assert "\n" not in str(caught.value) and str(copied) in str(caught.value)


@pytest.mark.parametrize("largest_first", [True, False])
def test_every_byte_of_every_file_is_covered(store: Store, copied: Path, monkeypatch, largest_first: bool):
    """Also past any limit: of the largest file the last byte is changed, and blocks are far smaller than the files."""
    monkeypatch.setattr(durable, "BLOCK_BYTES", 64)
    for name in sorted(store.manifest.files, key=lambda name: store.manifest.files[name]["bytes"], reverse=largest_first)[:3]:
        whole = (copied / name).read_bytes()
        if whole:
            (copied / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            with pytest.raises(ConfigError, match=f"{name}: does not match the checksum"):
                open_store(copied)
        (copied / name).write_bytes(whole)
    open_store(copied)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that are hashed from here on."""
    names: list[str] = []
    whole = durable.of_file
    monkeypatch.setattr(durable, "of_file", lambda path, *more: names.append(path.name) or whole(path, *more))
    return names


def test_a_file_is_hashed_once_and_again_when_it_was_touched(store: Store, copied: Path, hashed: list[str]):
    open_store(copied)
    assert sorted(hashed) == sorted(store.manifest.files), "in a copy everything is hashed"
    assert oct((copied / VERIFIED).stat().st_mode)[-3:] == "600"
    hashed.clear()
    open_store(copied)
    assert hashed == []
    # Same size, and the old time of modification.
    path = copied / "protected.tokens"
    before = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"protected\.tokens: does not match the checksum"):
            open_store(copied)
    assert hashed == ["protected.tokens"] * 2, "what was refused is not remembered"
    flip_a_byte(path)
    hashed.clear()
    open_store(copied)
    open_store(copied)
    assert hashed == ["protected.tokens"]


@pytest.mark.parametrize("content", ["", "[]", '{"protected.tokens": 1}', "\x00"])
def test_a_damaged_record_of_what_was_verified_is_not_believed(store: Store, copied: Path, hashed: list[str], content: str):
    open_store(copied)
    hashed.clear()
    (copied / VERIFIED).write_text(content)
    open_store(copied)
    assert sorted(hashed) == sorted(store.manifest.files)


def test_a_record_is_of_the_checksums_that_the_manifest_names(copied: Path):
    """Another manifest over files that have not changed is held against them."""
    open_store(copied)
    manifest = Manifest.read(copied)
    other = manifest.files | {"protected.tokens": manifest.files["protected.tokens"] | {"sha256": "0" * 64}}
    dataclasses.replace(manifest, files=other).with_checksum().write(copied / MANIFEST)
    with pytest.raises(ConfigError, match=r"protected\.tokens: does not match the checksum"):
        open_store(copied)


def test_a_store_that_cannot_be_written_to_is_opened_all_the_same(copied: Path, monkeypatch):
    monkeypatch.setattr(stores, "write_durably", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    open_store(copied)
    assert not (copied / VERIFIED).exists()


def test_checking_much_is_shown_and_takes_no_memory(copied: Path, monkeypatch, capsys):
    monkeypatch.setattr(stores, "SHOWN_BYTES", 1000)
    monkeypatch.setattr(durable, "BLOCK_BYTES", 64)
    # What the first call imports is not memory that checking takes.
    open_store(copied)
    (copied / VERIFIED).unlink()
    capsys.readouterr()
    tracemalloc.start()
    open_store(copied)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("checking the 0.0 GB of ") and len(rest) == 10 and rest[-1] == "checked 100% of copy"
    assert peak < 1e6
    open_store(copied)
    assert capsys.readouterr().err == ""


def test_a_store_of_another_key_is_refused(copied: Path):
    with pytest.raises(ConfigError, match="other data or settings"):
        open_store(copied, "another")


@pytest.mark.slow
def test_reading_a_batch_of_346_million_rows_costs_a_batch(store: Store, tmp_path: Path):
    """Sparse files instead of the corpus of Anil et al. 2021: 88 GB of tokens, of which a batch touches a few pages."""
    count, length = 346_000_000, 128
    schema = texts(length, 30522) | {"is_next": classes(2)}
    for split in SPLITS:
        for name, column in (schema | {"unit": UNIT}).items():
            with (tmp_path / f"{split}.{name}").open("wb") as file:
                file.truncate(count * column.dtype.itemsize * math.prod(column.shape) if split == "protected" else 0)
    rows = {"protected": count, "heldout": 0, "public": 0}
    manifest = dataclasses.replace(store.manifest, rows=rows, columns=as_json(schema), sequence_length=length, files={})
    vast = Store(tmp_path, manifest)
    wanted = np.sort(np.random.default_rng(0).integers(0, count, 2048))
    vast.rows("protected", wanted[:1])
    tracemalloc.start()
    found = vast.rows("protected", wanted)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["tokens"].shape == (2048, 128) and found["record"][-1] == wanted[-1]
    assert peak < 8e6


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Documents of 12 authors, taking turns, so that an author's rows come apart; at most 3 rows each."""
    folder = tmp_path_factory.mktemp("authors")
    written = [record | {"id": f"author-{number % 12}"} for number, record in enumerate(records(60, sentences=6))]
    privacy = Privacy(delta=1e-5, unit="author", rows_per_unit_max=3, unit_mode="sample_units")
    return prepare(declared(folder, write_records(folder / "a.jsonl", written), unit_field="id"), privacy)


def test_units_are_found_with_all_their_rows(authors: Store):
    manifest = authors.manifest
    every = authors.rows("protected", np.arange(manifest.rows["protected"]))
    unit_N = authors.unit_of_rows("protected", every["record"])
    asked = np.array([2, 0, 2, manifest.units["protected"] - 1])
    found = authors.examples("protected", asked, 3)
    assert found["tokens"].shape == (4, 3, 32) and found["is_padding"].dtype == bool
    for place, unit in enumerate(asked):
        kept = ~found["is_padding"][place]
        assert found["record"][place][kept].tolist() == np.flatnonzero(unit_N == unit).tolist() != []
        np.testing.assert_array_equal(found["tokens"][place][kept], every["tokens"][unit_N == unit])
        assert not found["tokens"][place][~kept].any() and not found["length"][place][~kept].any()
    assert authors.examples("protected", [], 3)["tokens"].shape == (0, 3, 32)
    assert np.bincount(unit_N).max() == 3


def test_rows_drawn_singly_are_rows(authors: Store):
    assert authors.examples("protected", [1], 1)["tokens"].shape == (1, 32)


def test_a_unit_beyond_the_cap_or_the_split_is_an_error(authors: Store):
    with pytest.raises(ConfigError, match="a unit has 3 rows, above the cap of 2"):
        authors.examples("protected", np.arange(authors.manifest.units["protected"]), 2)
    with pytest.raises(IndexError, match="protected has units 0 to"):
        authors.examples("protected", [10**9], 3)


def test_few_units_of_many_cost_little_memory(authors: Store, monkeypatch):
    """The column of units is searched where it lies, never converted."""
    many = np.repeat(np.arange(1_000_000, dtype="<u4"), 2)
    found = {"unit": many}
    monkeypatch.setattr(authors, "_columns", {"protected": found})
    monkeypatch.setattr(authors, "rows", lambda split, indices, width: {"record": np.asarray(indices, np.int32)})
    monkeypatch.setattr(authors, "manifest", dataclasses.replace(authors.manifest, units={"protected": 1_000_000}))
    authors.examples("protected", [3], 2)
    tracemalloc.start()
    record = authors.examples("protected", [999_999, 17], 2)["record"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.tolist() == [[1_999_998, 1_999_999], [34, 35]] and peak < 1e5
