"""Converts documents and examples to rows: sentences, WordPiece ids, segment pairs, marks.

Shape legend: n rows of one document, C texts of an example, T positions of a text.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpx.data import completions
from dpx.data.completions import ChatTemplate, ConversationCutter
from dpx.data.declared_data import Data
from dpx.data.documents import Document, Example, Prompted
from dpx.data.labelled import Table
from dpx.data.pairs import Row, Tokens, one_cut, paired_rows, single_rows
from dpx.data.schema import Columns
from dpx.data.tokenizer import TextTokenizer
from dpx.data.unit_names import KeyedHash, Split
from dpx.declaration import require

COUNTED = ("texts", "texts_cut", "completions_cut", "documents_without_rows", "tokens", "tokens_cut", *completions.COUNTED)
_BLOCK_CHARACTERS = 1_000_000  # tokenized at once: enough to keep every core busy, and a small amount of memory
# An end of sentence: a stop, closing marks, blanks, then what may open the next one.
_END = re.compile(r"""[.!?]["')\]\u2019\u201d]*\s+(?=["'(\[\u2018\u201c]?[A-Z0-9\u00c0-\u00de])""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Gen|Col|Lt|Sgt|Rev|Hon|Gov|Sen|Rep|vs|etc|cf|al|approx|"
    r"Fig|Figs|Eq|Eqs|Sec|Ch|No|Nos|Vol|vol|pp|ed|eds|Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)$"
)


@dataclass(frozen=True, slots=True)
class UnitDocument:
    """Holds a document or an example, the unit that it belongs to, and the hash of its content."""

    unit_id: str
    content: str
    source: Document | Example | Prompted


class RowCutter:
    """Cuts documents into rows, some megabytes of text at a time; the order of documents is kept.

    Its `counts` have by split, as `COUNTED`, the texts of examples, texts too long for a row, and of running text the documents without a
    row, the tokens, and those in no row.
    """

    def __init__(self, data: Data, keyed: KeyedHash, tokenizer: TextTokenizer):
        self._data, self._keyed = data, keyed
        self._tokenizer, self._schema = tokenizer, data.columns or {}
        self._last: dict[Split, Sequence[Tokens]] = {}
        self.counts: dict[Split, Counter[str]] = defaultdict(Counter)
        source = data.source
        self._chats: ConversationCutter | None = None
        if isinstance(source, Table) and source.messages_field is not None:
            template = ChatTemplate(tokenizer, source.chat_date)
            self._chats = ConversationCutter(tokenizer, template, source.loss_on, data.sequence_length)

    def cut(self, documents: Iterable[tuple[Split, UnitDocument]]) -> Iterator[tuple[Split, UnitDocument, Columns]]:
        """Yields each document's rows, as columns of the data's schema [n, ...]."""
        for block in _blocks(documents):
            for (split, document), ids in zip(block, self._tokens(block), strict=True):
                if isinstance(document.source, Example):
                    yield split, document, self._example(split, document.source, ids)
                elif isinstance(document.source, Prompted) and self._chats is not None:
                    yield split, document, self._conversation(self._chats, split, document.source)
                elif isinstance(document.source, Prompted):
                    yield split, document, self._prompted(split, document.source, *ids)
                else:
                    rows = self._rows(split, document, ids)
                    self.counts[split]["documents_without_rows"] += not rows
                    self.counts[split]["tokens"] += sum(map(len, ids))
                    # With cuts, an epoch takes one row of a document by design.
                    self.counts[split]["tokens_cut"] += sum(row.cut for row in rows) if self._data.cuts is None else 0
                    columns = self._marked([(row.first, row.second) for row in rows])
                    if "is_next" in self._schema:
                        columns["is_next"] = np.array([row.is_next for row in rows], np.int32)
                    yield split, document, columns

    def _tokens(self, block: list[tuple[Split, UnitDocument]]) -> Iterator[list[Tokens]]:
        """Returns the texts of each document as token ids; all texts of a block are tokenized together, in the tokenizer's threads."""
        texts = [self._texts(document.source) for _, document in block]
        encodings = iter(
            self._tokenizer.tokenizer.encode_batch_fast([one for document in texts for one in document], add_special_tokens=False)
        )
        for document in texts:
            yield [next(encodings).ids for _ in document]

    def _texts(self, source: Document | Example | Prompted) -> list[str]:
        """Returns the texts that are tokenized: a document's sentences, an example's segments, or a prompt, its completion, and both.

        A conversation has none: how many of its turns fit is known by their tokens alone.
        """
        if isinstance(source, Document):
            return [one for paragraph in source.paragraphs for one in split_sentences(paragraph)]
        if isinstance(source, Example):
            return list(source.paragraphs)
        return [*source.texts, "".join(source.texts)] if source.chat is None else []

    def _rows(self, split: Split, document: UnitDocument, sentences: list[Tokens]) -> list[Row]:
        data = self._data
        draws = self._keyed.draws("rows", document.unit_id, document.content)
        numbers = range(1, data.repeats if split == "protected" else 1)
        if data.pairs == "none" and data.cuts is None:
            room, rate = data.sequence_length - 2, data.short_sequence_rate
            return single_rows(sentences, room=room, short_sequence_rate=rate, draws=draws, copies=len(numbers))
        donor: Sequence[Tokens] = ()
        if data.pairs == "cross_document":
            # The donor is the previous document of the same split: deleting a document then changes the rows of one other.
            donor = self._last.get(split, ())
            self._last[split] = [sentence for sentence in sentences if sentence] or donor
        is_paired = data.pairs != "none"
        room = data.sequence_length - (2 + separators(self._tokenizer) if is_paired else 2)
        if data.cuts is None:
            copies = [self._keyed.draws("repeat", document.unit_id, document.content, number) for number in numbers]
            rate = data.short_sequence_rate
            return paired_rows(sentences, room=room, short_sequence_rate=rate, draws=draws, donor=donor, copies=copies)
        # The row of each epoch, a function of the document and the number of the epoch; one where nothing is trained on.
        options = {"room": room, "short_sequence_rate": data.short_sequence_rate, "is_paired": is_paired, "donor": donor}
        rows = []
        for number in range((data.cuts or 1) if split == "protected" else 1):
            rows += one_cut(sentences, draws=self._keyed.draws("cut", document.unit_id, document.content, number), **options)
        return rows

    def _marked(self, texts: list[tuple[Tokens, Tokens]]) -> Columns:
        """Returns the columns of running text, [CLS] A [SEP] B [SEP] (or [CLS] A [SEP]) and padding, as `marked_examples` does."""
        special = self._tokenizer.special
        first, last = [special.cls_id], [special.sep_id]
        before_second = last * separators(self._tokenizer)
        rows = [
            ([*first, *a, *before_second, *b, *last], 1 + len(a) + len(before_second)) if b else ([*first, *a, *last], len(a) + 2)
            for a, b in texts
        ]
        return _padded(rows, special.pad_id, self._data.sequence_length)

    def _example(self, split: Split, example: Example, segments: list[Tokens]) -> Columns:
        """Returns one row: the texts, each cut to fit, and the label."""
        segment_iterator = iter(segments)
        texts = [(next(segment_iterator), next(segment_iterator)) if len(text) > 1 else (next(segment_iterator),) for text in example.texts]
        marked = marked_examples(self._tokenizer, texts, self._data.sequence_length)
        reason = "has a text in which the tokenizer reads no token, and it puts none around it"
        require(bool((marked["length"] > 0).all()), example.where, reason, "Remove the row")
        self.counts[split]["texts"] += len(texts)
        length = self._data.sequence_length
        self.counts[split]["texts_cut"] += sum(sum(map(len, text)) > _room(self._tokenizer, text, length) for text in texts)
        one = {name: values.reshape(1, *self._schema[name].shape) for name, values in marked.items()}
        if "target" in self._schema:
            is_known, target = example.label is not None, example.label or 0.0
            return one | {"target": np.array([target], np.float32), "has_target": np.array([is_known], np.int32)}
        return one | {"labels" if "labels" in self._schema else "label": np.array([example.label], np.int32)}

    def _prompted(self, split: Split, source: Prompted, prompt: Tokens, completion: Tokens, both: Tokens) -> Columns:
        """Returns one row: the prompt, cut from its left, and the completion, cut at its end if it does not fit alone.

        The row has the tokens of `both` as one text if they begin with those of the prompt, which is what people send. A tokenizer may
        join the end of a prompt to the beginning of its completion, which then keeps its own tokens.

        A prompt has before it what the tokenizer puts before a text, and the mark that ends a text is learnt as the completion's end.
        """
        special, length = self._tokenizer.special, self._data.sequence_length
        completion = both[len(prompt) :] if both[: len(prompt)] == prompt else completion
        require(len(completion) > 0, source.where, "has an empty completion: the tokenizer reads no token in it", "Remove the row")
        begin, completion = list(self._tokenizer.begins), [*completion, special.sep_id]
        answer = completion[: length - len(begin)]
        room = length - len(begin) - len(answer)
        kept = prompt[max(0, len(prompt) - room) :]
        self.counts[split]["texts"] += 1
        self.counts[split]["texts_cut"] += len(kept) < len(prompt) or len(answer) < len(completion)
        self.counts[split]["completions_cut"] += len(answer) < len(completion)
        return _padded([([*begin, *kept, *answer], len(begin) + len(kept))], special.pad_id, length)

    def _conversation(self, chats: ConversationCutter, split: Split, source: Prompted) -> Columns:
        """Returns the row of a conversation, or no row if nothing of it is left."""
        assert source.chat is not None
        self.counts[split]["texts"] += 1
        row = chats.row(source.where, source.chat, self.counts[split])
        length = self._data.sequence_length
        columns = _padded([] if row is None else [(row.tokens, row.start)], self._tokenizer.special.pad_id, length)
        if "is_learnt" in self._schema:
            columns["is_learnt"] = np.zeros((len(columns["length"]), length), np.int32)
            if row is not None and row.is_learnt is not None:
                columns["is_learnt"][0, : len(row.tokens)] = row.is_learnt
        return columns


def marked_examples(tokenizer: TextTokenizer, texts: Sequence[Sequence[Tokens]], sequence_length: int) -> Columns:
    """Returns texts of examples, one or two each, cut to fit, with the marks that the tokenizer puts around them.

    They are cut as transformers does: the longer one of two first; of two that are equally long the second keeps one more. The columns
    are `tokens` [n,T], with padding after each row, `segment_start` and `length` [n].
    """
    around, rows = (tokenizer.around_one, tokenizer.around_two), []
    for text in texts:
        room = _room(tokenizer, text, sequence_length)
        if sum(map(len, text)) > room:
            kept = [room]
            if len(text) == 2:
                of_shorter = min(*map(len, text), room // 2)
                kept = [room - of_shorter, of_shorter] if len(text[0]) > len(text[1]) else [of_shorter, room - of_shorter]
            sizes = zip(text, kept, strict=True)
            text = [one[max(0, len(one) - size) :] if tokenizer.cuts_left else one[:size] for one, size in sizes]
        rows.append(around[len(text) - 1].row(*text))
    return _padded(rows, tokenizer.special.pad_id, sequence_length)


def separators(tokenizer: TextTokenizer) -> int:
    """Returns the number of marks between two texts of a pair of running text."""
    return max(1, len(tokenizer.around_two.between))


def _padded(rows: Sequence[tuple[Tokens, int]], pad_id: int, sequence_length: int) -> Columns:
    """Returns `tokens` [n,T], `segment_start` and `length` [n] of rows and the starts of their second segments."""
    tokens = np.full((len(rows), sequence_length), pad_id, np.int32)
    for number, (ids, _) in enumerate(rows):
        tokens[number, : len(ids)] = ids
    starts, lengths = ([start for _, start in rows], [len(ids) for ids, _ in rows])
    return {"tokens": tokens, "segment_start": np.array(starts, np.int32), "length": np.array(lengths, np.int32)}


def _room(tokenizer: TextTokenizer, text: Sequence[Tokens], sequence_length: int) -> int:
    """Returns how many tokens of both segments fit a row, with their marks."""
    room = sequence_length - (tokenizer.around_one if len(text) == 1 else tokenizer.around_two).count
    reason = "leaves no room for a text beside the marks that the tokenizer puts around it"
    require(room > 0, f"data.sequence_length={sequence_length}", reason, "Raise it")
    return room


def _blocks(documents: Iterable[tuple[Split, UnitDocument]]) -> Iterator[list[tuple[Split, UnitDocument]]]:
    block: list[tuple[Split, UnitDocument]] = []
    characters = 0
    for split, document in documents:
        block.append((split, document))
        characters += sum(map(len, document.source.paragraphs))
        if characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def split_sentences(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph in order, without empty ones; an initial or a common abbreviation does not end a sentence."""
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        if paragraph[end.start()] == "." and _ABBREVIATION.search(paragraph, max(0, end.start() - 12), end.start()):
            continue
        sentences.append(paragraph[start : end.end()].strip())
        start = end.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]
