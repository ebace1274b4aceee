"""Where text comes from and how it becomes rows, as declared."""

from collections.abc import Sequence
from typing import Literal

from dpx.declaration import declaration, require


@declaration
class Vocabulary:
    """A WordPiece vocabulary: fitted on the public split (`path=None`), or brought as a file, one piece a line.

    `fit_on="protected"` is allowed and makes the guarantee `none`.
    """

    size: int
    path: str | None = None
    fit_on: Literal["public", "protected"] = "public"


@declaration
class Embedded:
    """English text found on every machine that installed the project: documentation of Python and of the dependencies."""

    kind: Literal["embedded"] = "embedded"


@declaration
class TextFiles:
    """The user's `.txt` (one document a file, or a line with `document_per="line"`) and `.jsonl[.gz]` files (one a line)."""

    paths: Sequence[str]
    text_field: str = "text"
    unit_field: str | None = None
    document_per: Literal["file", "line"] = "file"
    kind: Literal["text"] = "text"


@declaration
class Synthetic:
    """Documents of a known Markov process, whose best possible masked-token loss can be computed."""

    documents: int
    words_per_document: int
    states: int
    seed: int = 0
    kind: Literal["synthetic"] = "synthetic"


@declaration
class Hub:
    """Corpora through the `datasets` library: `(name, config, split, text field)` each; local paths work too."""

    corpora: Sequence[dict[str, str | None]]
    kind: Literal["hub"] = "hub"


Source = Embedded | TextFiles | Synthetic | Hub


@declaration
class Data:
    """A corpus, its vocabulary, its splits and the form of its rows.

    Documents fall into public / held-out / protected splits by a hash of the unit id with `split_salt`.
    `declared_size` is the public N: required under `add_remove`, used for plans before the data is prepared.
    """

    name: str
    source: Source
    vocabulary: Vocabulary
    sequence_length: int
    pairs: Literal["none", "same_document", "cross_document"] = "same_document"
    short_sequence_rate: float = 0.1
    public_fraction: float = 0.05
    heldout_fraction: float = 0.05
    split_salt: str = "dpx"
    declared_size: int | None = None
    directory: str = "outputs/data"

    def __post_init__(self) -> None:
        require(self.sequence_length >= 8, f"data.sequence_length={self.sequence_length}", "too short for a pair with its marks", "Use 8 or more")
        require(
            0 <= self.public_fraction and 0 < self.heldout_fraction and self.public_fraction + self.heldout_fraction < 1,
            f"data.public_fraction={self.public_fraction}, heldout_fraction={self.heldout_fraction}",
            "the splits leave nothing to train on",
            "Keep their sum below 1",
        )
        require(self.declared_size is None or self.declared_size > 0, f"data.declared_size={self.declared_size}", "a corpus holds at least one row", "Give a positive count")
