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

from dpx.data.declared_data import Data
from dpx.declaration import require
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.report.shape import Part

_WORD = re.compile(r"[a-z]{4,}")
FITTED, PUBLIC = "fitted on the corpus", "public"


def _require_planted(declared: Any) -> None:
    names, times = list(declared.names), list(declared.times)
    are_words = all(_WORD.fullmatch(name) for name in names)
    require(are_words, f"analysis.names={names}", "a name is one word of four or more letters a to z", "Change the names")
    each = len(names) == len(times) > 0 and min(times) > 0
    require(each, f"analysis.times={times}", "every name has one number of times, 1 or more", "Give as many as names")


@analysis(_require_planted)
def legal_tokenizer_leak(data: Data, names: Sequence[str], times: Sequence[int], size: int, public_vocabulary: str, seed: int = 0) -> Made:
    """Fits a vocabulary on documents with planted names, and shows which of the names it holds.

    Attributes:
        data: The documents.
        names: Made-up names that are planted.
        times: How often each name is planted.
        size: Tokens of the vocabulary.
        public_vocabulary: File of tokens that nobody fitted on the corpus.
        seed: Fixes all randomness of the analysis.
    """
    from dpx.data.sources import open_source
    from dpx.data.tokenizer import fit, read_tokens

    # Read first: a path that is wrong is reported before the corpus is read.
    public = set(read_tokens(Path(public_vocabulary), 1 << 20))
    corpus = ["\n".join(document.paragraphs) for document in open_source(data.source).documents()]
    fitted, clean = (set(fit(texts, size)) for texts in (_planted(corpus, names, times, seed), iter(corpus)))
    kinds = {FITTED: fitted, "fitted without the names": clean, PUBLIC: public}
    found = frame(
        [(name, count, kind, name in tokens) for kind, tokens in kinds.items() for name, count in zip(names, times, strict=True)],
        columns=["name", "times", "vocabulary", "is_token"],
    )
    found["found"] = found["is_token"].map({True: "a token: readable", False: "not a token"})
    # Words of the corpus itself that only few documents have and that are tokens: counts, without the words.
    documents, own = Counter(word for text in corpus for word in set(_WORD.findall(text.lower()))), []
    for most in (1, 2, 5):
        rare = {word for word, count in documents.items() if count <= most}
        tokens = {"tokens_of_the_fitted": len(rare & clean), "of_these_not_public": len(rare & clean - public)}
        own.append({"documents_at_most": most, "words": len(rare)} | tokens)
    return {"names": found, "own_words": own, "verdicts": judged(found)}


def _planted(corpus: Sequence[str], names: Sequence[str], times: Sequence[int], seed: int) -> Iterator[str]:
    """The corpus, with each name put behind that many documents, drawn at random."""
    draws, behind = np.random.default_rng(seed), dict[int, list[str]]()
    for name, count in zip(names, times, strict=True):
        for place in draws.integers(len(corpus), size=count).tolist():
            behind.setdefault(place, []).append(name.capitalize())
    for place, text in enumerate(corpus):
        yield " ".join([text, *behind.get(place, ())])


def judged(rows: Any) -> list[Part]:
    """The verdicts: the most frequent name is found in the fitted vocabulary, and none in one that did not see it."""
    tokens = rows[rows["is_token"]]
    own, others = tokens[tokens["vocabulary"] == FITTED], tokens[tokens["vocabulary"] != FITTED]
    often, least = rows.loc[rows["times"].idxmax(), "name"], None if own.empty else own["times"].min()
    shown = f"{len(own)} of {rows['name'].nunique()} names; fewest times of one that is found: {least}"
    none = "no planted name is a token of a vocabulary that did not see the corpus with it"
    return [
        Part.of("planted names are tokens of the vocabulary that is fitted on the corpus", often in set(own["name"]), shown),
        Part.of(none, others.empty, ", ".join(sorted(others["name"])) or "none"),
    ]
