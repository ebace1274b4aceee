"""`data=pebbles`: documents that are made here, word by word."""

import random
from collections.abc import Iterator

from dpx.data.documents import Document
from dpx.data.schema import PackageSource
from dpx.declaration import declaration, require

WORDS = "round flat grey smooth wet small cold bright old heavy sunk warm".split()


@declaration
class Pebbles(PackageSource):
    """`documents` texts of `words` words each: after every word comes one of the two that follow it in `WORDS`."""

    documents: int
    words: int = 60
    kind: str = "pebbles"

    def __post_init__(self) -> None:
        require(self.documents > 0, f"data.source.documents={self.documents}", "the corpus would be empty", "Use 1 or more")

    def open(self) -> "_Pile":
        return _Pile(self)


class _Pile:
    def __init__(self, declared: Pebbles):
        self._declared = declared

    def fingerprint(self) -> str:
        return f"pebbles {self._declared.documents} {self._declared.words}"

    def documents(self) -> Iterator[Document]:
        """Each is drawn from its own number, so that none depends on how many there are."""
        for number in range(self._declared.documents):
            drawn, place, text = random.Random(f"pebbles {number}"), number, []
            for _ in range(self._declared.words):
                place = (place + drawn.choice((1, 2))) % len(WORDS)
                text.append(WORDS[place])
            yield Document(paragraphs=(" ".join(text).capitalize() + ".",), unit_id=f"pebbles/{number}")
