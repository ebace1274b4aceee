"""Cuts a paragraph into sentences."""

import re

# An end of sentence: a stop, closing marks, blanks, then what may open the next one.
_END = re.compile(r"""[.!?]["')\]\u2019\u201d]*\s+(?=["'(\[\u2018\u201c]?[A-Z0-9\u00c0-\u00de])""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Gen|Col|Lt|Sgt|Rev|Hon|Gov|Sen|Rep|vs|etc|cf|al|approx|"
    r"Fig|Figs|Eq|Eqs|Sec|Ch|No|Nos|Vol|vol|pp|ed|eds|Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)$"
)


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph in order, without empty ones; an initial or a common abbreviation does not end a sentence."""
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        if paragraph[end.start()] == "." and _ABBREVIATION.search(paragraph, max(0, end.start() - 12), end.start()):
            continue
        sentences.append(paragraph[start : end.end()].strip())
        start = end.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]
