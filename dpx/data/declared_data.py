"""Declares the source of the text and its conversion to rows."""

from collections.abc import Sequence
from typing import Literal

from dpx.data.labelled import Table, require_labels
from dpx.data.schema import PackageSource, Schema, classes, running_text, texts
from dpx.data.unit_names import SPLITS, Split
from dpx.declaration import declaration, require
from dpx.privacy.declared_privacy import Privacy


@declaration
class Vocabulary:
    """Declares a WordPiece vocabulary that is fitted on a split of the data, or read from a file.

    Attributes:
        size: Rows of the embedding table; a file may hold fewer tokens.
        path: File with one token a line; null fits the vocabulary.
        fit_on: Split on which it is fitted, or was; protected is allowed and makes the guarantee none.
        disjoint_from: Texts that the file was learnt from, by name, which share no unit with this data, by the user's word.
    """

    size: int
    path: str | None = None
    fit_on: Literal["public", "protected"] = "public"
    disjoint_from: Sequence[str] = ()

    def __post_init__(self) -> None:
        require(
            self.path is not None or not self.disjoint_from,
            "data.vocabulary.disjoint_from",
            "a vocabulary that is fitted on this run's own data shares its units",
            "Remove it, or name a file with data.vocabulary.path",
        )
        # A vocabulary that is given, such as a checkpoint's own, has the size that it has.
        require(
            self.size >= 64 or (self.path is not None and self.size >= 1),
            f"data.vocabulary.size={self.size}",
            "the vocabulary is too small for the special tokens and an alphabet",
            "Use 64 or more",
        )


class _RunningText:
    """Is the base class of every source of running text."""

    def columns(self, sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
        """Returns the columns of marked texts and, for pairs, whether the second segment truly follows the first."""
        return running_text(sequence_length, vocabulary_size, is_paired)


@declaration
class Embedded(_RunningText):
    """Reads English text that every installation of the project has: documentation of Python and of the dependencies."""

    kind: Literal["embedded"] = "embedded"


@declaration
class TextFiles(_RunningText):
    """Reads the user's `.txt[.gz]` and `.jsonl[.gz]` files.

    Attributes:
        paths: Files, folders and patterns such as texts/*.txt, or one of them.
        text_field: Field of a .jsonl line that holds the text.
        unit_field: Field of a .jsonl line that names the owner of the document; documents with the same value are one unit.
        document_per: What a document is: of .txt a file or a line; of .jsonl a line of the file, or with paragraph each line of a
            record's text.
        equal_rows: Whether documents of equal content, without a named unit, count as one document and one unit (remove), or stay separate
            documents, each a unit, all in one split (keep).
    """

    paths: str | Sequence[str]
    text_field: str = "text"
    unit_field: str | None = None
    document_per: Literal["file", "line", "paragraph"] = "file"
    equal_rows: Literal["keep", "remove"] = "remove"
    kind: Literal["text"] = "text"


@declaration
class Synthetic(_RunningText):
    """Generates documents of a known Markov process, whose best possible masked-token loss can be computed.

    Attributes:
        documents: Number of documents.
        words_per_document: Words of a document.
        states: Number of different words.
        seed: Fixes the generated text.
    """

    documents: int
    words_per_document: int
    states: int
    seed: int = 0
    kind: Literal["synthetic"] = "synthetic"

    def __post_init__(self) -> None:
        require(
            self.states >= 8,
            f"data.source.states={self.states}",
            "the Markov chain needs at least 8 states, because it moves up to seven states ahead",
            "Use 8 or more",
        )
        require(self.documents > 0, f"data.source.documents={self.documents}", "the corpus would be empty", "Use 1 or more")
        require(
            self.words_per_document > 0,
            f"data.source.words_per_document={self.words_per_document}",
            "the documents would be empty",
            "Use 1 or more",
        )


@declaration
class SyntheticLabels:
    """Generates short labelled texts of made-up words.

    The words form as many groups as there are labels, in this order. Half of a text's words are from its label's group and the
    others from any group, so a text of w words determines its label except with a probability that falls with w. All labels are equally
    likely.

    Attributes:
        examples: Number of texts.
        labels: Names of the classes.
        shortest: Words of the shortest text.
        longest: Words of the longest text.
        states: Number of different words.
        seed: Fixes the generated text.
    """

    examples: int
    labels: Sequence[str]
    shortest: int = 3
    longest: int = 24
    states: int = 64
    seed: int = 0
    kind: Literal["synthetic_labels"] = "synthetic_labels"

    def __post_init__(self) -> None:
        require(self.examples > 0, f"data.source.examples={self.examples}", "the corpus would be empty", "Use 1 or more")
        require_labels(self.labels)
        require(
            1 <= self.shortest <= self.longest,
            f"data.source.shortest={self.shortest}, longest={self.longest}",
            "no text length is between these bounds",
            "Use 1 <= shortest <= longest",
        )
        count = len(self.labels)
        require(
            self.states >= count,
            f"data.source.states={self.states}",
            f"each of the {count} labels needs its own word",
            f"Use {count} or more",
        )

    def columns(self, sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
        """Returns the columns of marked texts and their labels."""
        return texts(sequence_length, vocabulary_size) | {"label": classes(len(self.labels))}


@declaration
class Hub(_RunningText):
    """Reads corpora through the `datasets` library; local paths work too.

    Attributes:
        corpora: The corpora, each with name and, where needed, config, split (train), text_field (text), unit_field and revision.
        streaming: Whether rows are read as they arrive instead of downloaded first.
        equal_rows: Whether rows of equal content are removed but for one, as for text files.
    """

    corpora: Sequence[dict[str, str | None]]
    streaming: bool = False
    equal_rows: Literal["keep", "remove"] = "remove"
    kind: Literal["hub"] = "hub"

    def __post_init__(self) -> None:
        known = {"name", "config", "split", "text_field", "unit_field", "revision"}
        for corpus in self.corpora:
            require(bool(corpus.get("name")), f"data.source.corpora={dict(corpus)}", "the corpus has no name", "Give it a name")
            extra = sorted(set(corpus) - known)
            require(not extra, f"data.source.corpora: {', '.join(extra)}", "a corpus has no such key", f"Use {', '.join(sorted(known))}")
        read = [(one["name"], one.get("config"), one.get("split") or "train", one.get("revision")) for one in self.corpora]
        repeated = [str(one[0]) for one in read if read.count(one) > 1]
        require(not repeated, f"data.source.corpora: {', '.join(repeated[:1])}", "each of its rows would count twice", "Name it once")


@declaration
class RandomRows:
    """Generates rows of random tokens and labels for timing or planning a step. They contain no text to train on."""

    kind: Literal["random"] = "random"


Source = Embedded | TextFiles | Table | Synthetic | SyntheticLabels | Hub | RandomRows | PackageSource


@declaration
class Data:
    """Declares a corpus, its vocabulary, its splits and the form of its rows.

    Documents are divided into public, held-out and protected splits by a hash of the unit id. With `heldout_by=first` the held-out ones are
    instead the first documents in the order of the files, duplicates counted; a later document that repeats one of them is left out, and
    `public_fraction` is a share of the others. A table's test set is a separate split, or is the held-out split (`Table.select`).

    Attributes:
        name: Name of the data in statements and reports.
        source: Where the text is read from.
        vocabulary: The tokens.
        sequence_length: Tokens of a row.
        pairs: Whether a row holds two segments: of the same document, of two documents, or none.
        short_sequence_rate: Share of the rows that are cut shorter at random, as BERT's generator does.
        cuts: Rows of each protected document, each from a random sentence on; null cuts the whole text once.
        repeats: Rows of each passage of the protected text. Segments are paired and trimmed again for each row, as BERT's generator does;
            masks are drawn again at every step.
        public_fraction: Share of the units that are public; vocabularies are fitted on them.
        heldout_fraction: Share of the units that are held out for evaluation.
        heldout_by: How the held-out units are chosen: by the hash, or as the first in the order of the files.
        split_salt: Text that is hashed with the unit id; another one gives other splits.
        declared_size: Public number of rows, or of units under privacy.unit_mode=sample_units; required under add_remove, and for plans
            before the data is prepared.
        allow_other_size: Whether a declared size that the text does not give is accepted, where the number is public: steps then draw
            more or fewer rows than the batch size, by the ratio of both numbers.
        directory: Folder of the prepared rows.
    """

    name: str
    source: Source
    vocabulary: Vocabulary
    sequence_length: int
    pairs: Literal["none", "same_document", "cross_document"] = "same_document"
    short_sequence_rate: float = 0.1
    cuts: int | None = None
    repeats: int = 1
    public_fraction: float = 0.05
    heldout_fraction: float = 0.05
    heldout_by: Literal["hash", "first"] = "hash"
    split_salt: str = "dpx"
    declared_size: int | None = None
    allow_other_size: bool = False
    directory: str = "outputs/data"

    def __post_init__(self) -> None:
        require(
            self.sequence_length >= 8,
            f"data.sequence_length={self.sequence_length}",
            "is too short for a pair of texts with its special tokens",
            "Use 8 or more",
        )
        require(
            0 <= self.public_fraction and 0 < self.heldout_fraction and self.public_fraction + self.heldout_fraction < 1,
            f"data.public_fraction={self.public_fraction}, heldout_fraction={self.heldout_fraction}",
            "the splits leave nothing to train on",
            "Keep their sum below 1, public_fraction at 0 or above, and heldout_fraction above 0",
        )
        require(
            self.heldout_by == "hash" or not (isinstance(self.source, Table) or self.labels or self.names_units),
            f"data.heldout_by={self.heldout_by} with data={self.name}",
            "a unit may have several documents in the files, and one unit cannot be both held out and trained on",
            "Use data.heldout_by=hash, or running text without data.source.unit_field",
        )
        keeps_equal = isinstance(self.source, TextFiles | Hub) and self.source.equal_rows == "keep"
        require(
            self.heldout_by == "hash" or not keeps_equal,
            f"data.heldout_by={self.heldout_by}, data.source.equal_rows=keep",
            "equal documents could be both held out and trained on",
            "Use data.heldout_by=hash, or data.source.equal_rows=remove",
        )
        require(
            0 <= self.short_sequence_rate <= 1,
            f"data.short_sequence_rate={self.short_sequence_rate}",
            "is not a rate between 0 and 1",
            "Use a value between 0 and 1",
        )
        require(
            self.cuts is None or (self.cuts > 0 and not self.labels),
            f"data.cuts={self.cuts}",
            "is not a count of rows that are cut from each document of running text",
            "Use 1 or more (one for each epoch), or null to cut the whole text into rows",
        )
        require(
            self.repeats == 1 or (self.repeats > 1 and self.cuts is None and not self.labels and isinstance(self.source, _RunningText)),
            f"data.repeats={self.repeats}",
            "is not how often the passages of running text are cut into rows, or is given together with data.cuts",
            "Use 1 or more with running text and data.cuts=null",
        )
        require(
            self.declared_size is None or self.declared_size > 0,
            f"data.declared_size={self.declared_size}",
            "a corpus has at least one row",
            "Give a positive count",
        )

        require(
            self.pairs == "none" or not self.labels,
            f"data.pairs={self.pairs} with data={self.name}",
            "a labelled text (or its given pair of texts) already is one row, so dpx builds no pairs",
            "Use data.pairs=none",
        )

    @property
    def labels(self) -> Sequence[str]:
        """The labels by number; empty for running text. If a table declares no labels, they are read from its rows."""
        return self.source.classes if isinstance(self.source, Table) else getattr(self.source, "labels", ())

    @property
    def known_as(self) -> Sequence[str]:
        """The names under which the data is known to others."""
        if isinstance(self.source, Hub):
            return [str(corpus["name"]).split("/")[-1] for corpus in self.source.corpora]
        return [*self.source.known_as, *self.source.hub_names] if isinstance(self.source, Table) else ()

    @property
    def learns_labels(self) -> bool:
        """Whether the list of labels is learnt from the protected rows."""
        source = self.source
        if not isinstance(source, Table) or source.has_completions:
            return False
        return source.labels is None and source.target_field is None and source.label_names is None

    @property
    def test_split(self) -> Split | None:
        """The split that holds the rows of a test set; `None` without a test set."""
        if not isinstance(self.source, Table) or self.source.test_paths is None:
            return None
        return "heldout" if self.source.select == "test" else "test"

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the rows are divided into."""
        return (*SPLITS, "test") if self.test_split == "test" else SPLITS

    @property
    def columns(self) -> Schema | None:
        """The columns of a row from this source; `None` for random rows, which have the columns that the task reads."""
        if isinstance(self.source, RandomRows):
            return None
        return self.source.columns(self.sequence_length, self.vocabulary.size, self.pairs != "none")

    @property
    def copies(self) -> int:
        """How many rows hold the same text of the source, which dpx cuts so often."""
        return self.cuts or self.repeats

    def require_fits(self, privacy: Privacy) -> None:
        """Raises `ConfigError` if this data does not name the unit of privacy, or if a row would belong to more than one unit."""
        require(
            privacy.unit != "author" or self.names_units,
            f"privacy.unit=author with data={self.name}",
            "the source does not say who wrote a document",
            "Name the field with data.source.unit_field=<column>, or use privacy.unit=document",
        )
        # Copies that hold text of one document alone belong to that document.
        copies = self.copies if self.pairs == "cross_document" else 1
        require(
            privacy.unit != "row" or privacy.rows_per_unit_max in (1, copies),
            f"privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
            f"with privacy.unit=row a unit has exactly {'one row' if copies == 1 else f'{copies} rows, the copies of one'}",
            f"Use privacy.rows_per_unit_max={copies}, or privacy.unit=document",
        )
        require(
            self.heldout_by == "hash" or privacy.adjacency != "add_remove",
            f"data.heldout_by={self.heldout_by}, privacy.adjacency=add_remove",
            "without one document, the border between held-out and protected documents would move past another one",
            "Use data.heldout_by=hash, or privacy.adjacency=zero_out",
        )

    @property
    def is_remote(self) -> bool:
        """Whether a count of its rows would start a download."""
        is_on_hub = isinstance(self.source, Hub) or (isinstance(self.source, Table) and bool(self.source.hub_names))
        return is_on_hub or (isinstance(self.source, PackageSource) and self.source.is_remote)

    @property
    def names_units(self) -> bool:
        """Whether the source names the owner of each document in a field of its records."""
        match self.source:
            case TextFiles() | Table():
                return self.source.unit_field is not None
            case Hub():
                return all(corpus.get("unit_field") for corpus in self.source.corpora)
            case PackageSource():
                return self.source.names_units
            case _:
                return False
