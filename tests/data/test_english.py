import pytest

from dpx.data.embedded import is_english, prose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Return the first of the items.\n\n>>> first([1])\n1\n\nNone where there is no item.",
            ["Return the first of the items.", "None where there is no item."],
        ),
        (
            "Parameters\n----------\nx : array_like\n    Where the function is to be\n    evaluated at each step.\n",
            ["Where the function is to be evaluated at each step."],
        ),
        (
            "Args:\n  count: The number of the rows that\n    are held at a time.\n  other (int): A limit on how many there are.",
            ["The number of the rows that are held at a time.", "A limit on how many there are."],
        ),
        (
            "The list is made as follows::\n\n    x = [a for a in b]\n\nIt is then sorted by the key.",
            ["The list is made as follows:", "It is then sorted by the key."],
        ),
        (
            ".. code-block:: python\n\n   this is not for the reader\n\n.. note:: But this is a note for you.",
            ["But this is a note for you."],
        ),
        ("See :class:`~a.b.Foo` and ``bar`` in *the* `docs <http://x.y>`_ of it.", ["See a.b.Foo and bar in the docs of it."]),
        (
            "# Title\n\n```\nthe code of the thing\n```\n- An item of the list\n  that goes on.\n- Another item of it.",
            ["An item of the list that goes on.", "Another item of it."],
        ),
        ("+---+\n| a table of the things |\n+---+", []),
    ],
)
def test_prose_is_what_a_reader_reads(text: str, expected: list[str]):
    assert prose(text) == expected


@pytest.mark.parametrize(
    "text", ["x = f(a, b) and y -> z", "foo bar baz qux", "def f(self, x=None): return the x", "int, float, complex, str"]
)
def test_code_is_not_english(text: str):
    assert not is_english(text)
