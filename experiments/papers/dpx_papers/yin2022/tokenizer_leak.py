"""Yin and Habernal 2022, section 4.1: a word-piece vocabulary that is fitted on the private corpus holds names of the corpus (L14).

Made-up names are planted in documents of a corpus, each a different number of times. A name that becomes a token of the vocabulary is read
off the published list of tokens, before any model is trained. A vocabulary from elsewhere cannot hold it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.data.declarations import Data
from dpx.declaration import declaration, require
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.report.shape import Part, verdict_table

_WORD = re.compile(r"[a-z]{4,}")
FITTED, PUBLIC, FOUND = "fitted on the corpus", "public", "a token: readable"


@declaration
class LegalTokenizerLeak:
    """Fits a vocabulary on documents with planted names, and shows which of the names it holds.

    Attributes:
        data: The documents.
        names: Made-up names that are planted.
        times: How often each name is planted.
        size: Tokens of the vocabulary.
        public_vocabulary: File of tokens that nobody fitted on the corpus.
        seed: Fixes all randomness of the analysis.
    """

    data: Data
    names: Sequence[str]
    times: Sequence[int]
    size: int
    public_vocabulary: str
    seed: int = 0

    def __post_init__(self) -> None:
        are_words = all(_WORD.fullmatch(name) for name in self.names)
        require(are_words, f"analysis.names={list(self.names)}", "a name is one word of four or more letters a to z", "Change the names")
        each = len(self.names) == len(self.times) > 0 and min(self.times) > 0
        require(each, f"analysis.times={list(self.times)}", "every name has one number of times, 1 or more", "Give as many as names")

    def __call__(self) -> list[Table]:
        from dpx.data.sources import open_source
        from dpx.data.vocabulary import fit, read

        # Read first: a path that is wrong is reported before the corpus is read.
        public = set(read(Path(self.public_vocabulary), 1 << 20))
        corpus = ["\n".join(document.paragraphs) for document in open_source(self.data.source).documents()]
        fitted = set(fit(self._planted(corpus), self.size))
        clean = set(fit(iter(corpus), self.size))
        rows = [
            (name, times, kind, name in tokens, FOUND if name in tokens else "not a token")
            for kind, tokens in ((FITTED, fitted), ("fitted without the names", clean), (PUBLIC, public))
            for name, times in zip(self.names, self.times, strict=True)
        ]
        found = Table("names", ("name", "times", "vocabulary", "is_token", "found"), tuple(rows), "planted names among the tokens", NOTES)
        return [found, self._own(corpus, clean, public), verdict_table(judged(found.as_json()["rows"]))]

    def _planted(self, corpus: Sequence[str]) -> Iterator[str]:
        """The corpus, with each name put behind that many documents, drawn at random."""
        draws, behind = np.random.default_rng(self.seed), dict[int, list[str]]()
        for name, times in zip(self.names, self.times, strict=True):
            for place in draws.integers(len(corpus), size=times).tolist():
                behind.setdefault(place, []).append(name.capitalize())
        for place, text in enumerate(corpus):
            yield " ".join([text, *behind.get(place, ())])

    def _own(self, corpus: Sequence[str], fitted: set[str], public: set[str]) -> Table:
        """Words of the corpus itself that only few documents have and that are tokens: counts, without the words."""
        documents = Counter(word for text in corpus for word in set(_WORD.findall(text.lower())))
        rows = []
        for most in (1, 2, 5):
            rare = {word for word, count in documents.items() if count <= most}
            rows.append((most, len(rare), len(rare & fitted), len(rare & fitted - public)))
        columns = ("documents_at_most", "words", "tokens_of_the_fitted", "of_these_not_public")
        notes = ("words of four or more letters a to z; nothing is planted in this corpus",)
        return Table("own_words", columns, tuple(rows), "words of few documents that are tokens", notes)

    def pictures(self) -> list[Picture]:
        """Each name at the number of times that it occurs: whether it is a token, by vocabulary."""
        shared: dict[str, Any] = {"table": "names", "x": "times", "x_scale": "log", "marks": ("name",), "by": "found", "y_label": " "}
        panels = tuple(
            Lines(where=("vocabulary", kind), title=f"vocabulary: {kind}", x_label="times in the corpus", **shared)
            for kind in (FITTED, PUBLIC)
        )
        caption = "Made-up names planted in a corpus: a vocabulary fitted on it lists them as tokens, a public one lists none."
        return [Picture("legal_names", caption, panels)]


NOTES = (
    "a name is found if it is one whole token of the list; the names are made up and occur nowhere else",
    "a vocabulary fitted on protected text makes the guarantee none (data.vocabulary.fit_on=protected)",
)


def judged(rows: Sequence[dict[str, Any]]) -> list[Part]:
    """The verdicts: the most frequent name is found in the fitted vocabulary, and none in one that did not see it."""
    found = {
        kind: [row["name"] for row in rows if row["vocabulary"] == kind and row["is_token"]] for kind in {row["vocabulary"] for row in rows}
    }
    often = max(rows, key=lambda row: row["times"])
    least = min((row["times"] for row in rows if row["vocabulary"] == FITTED and row["is_token"]), default=None)
    others = sorted(name for kind, names in found.items() if kind != FITTED for name in names)
    shown = f"{len(found[FITTED])} of {len({row['name'] for row in rows})} names; fewest times of one that is found: {least}"
    return [
        Part.of("planted names are tokens of the vocabulary that is fitted on the corpus", often["name"] in found[FITTED], shown),
        Part.of("no planted name is a token of a vocabulary that did not see the corpus with it", not others, ", ".join(others) or "none"),
    ]
