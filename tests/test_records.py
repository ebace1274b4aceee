"""What is stored as JSON is a record: read as it was written, refused where it was not, and described in a schema and on a page."""

import json
from typing import Literal

import jsonschema
import pytest

from dpx.declaration import ConfigError
from dpx.files.records import described, from_json, record, to_json
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Line, StepLine
from dpx.statement.seals import text_of
from dpx.statement.statement_records import Statement, require_sound

from . import config_page, record_pages
from .made_statement import made_plain, made_statement, made_study


@record
class Inner:
    kind: Literal["inner"] = "inner"
    numbers: tuple[tuple[int, float], ...] = described("Pairs.")


@record
class Outer:
    kind: Literal["outer"] = "outer"
    inner: Inner | None = described("Another record.")
    words: dict[str, str | None] = described("Words by name.")
    added: int = described("A field that was added later.", default=3)


MADE = Outer(inner=Inner(numbers=((1, 0.5), (2, 1.0))), words={"a": None})
JSON = {"kind": "outer", "inner": {"kind": "inner", "numbers": [[1, 0.5], [2, 1.0]]}, "words": {"a": None}, "added": 3}


def test_a_record_is_read_as_it_was_written():
    assert to_json(MADE) == JSON and from_json(Outer, json.loads(json.dumps(JSON)), "here") == MADE
    assert from_json(Outer | Inner, JSON["inner"], "here") == MADE.inner


def test_a_field_that_was_added_with_a_default_may_be_missing():
    assert from_json(Outer, {name: value for name, value in JSON.items() if name != "added"}, "here") == MADE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"further": 1}, "has the field further, unknown here, so that its cost is too"),
        ({"inner": {"kind": "inner"}}, "inner has no value for the field numbers"),
        ({"inner": {"kind": "inner", "numbers": [[1]]}}, r"inner\.numbers\[0\] has not 2 items"),
        ({"inner": {"kind": "inner", "numbers": [[True, 1.0]]}}, r"inner\.numbers\[0\]\[0\] is not a whole number"),
        ({"words": {"a": 3}}, r"words\.a is not text"),
        ({"kind": "inner"}, "kind is not outer"),
        ({"added": "3"}, "added is not a whole number"),
    ],
)
def test_anything_else_is_refused_in_one_line(change, words):
    with pytest.raises(ConfigError, match=rf"^here: .*({words}).*\. Restore the file, or use the version of dpx that wrote it\.$"):
        from_json(Outer, JSON | change, "here")


NO_LINES = (5, {"step": 5}, {"kind": "leap", "step": 5}, {"kind": "step", "step": "5"}, {"kind": "step", "step": 1, "x": 2})


@pytest.mark.parametrize("node", NO_LINES)
def test_a_line_of_the_ledger_is_told_by_its_kind_alone(node):
    assert from_json(Line, {"kind": "step", "step": 5}, "ledger") == StepLine(step=5)
    with pytest.raises(ConfigError, match="^ledger: "):
        from_json(Line, node, "ledger")


@pytest.mark.parametrize("name", ["privacy", "plan"])
def test_the_schema_that_ships_is_that_of_the_records(name):
    assert (record_pages.DOCS / "schemas" / f"{name}.schema.json").read_text() == record_pages.schema(name), "python -m tests.record_pages"


def test_the_page_has_a_sentence_for_every_field():
    assert record_pages.untold() == []
    assert (record_pages.DOCS / "records.md").read_text() == record_pages.page(), "python -m tests.record_pages"


def test_the_page_of_the_config_is_up_to_date():
    assert (record_pages.DOCS / "config.md").read_text() == config_page.page(), "python -m tests.record_pages"


def test_a_statement_that_contradicts_itself_is_neither_written_nor_read(tmp_path):
    entered = Ledger(tmp_path / "ledger")
    schema = json.loads(record_pages.schema("privacy"))
    for sound in (made_statement(entered), made_plain(entered), made_study()):
        node = json.loads(text_of(sound))
        assert from_json(Statement, node, "here") == sound
        jsonschema.validate(node, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(node | {"further": 1}, schema)
    for change in (
        {"reasons": ("why",)},
        {"guarantee": "none"},
        {"guarantee": "none", "reasons": ("why",), "epsilon": {"rdp": 1.0}},
        {"epsilon": {"rdp": -1.0}},
        {"epsilon": {"rdp": float("inf")}},
    ):
        for act in (text_of, lambda statement: require_sound(statement, "here")):
            with pytest.raises(ConfigError):
                act(made_statement(entered, **change))
