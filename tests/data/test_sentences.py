import pytest

from dpx.data.rows import split_sentences


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("One came. Two left! Did three? Yes.", ["One came.", "Two left!", "Did three?", "Yes."]),
        ("Dr. Smith met J. R. Brown at 5 p.m. on Monday. He left.", ["Dr. Smith met J. R. Brown at 5 p.m. on Monday.", "He left."]),
        (
            "See e.g. the notes of the U.S. Senate. Fig. 3 shows 2.5 units.",
            ["See e.g. the notes of the U.S. Senate.", "Fig. 3 shows 2.5 units."],
        ),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("no stop at all", ["no stop at all"]),
        ("   ", []),
    ],
)
def test_sentences(paragraph: str, sentences: list[str]):
    assert split_sentences(paragraph) == sentences


def test_no_word_is_lost():
    paragraph = "A b c. D e? (F g.) H i... J k. 7 l! M"
    assert " ".join(split_sentences(paragraph)).split() == paragraph.split()
