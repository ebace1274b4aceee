"""Documents to token rows: sentences, WordPiece ids, segment pairs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dpx.data.declarations import Data
from dpx.data.keyed import KeyedHash, Split
from dpx.data.pairs import Row, Tokens, paired_rows, single_rows
from dpx.data.sentences import split_sentences
from dpx.data.vocabulary import tokenizer_of

_BLOCK_CHARACTERS = 1_000_000  # tokenized at once: enough to keep every core busy, little enough to forget


@dataclass(frozen=True, slots=True)
class UnitDocument:
    """A document, the unit it belongs to, and the hash of its content."""

    unit_id: str
    content: str
    paragraphs: tuple[str, ...]


class RowCutter:
    """Cuts documents into rows, some megabytes of text at a time; the order of documents is kept."""

    def __init__(self, data: Data, keyed: KeyedHash, pieces: list[str]):
        self._data, self._keyed = data, keyed
        self._tokenizer = tokenizer_of(pieces)
        self._last: dict[Split, Sequence[Tokens]] = {}

    def cut(self, documents: Iterable[tuple[Split, UnitDocument]]) -> Iterator[tuple[Split, UnitDocument, list[Row]]]:
        for block in _blocks(documents):
            for (split, document), sentences in zip(block, self._tokens(block), strict=True):
                yield split, document, self._rows(split, document, sentences)

    def _tokens(self, block: list[tuple[Split, UnitDocument]]) -> Iterator[list[Tokens]]:
        """Sentences of each document as token ids; every sentence of the block goes to the tokenizer's threads together."""
        sentences = [[one for paragraph in document.paragraphs for one in split_sentences(paragraph)] for _, document in block]
        encodings = iter(self._tokenizer.encode_batch_fast([one for document in sentences for one in document], add_special_tokens=False))
        for document in sentences:
            yield [next(encodings).ids for _ in document]

    def _rows(self, split: Split, document: UnitDocument, sentences: list[Tokens]) -> list[Row]:
        data = self._data
        draws = self._keyed.draws("rows", document.unit_id, document.content)
        if data.pairs == "none":
            return single_rows(sentences, room=data.sequence_length - 2, short_sequence_rate=data.short_sequence_rate, draws=draws)
        donor: Sequence[Tokens] = ()
        if data.pairs == "cross_document":
            # The donor is the document before, of the same split: deleting a document then changes the rows of one other.
            donor = self._last.get(split, ())
            self._last[split] = [sentence for sentence in sentences if sentence] or donor
        room = data.sequence_length - 3
        return paired_rows(sentences, room=room, short_sequence_rate=data.short_sequence_rate, draws=draws, donor=donor)


def _blocks(documents: Iterable[tuple[Split, UnitDocument]]) -> Iterator[list[tuple[Split, UnitDocument]]]:
    block: list[tuple[Split, UnitDocument]] = []
    characters = 0
    for split, document in documents:
        block.append((split, document))
        characters += sum(map(len, document.paragraphs))
        if characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block
