"""Opens the prepared data of released weights, after a check that both use one vocabulary."""

from pathlib import Path

from dpx.data import left_out
from dpx.data.declared_data import Data
from dpx.data.prepare import prepare
from dpx.data.store import VOCABULARY, Store
from dpx.declaration import require
from dpx.privacy.declared_privacy import Privacy
from dpx.statement.seals import STATEMENT, read_statement
from dpx.statement.statement_records import StudyStatement


def store_of(data: Data, privacy: Privacy, params: Path) -> Store:
    """Returns the prepared data of a run, whose vocabulary the weights in `params` use.

    Raises `ConfigError` if the vocabulary is known to be another one: every token would be read as another token.
    """
    store = prepare(data, privacy)
    require_vocabulary(params, store.manifest.vocabulary_checksum, store.folder)
    return store


def require_vocabulary(params: Path, checksum: str, where: Path) -> None:
    """Raises `ConfigError`, naming `where`, if the run of the weights in `params` read a vocabulary of another checksum.

    It is in the statement next to the weights, or, if the vocabulary is not public, in the run's private tree alone: a copy of `release/`
    cannot tell.
    """
    place = params.parent / STATEMENT
    statement = read_statement(place) if place.is_file() else None
    stated = None if statement is None or isinstance(statement, StudyStatement) else statement.vocabulary.sha256
    known = {stated} if stated else {one.vocabulary_checksum for one in left_out.manifests(place.parent.parent / "private")}
    require(
        not known or checksum in known,
        where,
        "has another vocabulary than the weights were trained with: the data, or the file that data.vocabulary.path names, has changed",
        f"Restore it, or add data.vocabulary.path=<{VOCABULARY} of the data prepared for the run>",
    )
