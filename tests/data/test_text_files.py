import gzip
import json
from pathlib import Path

import pytest

from dpx.data import sources
from dpx.data.declared_data import TextFiles
from dpx.data.sources import TextFilesSource
from dpx.declaration import ConfigError

from .corpora import records, write_records


def read(*paths: Path, **settings: object) -> list[tuple[tuple[str, ...], str | None]]:
    source = TextFilesSource(TextFiles(paths=[str(path) for path in paths], **settings))  # type: ignore[arg-type]
    return [(document.paragraphs, document.unit_id) for document in source.documents()]


def test_a_record_a_line_with_paragraphs_and_units(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "who": 7}\n\n{"text": "three", "who": "x"}\n')
    assert read(path) == [(("one", "two"), None), (("three",), None)]
    assert read(path, unit_field="who") == [(("one", "two"), "7"), (("three",), "x")]


def test_ways_of_writing_one_name_are_one_unit(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": who, "who": who}) + "\n" for who in ("Ren\u00e9", "Rene\u0301", " Ren\u00e9 ")))
    assert {unit for _, unit in read(path, unit_field="who")} == {"Ren\u00e9"}


def test_gzip_folders_and_byte_order_marks(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"body": "b"}\n', mtime=0))
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\r\n')
    (tmp_path / "ignored.csv").write_text("x")
    assert [paragraphs for paragraphs, _ in read(tmp_path, text_field="body")] == [("a",), ("b",)]


def test_paths_are_one_or_several_files_folders_or_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c[1]"):
        (tmp_path / f"{name}.txt").write_text(name)
    monkeypatch.chdir(tmp_path)

    def texts(paths: str | list[str]) -> list[str]:
        return [document.paragraphs[0] for document in TextFilesSource(TextFiles(paths=paths)).documents()]

    assert texts("a.txt") == ["a"]
    assert texts("[ab].txt") == texts(["a.txt", "b*"]) == ["a", "b"]
    assert texts("c[1].txt") == ["c[1]"], "a file that is there is not a pattern"
    assert texts(".") == texts("**/*.txt") == ["a", "b", "c[1]"]
    assert texts("./**") == texts([".", "a.txt"]) == ["a", "b", "c[1]"], "a file that is named twice is read once"
    with pytest.raises(ConfigError, match=r"^no\*.txt: no file matches"):
        texts("no*.txt")
    with pytest.raises(ConfigError, match="a path is empty"):
        texts("")


def test_a_text_file_is_one_document_or_one_a_line(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a line\nits rest\n\nnext\n")
    assert read(path) == [(("a line its rest", "next"), None)]
    assert read(path, document_per="line") == [(("a line",), None), (("its rest",), None), (("next",), None)]
    path.write_text("one\ntwo\n")
    assert read(path) == [(("one", "two"), None)]


def test_the_end_of_a_files_name_says_what_it_holds(tmp_path: Path):
    path = tmp_path / "notes.jsonl.txt"
    path.write_text("a line\n")
    assert read(path) == [(("a line",), None)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, r"gone.jsonl: no such file. Check data.source.paths"),
        ("a.csv", b"x", r"a.csv: dpx cannot read this kind of file. Write data=table for .* Use one of .txt"),
        ("a.txt", b"", r"a.txt: is empty\."),
        ("a.txt", b" \n\n", r"a.txt: is empty\."),
        ("a.jsonl", b"", r"a.jsonl: is empty\."),
        ("a.txt", b"good\nb\xffd\n", r"a.txt:2: byte 2 of the line is not UTF-8\."),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a.jsonl:2: byte 11 of the line is not UTF-8\."),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "a"\n', r"a.jsonl:3: is not JSON"),
        ("a.jsonl", b'["a"]\n', r"a.jsonl:1: has no text under 'text'\."),
        ("a.jsonl", b'{"body": "a"}\n', r"a.jsonl:1: has no text under 'text'; its fields are body\. Name the field with"),
        ("a.jsonl", b'{"text": "\\udc00a"}\n', r"a.jsonl:1: contains \\udc00, which is only half of a character"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl:1: contains a number with too many digits, or lists that are nested too deeply"),
        ("a.txt.gz", b"not gzip", r"a.txt.gz: is not a complete gzip file"),
        ("a.txt.gz", gzip.compress(b"some text " * 100, mtime=0)[:-12], r"a.txt.gz: is not a complete gzip file"),
    ],
)
def test_bad_input_is_answered_by_one_line(tmp_path: Path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unit", [{}, {"id": ""}, {"id": " "}])
def test_a_record_without_its_unit_is_refused(tmp_path: Path, unit: dict[str, str]):
    path = write_records(tmp_path / "a.jsonl", [*records(1), {"text": "no unit"} | unit])
    with pytest.raises(ConfigError, match=r"a.jsonl:2: does not name its unit under 'id'"):
        read(path, unit_field="id")


def test_a_folder_without_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no file was found"):
        read(tmp_path)


def test_the_fingerprint_is_of_the_content(tmp_path: Path):
    first, second = write_records(tmp_path / "a.jsonl", records(3)), write_records(tmp_path / "b.jsonl", records(3))

    def fingerprint(path: Path) -> str:
        return TextFilesSource(TextFiles(paths=[str(path)])).fingerprint()

    assert fingerprint(first) == fingerprint(second)
    write_records(second, records(4))
    assert fingerprint(first) != fingerprint(second)


def test_a_line_that_no_memory_holds_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_LONGEST", 1000)
    for name, document_per in (("a.txt.gz", "file"), ("b.txt.gz", "line"), ("c.jsonl.gz", "record")):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"short\n" * (document_per != "record") + b"x" * 100_000, mtime=0))
        with pytest.raises(ConfigError, match=r"gz:\d: the line has more than 1000 bytes"):
            read(path, **({} if document_per == "record" else {"document_per": document_per}))
