"""What would make a run cost less than it did is refused or takes the guarantee away; nothing is trained here but what is started from."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpx
from dpx.claim.calibration import Entries, calibrate
from dpx.claim.combined_ledgers import read
from dpx.claim.spent import planned_end, require_bound
from dpx.console import Console
from dpx.data import left_out
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import export, released
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.files.weights import PARAMS, by_path, checksum, facts_beside, facts_of_checkpoint, nested, read_file
from dpx.init.parent import require_no_known_release
from dpx.init.relation import declared_disjoint
from dpx.init.start import Start, planned_start, start, start_of_fork
from dpx.job.explain import Explain, explain
from dpx.job.plan import show
from dpx.job.released_jobs import Export
from dpx.job.run_plan import plan_of_run
from dpx.privacy import origins
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement
from dpx.statement.agreement import CHECKPOINTS
from dpx.statement.seals import MANIFEST
from tests.planned import plan

from ..made_statement import made_study
from ..sealed import refuting, sealed_anew
from .conftest import Place, statement

METADATA = "release/params/_CHECKPOINT_METADATA"


def began(place: Place, *overrides: str, text: str = "one") -> Start:
    """The start of a run, as a session would decide it."""
    experiment = place.declared(*overrides, text=text)
    store = prepare(experiment.data, experiment.privacy)
    receiver = experiment.receiver
    found = start(experiment.init, receiver, store, {place.root / "outputs"})
    if experiment.init.kind == "run":
        # A plan decides alike, without reading weights.
        ahead = [(one.relation, one.against, one.reasons) for one in planned_start(experiment.init, receiver, store).origins]
        assert ahead == [(one.relation, one.against, one.reasons) for one in found.origins]
    return found


def reasons(found: Start) -> str:
    return "; ".join(origins.reasons(found.origins))


@pytest.fixture
def copied(parent, tmp_path) -> Path:
    return shutil.copytree(parent, tmp_path / "run")


@pytest.fixture
def handed(parent, tmp_path) -> Path:
    return shutil.copytree(parent / "release", tmp_path / "handed")


def rewritten(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def relation(found: Start) -> str:
    return found.origins[0].relation


def test_nothing_is_wrong_with_copies_under_other_names(place, parent, copied, handed):
    found = began(place, "init=run", f"init.run={copied}")
    assert relation(found) == "unknown" and found.origins == began(place, "init=run", f"init.run={parent}").origins
    assert began(place, "init=run", f"init.run={copied / 'release'}").origins[0].is_checked
    found = began(place, "init=run", f"init.run={handed}")
    assert reasons(found) == "" and not found.origins[0].is_checked


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def differing(place: Place) -> None:
    """Writes texts that are the parent's in other spelling."""
    lines = (place.root / "one.txt").read_text().splitlines()
    made = {
        # One more word at the end of each line gives every document another name.
        "touched": [f"{line} ba" for line in lines],
        "shouted": [line.upper() for line in lines],
        "spaced": ["  ".join(line.split()) for line in lines],
        "shorter": [" ".join(line.split()[:7]) for line in lines],
    }
    for name, text in made.items():
        (place.root / f"{name}.txt").write_text("\n".join(text) + "\n")


@pytest.mark.parametrize("text", ["other", "touched", *slow("both", "one", "shouted", "spaced", "shorter")])
def test_what_is_found_in_the_text_decides_no_relation(place, copied, text):
    differing(place)
    found = began(place, "init=run", f"init.run={copied}", text=text)
    assert relation(found) == "unknown" and reasons(found) == "" and found.messages == ()


def test_disjoint_is_the_users_word_and_text_contradicts_it(place, copied, tmp_path):
    word = ("init=run", f"init.run={copied}", "init.disjoint_from=[main]")
    found = began(place, *word, text="other")
    assert relation(found) == "disjoint" and found.messages == () and "the user vouches" in "".join(origins.assumptions(found.origins))
    with pytest.raises(ConfigError, match="draws from the same prepared data"):
        began(place, *word)
    # The same file, cut into other rows.
    with pytest.raises(ConfigError, match="init.disjoint_from: main: a whole file of this text is also in that of main"):
        began(place, *word, "data.sequence_length=16")


@pytest.mark.parametrize("text", ["touched", *slow("few", "shouted", "spaced", "both")])
def test_what_single_rows_show_is_told_and_refuses_nothing(place, copied, text):
    """A refusal would tell whether a row is protected."""
    differing(place)
    (told,) = began(place, "init=run", f"init.run={copied}", "init.disjoint_from=[main]", text=text).messages
    assert re.search(r"declared disjoint: [1-9]\d* of \d+ protected rows have text", told)


def test_the_word_names_a_run_that_this_one_starts_from(place, parent):
    line = ("init=run", f"init.run={parent}")
    identity = began(place, *line).origins[0].identity
    assert relation(began(place, *line, f"init.disjoint_from=['{identity[:8]}']", text="other")) == "disjoint"
    for name in ("mein", identity[:5], "main2"):
        with pytest.raises(ConfigError, match=f"init.disjoint_from={name}: this run does not start from a run with this name"):
            began(place, *line, f"init.disjoint_from=['{name}']", text="other")
    one = began(place, *line).origins[0]
    with pytest.raises(ConfigError, match="init.disjoint_from=main: several runs have this name"):
        declared_disjoint([one, dataclasses.replace(one, identity="another ledger")], ["main"])


def test_text_that_was_told_apart_otherwise_is_another_unit(place, copied):
    lines = (place.root / "other.txt").read_text().splitlines()
    (place.root / "many").mkdir(exist_ok=True)
    for number, line in enumerate(lines):
        (place.root / "many" / f"{number}.txt").write_text(line)
    found = began(
        place, "init=run", f"init.run={copied}", "data.source.document_per=file", f"data.source.paths={place.root}/many", text="other"
    )
    assert relation(found) == "unknown" and "data.source.document_per (line and file) differ" in reasons(found)


@pytest.mark.parametrize("how", ["edited", "forged", "lost", "store"])
def test_data_whose_manifest_cannot_be_believed_is_not_searched(place, parent, tmp_path, how):
    copied = shutil.copytree(parent, tmp_path / "run")
    (path,) = (copied / "private" / left_out.FOLDER).glob("*.json")
    if how == "lost":
        path.unlink()
    elif how == "store":
        rewritten(path, lambda held: held.update(store=str(tmp_path)))
    else:
        other = prepare(place.declared(text="both").data, place.declared().privacy)
        rewritten(path, lambda held: held["manifest"]["files"].update(other.manifest.files))
    if how == "forged":
        # The manifest of other data, whole, under the name of the one that the ledger knows.
        rewritten(path, lambda held: held.update(json.loads((_kept(other, tmp_path)).read_text())))
    word = ("init=run", f"init.run={copied}", "init.disjoint_from=[main]")
    if how == "lost":
        with pytest.raises(ConfigError, match="does not state the vocabulary that it was trained with"):
            rewritten(copied / "release" / "privacy.json", lambda document: document["vocabulary"].update(sha256=None))
            sealed_anew(copied)
            began(place, *word, text="other")
        return
    (told,) = began(place, *word, text="other").messages
    assert "could not be searched" in told


def _kept(store: Any, private: Path) -> Path:
    left_out.keep_manifest(private, store)
    return private / left_out.FOLDER / f"{store.manifest.checksum}.json"


def test_a_shorter_ledger_is_refused(place, copied):
    path = copied / "private" / "ledger"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(ConfigError, match="private/ledger, beside release"):
        began(place, "init=run", f"init.run={copied}")


def test_a_lost_ledger_is_refused(place, copied):
    (copied / "private" / "ledger").unlink()
    with pytest.raises(ConfigError, match="private/ledger.*is missing"):
        began(place, "init=run", f"init.run={copied}")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["ledger"].update(segments=[]),
        lambda document: document["ledger"]["segments"][0].update(steps=[[0, 1]]),
        lambda document: document["ledger"]["segments"][0].update(noise_multiplier=20.0),
        lambda document: document.pop("init"),
    ],
    ids=["deleted", "shortened", "more noise", "no origins"],
)
def test_a_statement_that_was_edited_is_not_that_of_the_weights(place, handed, change):
    rewritten(handed / "privacy.json", change)
    with pytest.raises(ConfigError, match="differs from the statement that was released with these weights"):
        began(place, "init=run", f"init.run={handed}")


@pytest.mark.parametrize("change", [{"ledger": []}, {"tuning": 1}, {"init": {"origins": [{}]}}, {"audit": "a"}])
def test_a_statement_that_cannot_be_read_ends_in_a_line(place, handed, change):
    rewritten(handed / "privacy.json", lambda document: document.update(change))
    agreement.seal_winner(handed, json.loads((handed / "privacy.json").read_text()))
    with pytest.raises(ConfigError, match=r"privacy.json: .*Copy the whole release/ folder again"):
        began(place, "init=run", f"init.run={handed}")
    if change.keys() == {"ledger"}:
        with pytest.raises(ConfigError, match=r"privacy.json: ledger is not a JSON object"):
            read(handed / "privacy.json")


def _charge_nothing(document: dict[str, Any]) -> None:
    document["ledger"].update(segments=[])
    document["spent"].update(charged_steps=0)


def test_a_statement_that_lists_no_steps_gives_no_guarantee(place, handed):
    rewritten(handed / "privacy.json", _charge_nothing)
    agreement.seal_winner(handed, json.loads((handed / "privacy.json").read_text()))
    (origin,) = began(place, "init=run", f"init.run={handed}").origins
    assert any("lists no steps" in reason for reason in origin.reasons)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    for folder in (tmp_path / "release" / "params", tmp_path / "private" / CHECKPOINTS / "1"):
        folder.mkdir(parents=True)
        os.mkfifo(folder / METADATA.rpartition("/")[2])
        assert facts_beside(folder) == {} and facts_of_checkpoint(folder) is None
    with pytest.raises(ConfigError, match="beside private/checkpoints/1: is missing"):
        agreement.check(tmp_path)


def test_released_values_that_are_no_text_end_in_a_line(copied):
    (copied / "release" / "telemetry.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="telemetry.jsonl: was changed by hand"):
        agreement.check(copied)


def test_a_handed_config_that_was_edited_is_not_that_of_the_weights(place, handed):
    path = handed / "config.yaml"
    path.write_text(path.read_text().replace("short_sequence_rate: 0.1", "short_sequence_rate: 0.2"))
    with pytest.raises(ConfigError, match="differs from the config that these weights were trained with"):
        began(place, "init=run", f"init.run={handed}")


def test_weights_without_a_seal_or_a_statement(place, handed):
    rewritten(handed / PARAMS / "_CHECKPOINT_METADATA", lambda held: held["custom_metadata"].pop("statement"))
    with pytest.raises(ConfigError, match="differs from the statement that was released with these weights"):
        began(place, "init=run", f"init.run={handed}")
    (handed / "privacy.json").unlink()
    with pytest.raises(ConfigError, match="contains weights but not their statement"):
        began(place, "init=run", f"init.run={handed}")


def test_weights_that_were_exchanged_are_found(place, parent, handed, tmp_path):
    state = handed / PARAMS / "state"
    shutil.rmtree(state)
    from dpx.files.orbax_checkpoints import export

    moved = {path: leaf + 1 for path, leaf in by_path(dpx.load(parent).params).items()}
    from dpx.files.weights import nested

    export(tmp_path / "other", nested(moved), {})
    shutil.copytree(tmp_path / "other" / "state", state)
    with pytest.raises(ConfigError, match="params/state.*dpx_manifest.json"):
        began(place, "init=run", f"init.run={handed}")
    (handed / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="other weights than the run released"):
        began(place, "init=run", f"init.run={handed}")


def test_a_config_that_was_edited_is_refused_and_that_of_another_version_takes_the_guarantee_away(place, copied):
    path = copied / "private" / "config.yaml"
    path.write_text(path.read_text().replace("noise_multiplier: 2.0", "noise_multiplier: 3.0"))
    with pytest.raises(ConfigError, match="private/config.yaml: differs from the config whose checksum is in private/ledger"):
        began(place, "init=run", f"init.run={copied}")
    sealed_anew(copied)
    assert "not the config that its ledger began with" in reasons(began(place, "init=run", f"init.run={copied}"))


@pytest.fixture(scope="module")
def plain(place) -> Path:
    return place.train("plain", "mechanism=none")


@pytest.fixture(scope="module")
def seeded(place) -> Path:
    return place.train("seeded", "seed=1")


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "seeded"])
def test_a_parent_without_a_guarantee_leaves_none_but_on_other_text(request, place, name, tmp_path):
    path, why = request.getfixturevalue(name), {"plain": "mechanism=none", "seeded": "fixed_seed"}[name]
    assert why in reasons(began(place, "init=run", f"init.run={path}"))
    assert why in reasons(began(place, "init=run", f"init.run={path}", text="other"))
    assert reasons(began(place, "init=run", f"init.run={path}", "init.disjoint_from=[main]", text="other")) == ""
    handed = shutil.copytree(path / "release", tmp_path / "handed")
    assert why in reasons(began(place, "init=run", f"init.run={handed}", text="other"))
    copied = shutil.copytree(path, tmp_path / "copied")
    rewritten(copied / "release" / "privacy.json", lambda document: document.update(guarantee="dp", reasons=[]))
    with pytest.raises(ConfigError, match="differs from the statement whose checksum is in private/ledger"):
        began(place, "init=run", f"init.run={copied}")
    # What such a statement leaves out is found again from the other parts of a whole folder.
    sealed_anew(copied)
    assert why in reasons(began(place, "init=run", f"init.run={copied}"))


def test_another_unit_is_not_protected(place, parent):
    found = began(place, "init=run", f"init.run={parent}", "privacy.unit=document")
    assert "protects another unit than this run: privacy.unit (row and document)" in reasons(found)
    for changed in ("data.short_sequence_rate=0.3", "data.split_salt=other", "data.public_fraction=0.2", "data.heldout_fraction=0.2"):
        key = changed.partition("=")[0]
        assert f"{key} (" in reasons(began(place, "init=run", f"init.run={parent}", changed))


def test_another_relation_is_refused(place, parent):
    with pytest.raises(ConfigError, match="privacy.adjacency=replace_one: .*Use privacy.adjacency=zero_out"):
        began(place, "init=run", f"init.run={parent}", "privacy.adjacency=replace_one", "accountant=pld")


# A vocabulary that was learnt from another split is in a graph of tests/chain/test_ancestry.py.
@pytest.mark.slow
def test_a_vocabulary_is_the_parents_and_was_not_learnt_from_what_is_protected(place, parent, tmp_path):
    with pytest.raises(ConfigError, match="another vocabulary"):
        began(place, "init=run", f"init.run={parent}", "data.vocabulary.path=null", text="other")
    fitted = place.train("fitted", "data.vocabulary.path=null")
    (held,) = (fitted / "private" / left_out.FOLDER).glob("*.json")
    learnt = Path(json.loads(held.read_text())["store"]) / "vocabulary.txt"
    again = ("init=run", f"data.vocabulary.path={learnt}")
    assert reasons(began(place, *again, f"init.run={fitted}", text="other")) == "", "a document that is public there is public here"
    # With another salt documents of its public split are protected here.
    assert "the vocabulary was learnt" in reasons(began(place, *again, f"init.run={fitted}", "data.split_salt=other"))
    handed = shutil.copytree(fitted / "release", tmp_path / "handed")
    assert "the vocabulary was learnt" in reasons(began(place, *again, f"init.run={handed}", "data.split_salt=other", text="other"))


def saved(path: Path, leaves: dict[str, Any]) -> Path:
    np.savez(path, **leaves)
    return path


@pytest.fixture(scope="module")
def weights(parent) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {path: draw.normal(size=leaf.shape).astype(np.float32) for path, leaf in by_path(dpx.load(parent).params).items()}


def test_a_file_is_public_by_the_users_word_alone(place, weights, tmp_path):
    file = saved(tmp_path / "bert.npz", weights)
    found = began(place, "init=file", f"init.file={file}")
    assert "unknown provenance" in reasons(found) and checksum(weights) == found.origins[0].identity
    assert checksum(weights) not in reasons(found), "it may be of weights that protected text taught"
    found = began(place, "init=file", f"init.file={file}", "init.provenance=public")
    assert reasons(found) == "" and all(np.array_equal(leaf, weights[path]) for path, leaf in by_path(found.parameters).items())
    with pytest.raises(ConfigError, match="init.provenance=mine"):
        place.declared("init=file", f"init.file={file}", "init.provenance=mine")


def test_a_run_from_a_public_file_says_whose_word_that_is(place, weights, tmp_path):
    file = saved(tmp_path / "bert.npz", weights)
    path = place.train("of_a_file", "init=file", f"init.file={file}", "init.provenance=public")
    stated = statement(path)
    (origin,) = stated["init"]["origins"]
    assert stated["guarantee"] == "dp" and origin["identity"] == checksum(weights) and origin["provenance"] == "public"
    assert any("the user vouches" in line and checksum(weights) in line for line in stated["assumptions"])
    # A run that starts from there inherits the assertion, and the name of the file.
    further = began(place, "init=run", f"init.run={path}")
    assert [one.kind for one in further.origins] == ["run", "file"] and further.origins[1].provenance == "public"


def test_released_weights_are_not_public_in_another_file(place, parent, weights, tmp_path):
    public = ("init=file", "init.provenance=public")
    for folder in (parent, parent / "release", parent / "release" / "params"):
        with pytest.raises(ConfigError, match="weights that a run of dpx released.*init=run"):
            began(place, *public, f"init.file={folder}")
    whole = by_path(dpx.load(parent).params)
    with pytest.raises(ConfigError, match="that the run parent released.*init=run"):
        began(place, *public, f"init.file={saved(tmp_path / 'whole.npz', whole)}")
    one = weights | {"embeddings/word": whole["embeddings/word"]}
    with pytest.raises(ConfigError, match="the array embeddings/word that the run parent released"):
        began(place, *public, f"init.file={saved(tmp_path / 'one.npz', one)}")


# Which released arrays bar a file is above; here a run is trained for it.
@pytest.mark.slow
def test_a_run_that_left_public_weights_as_they_were_does_not_bar_them(place, weights, tmp_path):
    own = {path: leaf + 1 for path, leaf in weights.items()}
    public = ("init=file", f"init.file={saved(tmp_path / 'bert.npz', own)}", "init.provenance=public")
    path = place.train("still", *public, "lr_schedule.learning_rate=1e-30")
    assert all(np.array_equal(leaf, own[name]) for name, leaf in by_path(dpx.load(path).params).items())
    began(place, *public)
    # Other weights that hold one released array are refused. So are its first weights if its statement is not sound.
    file = saved(tmp_path / "one.npz", weights | {"embeddings/word": own["embeddings/word"]})
    with pytest.raises(ConfigError, match="the array embeddings/word that the run still released"):
        began(place, "init=file", f"init.file={file}", "init.provenance=public")
    rewritten(path / "release" / "privacy.json", lambda document: document.update(guarantee="none"))
    with pytest.raises(ConfigError, match="that the run still released"):
        began(place, *public)


@pytest.mark.parametrize(("kept", "name"), [("trial/private/withheld", "trial"), ("studies/search/release/winner", "search")])
def test_weights_of_a_search_are_not_public_in_another_file(parent, tmp_path, kept, name):
    shutil.copytree(parent / "release", tmp_path / "outputs" / kept)
    with pytest.raises(ConfigError, match=f"the array .* that the run {name} released.*init.run={tmp_path}/outputs/{kept}"):
        require_no_known_release("init.file=a", by_path(dpx.load(parent).params), [tmp_path / "outputs"])


def _without_first(leaves):
    return {path: leaf for path, leaf in leaves.items() if path != "embeddings/norm/bias"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_first, "does not contain the parameter embeddings/norm/bias"),
        (lambda leaves: leaves | {"embeddings/other": np.zeros(3, np.float32)}, "contains embeddings/other"),
        (lambda leaves: leaves | {"embeddings/word": np.zeros((3, 4), np.float32)}, r"embeddings/word of shape \(3, 4\)"),
        (lambda leaves: leaves | {"mlm/norm/bias": leaves["mlm/norm/bias"].astype(np.float64)}, "mlm/norm/bias as float64"),
        (lambda leaves: leaves | {"mlm/norm/bias": leaves["mlm/norm/bias"] * np.nan}, "mlm/norm/bias that are not finite"),
        (lambda leaves: leaves | {"mlm/norm/bias": np.array([print] * 3, object)}, "mlm/norm/bias of shape"),
    ],
)
def test_a_file_that_does_not_fit_names_the_first_parameter(place, weights, tmp_path, change, said):
    file = saved(tmp_path / "bert.npz", change(weights))
    with pytest.raises(ConfigError, match=said):
        began(place, "init=file", f"init.file={file}")


def test_a_file_that_is_cut_short_or_no_file(place, weights, tmp_path):
    file = saved(tmp_path / "bert.npz", weights)
    file.write_bytes(file.read_bytes()[:-900])
    for named, said in ((file, "is incomplete"), (tmp_path / "none.npz", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=f"init.file=.*{said}"):
            began(place, "init=file", f"init.file={named}")


def test_a_compressed_file_that_is_damaged_or_locked(tmp_path):
    file, lines = tmp_path / "bert.npz", {"layers/a": np.arange(4000, dtype=np.float32)}
    np.savez_compressed(file, **lines)  # type: ignore[arg-type]
    whole = file.read_bytes()
    # Of the member's header: bit 0 of its flags says that it is encrypted, the method 99 that nobody here can unpack it.
    local, central = whole.index(b"PK\x03\x04"), whole.index(b"PK\x01\x02")
    changes = [(300, b"\xff" * 40)], [(local + 6, b"\x01"), (central + 8, b"\x01")], [(local + 8, b"\x63"), (central + 10, b"\x63")]
    for places in changes:
        damaged = bytearray(whole)
        for at, written in places:
            damaged[at : at + len(written)] = written
        file.write_bytes(bytes(damaged))
        with pytest.raises(ConfigError, match="init.file=.*is incomplete, or is not an .npz file of arrays"):
            read_file(file)


@pytest.mark.parametrize("written", ["[]", "{", '{"custom_metadata": 3}', '{"custom_metadata": {"trained": ["a"]}}'])
def test_what_another_run_left_damaged_stops_no_run(written, tmp_path):
    told = tmp_path / "run" / METADATA
    told.parent.mkdir(parents=True)
    told.write_text(written)
    require_no_known_release("init.file=a", {"a": np.arange(3, dtype=np.float32)}, [tmp_path])


def test_a_run_that_cannot_be_begun_from(place, parent, copied, handed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="init.run=nowhere: no such run"):
        began(place, "init=run", "init.run=nowhere")
    with pytest.raises(ConfigError, match="contains neither a run nor a release"):
        began(place, "init=run", "init.run=empty")
    with pytest.raises(ConfigError, match="init.run=.*layers/down/kernel of shape"):
        began(place, "init=run", f"init.run={parent}", "model.feed_forward=32")
    with pytest.raises(ConfigError, match="model.heads=1: .*model with 2"):
        began(place, "init=run", f"init.run={parent}", "model.heads=1")
    with pytest.raises(ConfigError, match="init.step=1: .*no checkpoints"):
        began(place, "init=run", f"init.run={handed}", "init.step=1")
    with RunFolder(copied).claimed(), pytest.raises(ConfigError, match="another process is training"):
        began(place, "init=run", f"init.run={copied}")
    metadata = copied / "private" / CHECKPOINTS / "1" / METADATA.rpartition("/")[2]
    metadata.write_text(metadata.read_text().replace('"epoch": "', '"epoch": "0'))
    with pytest.raises(ConfigError, match=r"checkpoints/1: this checkpoint is damaged\. Use one of \[2\]"):
        began(place, "init=run", f"init.run={copied}", "init.step=1")
    (damaged,) = [path for path in (handed / PARAMS / "state" / "d").iterdir()][:1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match="differs from the file that was released"):
        began(place, "init=run", f"init.run={handed}")
    (handed / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="incomplete or damaged"):
        began(place, "init=run", f"init.run={handed}")
    with pytest.raises(ConfigError, match="incomplete or damaged"):
        released(handed / PARAMS)
    for written, said in (("a: [", "is not YAML"), ("- a", "is not a config of a run")):
        (copied / "private" / "config.yaml").write_text(written)
        sealed_anew(copied)
        with pytest.raises(ConfigError, match=f"config.yaml: {said}"):
            began(place, "init=run", f"init.run={copied}")


def test_a_library_is_given_the_weights_that_were_released_or_none(copied, handed):
    other = by_path(released(handed / PARAMS))
    told = facts_beside(handed / PARAMS)
    export(copied / "release" / PARAMS, nested({path: leaf + 1 for path, leaf in other.items()}), told)
    with pytest.raises(ConfigError, match="params: contains other weights than the run released in this folder"):
        dpx.load(copied)


def test_charges_that_no_accountant_composes_are_refused(place, parent):
    (origin,) = began(place, "init=run", f"init.run={parent}").origins
    discrete = dataclasses.replace(origin, segments=tuple(dataclasses.replace(one, noise="discrete_gaussian") for one in origin.segments))
    experiment = place.declared("accountant=pld")
    own = planned_end(Entries.of(experiment.claim), calibrate(experiment.claim, 100), None)
    require_bound(experiment.accountant, experiment.privacy, own, [origin])
    with pytest.raises(ConfigError, match="mechanism=discrete_gaussian.*accountant=pld"):
        require_bound(experiment.accountant, experiment.privacy, own, [discrete])


def test_a_plan_and_an_explanation_say_what_both_cost(place, parent, capsys):
    experiment = place.declared("init=run", f"init.run={parent}")
    found, alone = plan(experiment), plan(place.declared())
    assert found["epsilon_of_this_run"] == alone["epsilon"] and found["epsilon"]["rdp"] > alone["epsilon"]["rdp"]
    assert found["guarantee"] == "dp" and found["init"]["origins"][0]["relation"] == "unknown"
    begins_from = planned_start(experiment.init, experiment.receiver, prepare(experiment.data, experiment.privacy)).origins
    show(plan_of_run(experiment), Console(width=400))
    assert "of this run without those; noise.epsilon is the target for this number" in capsys.readouterr().out
    words = " ".join(explain(experiment, alone["protected_rows"], None, begins_from).words)
    assert "does not start from random parameters but from main" in words and f"e^{found['epsilon']['rdp']:.3g}" in words


def _refuted(path: Path) -> None:
    with contextlib.closing(Ledger(path / "private" / "ledger")) as entered:
        entered.note_verdict(refuting())


def _chosen(path: Path) -> None:
    with contextlib.closing(Ledger(path / "private" / "ledger")) as entered:
        entered.note_choices(["steps"])


def _trial(path: Path) -> None:
    rewritten(
        path / "release" / "privacy.json",
        lambda document: document.update(tuning={"charge": "uncharged", "meaning": "one trial of a search"}),
    )
    sealed_anew(path)


def _labels(path: Path) -> None:
    learnt = "labels: the list of labels was learnt from the protected rows (data.source.labels=null)"
    rewritten(path / "release" / "privacy.json", lambda document: document.update(guarantee="none", reasons=[learnt], epsilon={}))
    sealed_anew(path)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (_labels, "the list of labels was learnt from the protected rows"),
        (_refuted, "audit: a lower bound of 9.000"),
        (_chosen, "plan: steps changed"),
        (_trial, "one trial of a search"),
        ("seeded", "fixed_seed"),
    ],
)
def test_what_takes_a_parents_guarantee_away_is_inherited_by_every_road(request, place, copied, how, why):
    path = request.getfixturevalue(how) if isinstance(how, str) else copied
    if not isinstance(how, str):
        how(path)
    assert why in reasons(began(place, "init=run", f"init.run={path}"))
    experiment = place.declared()
    store = prepare(experiment.data, experiment.privacy)
    fork = start_of_fork(f"{path}@1", experiment.receiver, store, path)
    assert why in reasons(fork) and why in "; ".join(plan(experiment, f"{path}@1")["reasons"])


# That a fork inherits it is planned above, for each reason; here forks are trained.
@pytest.mark.slow
def test_a_fork_of_a_seeded_run_has_no_guarantee_without_the_seed(place, seeded):
    path = place.train("unseeded", fork=f"{seeded}@1")
    assert statement(path)["guarantee"] == "none" and any("fixed_seed" in reason for reason in statement(path)["reasons"])


def test_a_run_whose_ledger_notes_a_search_leaves_none_though_its_statement_and_config_say_nothing(place, copied):
    entered = Ledger(copied / "private" / "ledger")
    entered.note_trial("search", "composition")
    entered.close()
    assert statement(copied)["tuning"] is None and "tune" not in (copied / "release" / "config.yaml").read_text()
    said = reasons(began(place, "init=run", f"init.run={copied}"))
    assert "it is one trial of a search (tune.charge=composition), and its ledger does not include the choice among the trials" in said


@pytest.mark.slow
def test_a_fork_of_a_trial_keeps_the_charge_and_has_no_guarantee(place, parent, tmp_path):
    trial = shutil.copytree(parent, tmp_path / "trial")
    entered = Ledger(trial / "private" / "ledger")
    entered.note_trial("search", "repeat_and_select")
    entered.close()
    said = statement(place.train("trial_fork", fork=f"{trial}@1"))
    assert said["guarantee"] == "none" and said["epsilon"] == {}
    assert any("one trial of a search (tune.charge=repeat_and_select)" in reason for reason in said["reasons"])


def test_the_winner_of_a_search_is_loaded_under_its_statement_and_begins_no_run(place, handed, tmp_path):
    """Its cost is that of the best of a secret number of trials, not a list of steps; the statement of a search names no vocabulary."""
    winner = shutil.copytree(handed, tmp_path / "winner" / "release")
    stated = to_json(made_study())
    (winner / "privacy.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="differs from the statement that was released with these weights"):
        dpx.load(winner.parent)
    agreement.seal_winner(winner, stated)
    assert dpx.load(winner.parent).privacy == stated
    Export(to=str(tmp_path / "exported"))(place.declared(), RunFolder(winner.parent))
    assert "epsilon 1 at delta 0.001 (rdp)" in (tmp_path / "exported" / "README.md").read_text()
    with pytest.raises(ConfigError, match="privacy.json: is not the statement of one run"):
        Explain()(place.declared(), RunFolder(winner.parent))
    with pytest.raises(ConfigError, match="does not state the vocabulary"):
        began(place, "init=run", f"init.run={winner}")


def test_a_charged_search_begins_from_random_parameters(place, parent):
    from dpx.claim.claim_checks import check_start

    experiment = place.declared("tune=search", "tune.charge=composition", "init=run", f"init.run={parent}")
    assert experiment.tune is not None
    with pytest.raises(ConfigError, match="init=run with tune.charge=composition"):
        check_start(None, experiment.init, experiment.tune)
