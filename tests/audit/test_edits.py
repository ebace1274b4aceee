"""An edit finds its code by symbol and tokens, whatever else changes in the file; what it does not find is an error."""

import ast

import pytest

from .edits import edited

SOURCE = """
LIMITS: dict[str, int] = {"step": 3}
RATE = 3


class Outer:
    size: int = 1

    def total(self, rate):
        def each(value):
            return value * rate + 3  # rate
        return each(self.size) + each(3)

    def other(self, rate):
        if rate:
            self.size = rate
        return self.size * rate
"""


@pytest.mark.parametrize(
    ("symbol", "old", "new", "before", "after"),
    [
        ("LIMITS", "3", "4", '"step": 3', '"step": 4'),
        ("RATE", "3", "4", "RATE = 3", "RATE = 4"),
        ("Outer.total.each", "* rate", "* 2", "value * rate +", "value * 2 +"),
        ("Outer.total", "each( 3 )", "each(0)", "each(3)", "each(0)"),
        ("Outer.other", "self.size * rate", "rate", "return self.size * rate", "return rate"),
        ("Outer.other", "self.size = rate", "pass", "self.size = rate", "pass"),
        ("Outer", "size: int = 1", "", "    size: int = 1\n", ""),
    ],
)
def test_only_the_code_of_the_symbol_changes(symbol, old, new, before, after):
    assert SOURCE.count(before) == 1
    assert edited(SOURCE, symbol, old, new) == SOURCE.replace(before, after)


def test_line_breaks_comments_and_code_before_it_do_not_matter():
    moved = "import os\n" + SOURCE.replace(
        "value * rate + 3", "(\n                value  # first\n                * rate + 3\n            )"
    )
    found = edited(moved, "Outer.total.each", "value * rate", "value")
    assert ast.unparse(ast.parse(found)) == ast.unparse(ast.parse("import os\n" + SOURCE.replace("value * rate", "value")))


@pytest.mark.parametrize(
    ("symbol", "old", "fault"),
    [
        ("Outer.gone", "rate", "Outer.gone is defined 0 times"),
        ("each", "rate", "each is defined 0 times"),
        ("Outer.total.each", "rate - 3", "'rate - 3' occurs 0 times in Outer.total.each"),
        ("Outer.other", "rate", "'rate' occurs 4 times in Outer.other"),
        # A token is not found inside a longer one.
        ("Outer.total.each", "val", "'val' occurs 0 times"),
    ],
)
def test_what_is_not_found_once_is_an_error(symbol, old, fault):
    with pytest.raises(ValueError, match=fault):
        edited(SOURCE, symbol, old, "")


def test_a_symbol_that_is_defined_twice_is_an_error():
    with pytest.raises(ValueError, match="f is defined 2 times"):
        edited("def f(): return 1\ndef f(): return 2\n", "f", "1", "2")
