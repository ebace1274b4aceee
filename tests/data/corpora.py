"""Small corpora and declarations for the tests of this room."""

import json
import random
from pathlib import Path
from typing import Any

from dpx.data.declared_data import Data, TextFiles, Vocabulary
from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.privacy.declared_privacy import Privacy

PRIVACY = Privacy(delta=1e-5)
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_WORDS = "river stone bright window carry slowly under the a of to garden market paper winter follow answer seven silver ground".split()


def text(seed: int, sentences: int = 12) -> str:
    """Random English-looking sentences, two paragraphs."""
    draws = random.Random(seed)
    spoken = [" ".join(draws.choices(_WORDS, k=draws.randint(4, 14))).capitalize() + "." for _ in range(sentences)]
    return " ".join(spoken[: sentences // 2]) + "\n" + " ".join(spoken[sentences // 2 :])


def records(count: int, sentences: int = 12) -> list[dict[str, str]]:
    return [{"id": f"doc-{number}", "text": text(number, sentences)} for number in range(count)]


def write_records(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_vocabulary(path: Path) -> Path:
    """Every word of the corpora, and letters for what is not among them."""
    letters = "abcdefghijklmnopqrstuvwxyz."
    pieces = [*SPECIAL_TOKENS, *_WORDS, *(letter for letter in letters if letter not in _WORDS), *(f"##{letter}" for letter in letters)]
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return path


def declared(folder: Path, *paths: Path, vocabulary: Vocabulary | None = None, unit_field: str | None = None, **settings: object) -> Data:
    """Text files prepared under `folder`, at 32 positions a row, a quarter public and a quarter held out."""
    given: dict[str, Any] = {name: settings.pop(name) for name in ("document_per", "equal_rows") if name in settings}
    source = TextFiles(paths=[str(path) for path in paths], unit_field=unit_field, **given)
    defaults: dict[str, object] = {"name": "test", "sequence_length": 32, "public_fraction": 0.25, "heldout_fraction": 0.25}
    return Data(source=source, vocabulary=vocabulary or Vocabulary(size=256), directory=str(folder / "stores"), **{**defaults, **settings})  # type: ignore[arg-type]
