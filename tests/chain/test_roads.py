"""What flows into a stage over other stages, files and earlier runs counts in its claim and in that of the chain. Nothing is trained."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpx.data import learnt_from
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.records import from_json
from dpx.init.start import planned_start, start
from dpx.job.chain_stages import VOCABULARY
from dpx.privacy import origins
from tests.composed import composed
from tests.released_digests import unexplained

from .conftest import PRETRAIN, node, run

WORDS: dict[str, Any] = {"job": "prepare", "options": {"data": "synthetic"}, "values": {"data": {"vocabulary": {"fit_on": "protected"}}}}
# Another text than that of WORDS, and the same one again.
MIDDLE = {"options": PRETRAIN["options"], "values": {"privacy": {"delta": 1.0e-4}, "data": {"source": {"seed": 5}}}}
LAST = {"options": PRETRAIN["options"], "values": {"privacy": {"delta": 1.0e-4}}}


def planned(capsys: Any, **stages: dict[str, Any]) -> Any:
    """The claim of a chain by its plan."""
    folder = run(node(**copy.deepcopy(stages)), "plan")
    capsys.readouterr()
    return json.loads((folder / "release" / "plan.json").read_text())["claim"]


@pytest.fixture
def working(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("key", ["init", pytest.param("vocabulary", marks=pytest.mark.slow)])
def test_a_vocabulary_learnt_from_protected_rows_counts_over_a_stage_between(working, capsys, key):
    middle, last = MIDDLE | {"vocabulary": "words"}, LAST | {key: "middle"}
    # The stage between is apart from the words, so only the last one shares text with them.
    found = planned(capsys, words=WORDS, middle=middle | {"disjoint_from": ["words"]}, last=last)
    assert found["guarantee"] == "none" and "learnt from its protected text" in " ".join(found["reasons"])
    found = planned(capsys, words=WORDS, middle=middle | {"disjoint_from": ["words"]}, last=last | {"disjoint_from": ["middle"]})
    assert found["guarantee"] == "none"


# What a ledger and a statement say of a vocabulary is compared with an oracle in test_ancestry.py, and after training in
# tests/init/test_released_digests.py.
@pytest.mark.slow
def test_the_ledger_of_a_stage_names_the_text_of_its_vocabulary(working, capsys):
    words = WORDS | {"values": {"data": {"vocabulary": {"fit_on": "protected"}, "source": {"seed": 7}}}}
    # The stage `beside` fits its own vocabulary, and is declared apart from the text that the vocabulary of `last` is learnt from.
    stages = {
        "words": words,
        "last": LAST | {"vocabulary": "words", "disjoint_from": ["words"]},
        "beside": MIDDLE | {"disjoint_from": ["words"]},
    }
    expected = planned(capsys, **stages)
    folder = run(node(**copy.deepcopy(stages)))
    claimed = json.loads((folder / "release" / "chain.json").read_text())["claim"]
    assert (expected["guarantee"], claimed["guarantee"]) == ("dp", "dp")
    assert [one["epsilon"] for one in expected["protects"]] == [one["epsilon"] for one in claimed["protects"]]
    (last,) = folder.parent.glob("two_last-*")
    stated = json.loads((last / "release" / "privacy.json").read_text())
    (text,) = stated["init"]["origins"]
    assert (text["kind"], text["name"], text["relation"]) == ("text", "two_words", "disjoint") and stated["guarantee"] == "dp"
    assert any("data.vocabulary.disjoint_from" in line for line in stated["assumptions"])
    # Names of folders are of configs, and the ids of the chain and of the store are random.
    names = [*(place.name.rpartition("-")[2] for place in folder.parent.glob("two_*-*")), text["identity"]]
    names.append(json.loads((folder / "release" / "chain.json").read_text())["release"])
    assert unexplained(folder / "release", [place / "private" for place in folder.parent.glob("two_*-*")], names) == {}
    (kept,) = folder.parent.glob(f"two_words-*/private/{VOCABULARY}")
    # Without the word, by the vocabulary's own record, and over a copy of the file with its record.
    for place in (kept, Path(shutil.copytree(kept.parent, working / "copy")) / VOCABULARY):
        experiment = composed("model=micro", "data=synthetic", "data.vocabulary.size=1024", f"data.vocabulary.path={place}")[0]
        found = planned_start(experiment.init, experiment.receiver).origins
        assert "learnt from its protected text" in " ".join(origins.reasons(found)), place
    capsys.readouterr()


def test_stages_that_read_one_file_are_not_apart_by_anyones_word(working):
    for word in ({"disjoint_from": ["last"]}, {"provenance": "public"}):
        bare = {"options": LAST["options"] | {"mechanism": "none"}, "values": LAST["values"], **word}
        with pytest.raises(ConfigError, match="a whole file of this text is also in that of the stage last"):
            run(node(other=bare, last=LAST), "plan")


def test_a_vocabulary_beside_a_manifest_that_says_protected_has_no_guarantee(working):
    base = ("model=micro", "data=synthetic", "data.vocabulary.size=256")
    whole = composed(*base, "data.vocabulary.fit_on=protected")[0]
    store = prepare(whole.data, whole.privacy)
    file = store.folder / "vocabulary.txt"
    own = composed(*base, f"data.vocabulary.path={file}")[0]
    found = planned_start(own.init, own.receiver, prepare(own.data, own.privacy)).origins
    assert [one.kind for one in found] == ["text"] and "learnt from its protected text" in origins.reasons(found)[0]
    # A copy of the file somewhere else is known by its content.
    away = working / "away.txt"
    away.write_text(file.read_text())
    copied = composed(*base, f"data.vocabulary.path={away}")[0]
    assert planned_start(copied.init, copied.receiver).origins[0].identity == store.manifest.name
    (working / "folder").mkdir()
    (working / "folder" / "vocabulary.txt").write_text(file.read_text())
    assert learnt_from.learnt_from(working / "folder", store.folder.parent)[0].identity == store.manifest.name
    assert prepare(copied.data, copied.privacy).folder == prepare(copied.data, copied.privacy).folder
    # The second store keeps what the first one says, so a third run that takes the file from there knows it too.
    again = composed(*base, f"data.vocabulary.path={prepare(own.data, own.privacy).folder}/vocabulary.txt")[0]
    assert planned_start(again.init, again.receiver).origins == found
    word = composed(*base, f"data.vocabulary.path={file}", f"+data.vocabulary.disjoint_from=[{store.manifest.name}]")[0]
    # The word is false: it is the same text.
    with pytest.raises(ConfigError, match="a whole file of this text is also in that of"):
        start(word.init, word.receiver, prepare(word.data, word.privacy), ())
    file.write_text(file.read_text().replace("##", "#"))
    with pytest.raises(ConfigError, match="is not the vocabulary that manifest.json beside it lists"):
        planned_start(own.init, own.receiver)


def test_a_vocabulary_fitted_on_the_public_split_of_the_same_units_is_public(working):
    base = ("model=micro", "data=synthetic", "data.vocabulary.size=256")
    whole = composed(*base)[0]
    store = prepare(whole.data, whole.privacy)
    for other, is_known in (("data.source.seed=3", True), ("data.split_salt=another", False), ("data.public_fraction=0.01", False)):
        own = composed(*base, f"data.vocabulary.path={store.folder}/vocabulary.txt", other)[0]
        against = origins.reasons(planned_start(own.init, own.receiver).origins)
        assert bool(against) != is_known, other


def test_a_released_record_tells_nothing_of_the_data(working):
    whole = composed("model=micro", "data=synthetic", "data.vocabulary.size=256")[0]
    store = prepare(whole.data, whole.privacy)
    (kept,) = learnt_from.of_store(store.manifest, "made_up")
    assert kept.data == (store.manifest.checksum,) and kept.files == tuple(store.manifest.read_from)
    place = learnt_from.write(working, [kept], released=True)
    (released,) = from_json(learnt_from.LearntFrom, json.loads(place.read_text()), place).origins
    assert (released.data, released.files, released.identity) == ((None,), (), store.manifest.name)
    assert all(digest not in place.read_text() for digest in (*kept.files, str(kept.data[0])))
    # It is found by the name of the folder, and by that of a tokenizer's file in it.
    (working / "tokenizer.json").write_text("{}")
    assert learnt_from.learnt_from(working) == learnt_from.learnt_from(working / "tokenizer.json") == (released,)


def test_a_folder_that_dpx_wrote_without_the_record_is_of_unknown_origin(working):
    (working / "config.json").write_text(json.dumps({"dpx": "a_run"}))
    (found,) = learnt_from.learnt_from(working)
    assert "is missing" in origins.reasons([found])[0]


def test_copies_of_a_text_that_dpx_makes_are_rows_of_one_unit():
    text = ("model=micro", "data=text", "data.source.paths=none.txt", "data.cuts=10", "data.pairs=none")
    with pytest.raises(ConfigError, match="data.cuts=10 with privacy.unit=row: the text of each document is in 10 rows"):
        composed(*text)
    composed(*text, "privacy.unit=document", "privacy.rows_per_unit_max=10")
    composed(*text, "mechanism=none")
