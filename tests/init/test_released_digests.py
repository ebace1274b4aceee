"""No digest of protected content leaves: each string of a release that looks like one is a random name, keyed, or of a released file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dpx.config.declared_init import FromRun
from dpx.data import learnt_from
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import RunFolder
from dpx.files.weights import by_path, checksum
from dpx.init.parent import open_parent
from dpx.init.start import start as begin
from dpx.job.account import Account
from dpx.job.explain import Explain
from dpx.job.plan import Plan
from dpx.job.released_jobs import Evaluate, Export
from dpx.privacy.origins import Origin

from ..released_digests import held, of_data, unexplained
from .conftest import Place, statement

PROTECTED = ("data.vocabulary.fit_on=protected", "data.vocabulary.path=null")


@pytest.fixture(scope="module")
def fitted(place: Place) -> Path:
    """A run whose vocabulary was fitted on its protected text."""
    return place.train("digests_fitted", *PROTECTED)


def with_jobs(place: Place, path: Path, *overrides: str) -> Path:
    """The release of a run after every job that writes there."""
    experiment = place.declared(*overrides)
    for job in (Account(accountant="rdp"), Explain(), Plan()):
        job(experiment, RunFolder(path))
    return path / "release"


PUBLIC_SPLIT = pytest.param("vocabulary of the public split", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["vocabulary of a file", "vocabulary of protected text", PUBLIC_SPLIT])
def test_a_release_holds_no_digest_of_its_data(place: Place, parent: Path, fitted: Path, tmp_path: Path, kind: str):
    overrides = {"vocabulary of a file": (), "vocabulary of protected text": PROTECTED}.get(kind, ("data.vocabulary.path=null",))
    path = {"vocabulary of a file": parent, "vocabulary of protected text": fitted}.get(kind) or place.train("digests_split", *overrides)
    path, experiment = shutil.copytree(path, tmp_path / "run"), place.declared(*overrides)
    release = with_jobs(place, path, *overrides) if overrides == PROTECTED else path / "release"
    store = prepare(experiment.data, experiment.privacy)
    # A vocabulary of a file is public by the user's word, and the public split is public.
    words = store.manifest.vocabulary_checksum
    public = [] if kind == "vocabulary of protected text" else [words]
    assert unexplained(release, [path / "private"], public) == {}
    data = of_data(store, place.root / "one.txt") - set(public)
    assert len(data) > 4 and held(release, data) == []
    assert (words in (release / "privacy.json").read_text()) == bool(public)
    if overrides == PROTECTED:
        Evaluate()(experiment, RunFolder(path))
    Export(to=str(tmp_path / "exported"))(experiment, RunFolder(path))
    found = unexplained(tmp_path / "exported", [path / "private"], [*public, store.manifest.name])
    assert found == {} and held(tmp_path / "exported", data) == []


def test_a_file_of_words_of_protected_text_has_no_digest_over_two_hops(place: Place, fitted: Path, tmp_path: Path):
    """Its record names the text, also where the user declares it disjoint: the words are of that text still."""
    experiment = place.declared(*PROTECTED)
    store, file = prepare(experiment.data, experiment.privacy), tmp_path / "words.txt"
    shutil.copyfile(store.folder / "vocabulary.txt", file)
    learnt_from.write(file, learnt_from.of_store(store.manifest, "one"))
    overrides = (f"data.vocabulary.path={file}", "++data.vocabulary.disjoint_from=[one]")
    for name, further in (("digests_words", ()), ("digests_words_again", ("init=run", f"init.run={place.root}/outputs/digests_words"))):
        path = place.train(name, *overrides, *further, text="other")
        privates = [path / "private", place.root / "outputs" / "digests_words" / "private"]
        assert unexplained(path / "release", privates, [store.manifest.name]) == {}
        assert held(path / "release", of_data(store, place.root / "one.txt")) == []
        assert statement(path)["guarantee"] == "dp" and statement(path)["vocabulary"] == {"source": "file", "sha256": None}


# Each of both releases is walked as the one above.
@pytest.mark.slow
def test_one_row_changes_no_released_digest_but_those_of_released_files(place: Place, fitted: Path):
    """Two runs whose texts differ in one row: their vocabularies differ by it, and nothing that is released tells that."""
    lines = (place.root / "one.txt").read_text().splitlines()
    (place.root / "neighbour.txt").write_text("\n".join([*lines[:-1], " ".join(["unheard"] * 26)]) + "\n")
    stores = [prepare(one.data, one.privacy) for one in (place.declared(*PROTECTED, text=text) for text in ("one", "neighbour"))]
    assert stores[0].manifest.vocabulary_checksum != stores[1].manifest.vocabulary_checksum
    runs = [fitted, place.train("digests_neighbour", *PROTECTED, text="neighbour")]
    for path, store, text in zip(runs, stores, ("one", "neighbour"), strict=True):
        assert unexplained(path / "release", [path / "private"]) == {}
        assert held(path / "release", of_data(store, place.root / f"{text}.txt")) == []


def test_the_walk_finds_a_digest_that_nothing_explains(place: Place, fitted: Path, tmp_path: Path):
    path, experiment = shutil.copytree(fitted, tmp_path / "run"), place.declared(*PROTECTED)
    words = prepare(experiment.data, experiment.privacy).manifest.vocabulary_checksum
    for name, text in (("a.json", json.dumps({"a": [{"b": f"words {words}"}]})), ("a.md", f"({words[:12]})")):
        (path / "release" / name).write_text(text)
        assert [place.partition(":")[0] for place in unexplained(path / "release", [path / "private"])] == [name]
        assert held(path / "release", {words})
        (path / "release" / name).unlink()


@pytest.mark.parametrize(
    "name", ["digests_of_unknown", "digests_of_a_checkpoint", pytest.param("digests_of_a_run", marks=pytest.mark.slow)]
)
def test_a_start_that_is_neither_public_nor_released_is_not_named_by_a_digest(
    place: Place, parent: Path, fitted: Path, tmp_path: Path, name: str
):
    weights = {path: np.full_like(leaf, 0.5) for path, leaf in by_path(released(parent / "release" / "params")).items()}
    np.savez(tmp_path / "a.npz", **weights)  # pyright: ignore[reportArgumentType]
    digest = checksum(weights).removeprefix("sha256:")
    overrides = {
        "digests_of_unknown": ("init=file", f"init.file={tmp_path}/a.npz"),
        "digests_of_a_checkpoint": ("init=run", f"init.run={fitted}", "init.step=1", *PROTECTED),
        "digests_of_a_run": ("init=run", f"init.run={fitted}", *PROTECTED),
    }[name]
    path, experiment = place.train(name, *overrides), place.declared(*overrides)
    store, origins = prepare(experiment.data, experiment.privacy), statement(path)["init"]["origins"]
    words = [] if PROTECTED[0] in overrides else [store.manifest.vocabulary_checksum]
    privates = [path / "private", fitted / "private"] if name != "digests_of_unknown" else [path / "private"]
    assert unexplained(path / "release", privates, words) == {}
    assert held(path / "release", (of_data(store, place.root / "one.txt") | {digest}) - set(words)) == []
    assert bool(origins[0]["weights"]) == (name == "digests_of_a_run") and origins[0]["vocabulary" if words == [] else "name"]
    told = Origin(kind="file", name="a.npz", identity=f"sha256:{digest}", weights=f"sha256:{digest}", provenance="public")
    assert told.as_released().weights == told.weights and digest in told.label


def test_a_vocabulary_of_protected_text_is_compared_where_the_run_is_and_refused_elsewhere(place: Place, fitted: Path, tmp_path: Path):
    """Its own folder knows the checksum under private/; a copy of its release does not, so weights cannot begin a run from there."""
    began = place.declared("init=run", f"init.run={fitted}", *PROTECTED)

    store = prepare(began.data, began.privacy)
    assert begin(began.init, began.receiver, store, []).origins[0].vocabulary.sha256 == store.manifest.vocabulary_checksum
    other = place.declared(*PROTECTED, text="other")
    with pytest.raises(ConfigError, match="has another vocabulary than the weights were trained with"):
        Evaluate()(other, RunFolder(fitted))
    handed = shutil.copytree(fitted / "release", tmp_path / "handed")
    assert open_parent(FromRun(run=str(handed)), "init.run=handed").origins[0].vocabulary.sha256 is None
    elsewhere = place.declared("init=run", f"init.run={handed}", *PROTECTED)
    with pytest.raises(ConfigError, match="does not state the vocabulary that it was trained with"):
        begin(elsewhere.init, elsewhere.receiver, store, [])
