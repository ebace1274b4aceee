"""A chain of two stages, run: what is skipped, what is stale, what is refused, and what its statement says."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpx
from dpx.config import load
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import on_host
from dpx.files.records import from_json
from dpx.files.run_folder import RunFolder
from dpx.files.weights import by_path
from dpx.job.released_jobs import Evaluate
from dpx.statement import chain_seal, seals
from dpx.statement.chain_seal import ChainStatement
from tests.sealed import sealed_anew

from .conftest import CLASSIFY, PRETRAIN, node, run, statement


def _folder(stage: str) -> Path:
    (found,) = Path("outputs").glob(f"two_{stage}-*")
    return found


def _written(place: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(place.rglob("*")) if path.is_file()}


def test_every_stage_is_a_run_that_other_jobs_read(place):
    for stage in ("pretrain", "classify"):
        cfg, folder = load(f"two_{stage}")
        assert cfg.name == f"two_{stage}" and folder == _folder(stage)
    loaded = dpx.load(_folder("classify"))
    Evaluate()(loaded.experiment, RunFolder(_folder("classify")))
    assert (_folder("classify") / "private" / "evaluation.json").is_file()


def test_the_second_stage_begins_with_the_weights_of_the_first_and_a_new_head(place, monkeypatch):
    from dpx.init.parent import open_parent
    from dpx.init.start import start

    loaded = dpx.load(_folder("classify"))
    from dpx.data.prepare import prepare

    experiment = loaded.experiment
    store = prepare(experiment.data, experiment.privacy)
    begun = start(experiment.init, experiment.receiver, store, ())  # pyright: ignore[reportArgumentType]
    leaves, before = by_path(begun.parameters), by_path(on_host(open_parent(experiment.init, "").place))  # pyright: ignore
    assert set(experiment.receiver.shapes) - set(leaves) == {"classifier/bias", "classifier/kernel"} | {"pooler/bias", "pooler/kernel"}
    assert all(np.array_equal(leaf, before[path]) for path, leaf in leaves.items())


def test_the_same_chain_again_trains_nothing(place, capsys):
    before = {stage: _written(_folder(stage)) for stage in ("pretrain", "classify")}
    run(node())
    assert before == {stage: _written(_folder(stage)) for stage in ("pretrain", "classify")}
    assert capsys.readouterr().err.count("finished before") == 2


def test_its_statement_says_what_the_first_stage_protects(place):
    (folder,) = Path("outputs").glob("two-*")
    stated = from_json(ChainStatement, statement(folder), "chain.json")
    own = json.loads((_folder("pretrain") / "release" / "privacy.json").read_text())
    (protected,) = stated.claim.protects
    assert stated.claim.guarantee == "dp" and protected.stage == "pretrain" and protected.composed_with == ()
    assert protected.epsilon == own["epsilon"] and protected.delta == own["delta"]
    assert [one.state for one in stated.stages] == ["finished", "finished"]
    assert any("classify" in line for line in stated.claim.not_covered)


def test_without_the_users_word_the_second_stage_leaves_no_guarantee(place):
    folder = run(node(classify={key: value for key, value in CLASSIFY.items() if key != "disjoint_from"}))
    claim = statement(folder)["claim"]
    assert claim["guarantee"] == "none" and claim["protects"][0]["epsilon"] == {}
    assert claim["reasons"][0].startswith("pretrain: two_classify") and "mechanism=none adds no noise" in claim["reasons"][0]
    assert "declare chain.stages.classify.disjoint_from=[pretrain]" in claim["reasons"][0]


def test_after_a_change_later_stages_are_named_stale_and_trained_anew(place, capsys):
    old = {stage: _folder(stage) for stage in ("pretrain", "classify")}
    changed = PRETRAIN | {"values": PRETRAIN["values"] | {"steps": 3}}
    run(node(pretrain=changed), "plan")
    assert f"classify: {old['classify'].name} is stale" in capsys.readouterr().out
    folder = run(node(pretrain=changed))
    assert f"stage classify: {old['classify'].name} is stale" in capsys.readouterr().err
    assert not {one["folder"] for one in statement(folder)["stages"]} & {one.name for one in old.values()}
    assert all(one.is_dir() for one in old.values())


def test_a_finished_stage_whose_folder_is_gone_is_not_trained_again(place):
    lost = _folder("pretrain")
    shutil.rmtree(lost)
    before = _written(_folder("classify"))
    with pytest.raises(ConfigError) as refused:
        run(node())
    assert str(refused.value) == (
        f"{lost.absolute()}: the stage pretrain had finished, and its folder is missing; to train it again would spend its epsilon twice. "
        "Restore the folder, or add replicate=1 for a second chain with its own cost."
    )
    assert not lost.exists() and before == _written(_folder("classify"))


def test_a_stage_that_began_from_another_run_in_the_same_folder_is_refused(place):
    before = _folder("pretrain")
    shutil.rmtree(before)
    for each in Path("outputs").glob("two-*"):
        shutil.rmtree(each)
    with pytest.raises(ConfigError, match="is stale: it started from the run .* of pretrain, .* Move it away"):
        run(node())


def test_a_vocabulary_file_of_another_text_is_refused_by_the_stage_that_reads_it(place):
    words = Path("words.txt")
    lines = (_folder("pretrain") / "private" / "vocabulary.txt").read_text().splitlines()
    words.write_text("\n".join([*lines[:-1], "zzz"]) + "\n")
    values = {"data": CLASSIFY["values"]["data"] | {"vocabulary": {"path": "words.txt", "size": 512}}}
    with pytest.raises(ConfigError, match="chain.stages.classify: init.run=.*: was trained with another vocabulary"):
        run(node(classify=CLASSIFY | {"values": values}))


def test_the_better_point_of_a_stage_is_marked(swept):
    (folder,) = (one for one in swept.glob("outputs/two-*") if len(statement(one)["stages"]) == 3)
    rows = json.loads((folder / "private" / "chain_results.json").read_text())["stages"]
    points = [row for row in rows if row["stage"] == "classify"]
    best = max(points, key=lambda row: row["heldout"]["macro_f1"])
    assert [row["chosen"] for row in points] == [row is best for row in points] and len(points) == 2
    assert statement(folder)["stages"][1]["compared_by"] == "held-out rows"


def test_a_plan_and_an_explanation_have_every_stage(place, capsys):
    folder = run(node(), "plan", "replicate=1")
    document = json.loads((folder / "release" / "plan.json").read_text())
    assert document["kind"] == "chain" and [one["state"] for one in document["stages"]] == ["to_run", "to_run"]
    assert document["claim"]["guarantee"] == "dp"
    run(node(), "explain")
    assert "stage pretrain:" in (told := capsys.readouterr().out) and "stage classify:" in told


def _edited(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("job", ["explain", "chain"])
def test_a_changed_statement_of_the_chain_is_detected(place, job):
    (folder,) = Path("outputs").glob("two-*")
    file = folder / "release" / "chain.json"
    older = file.read_text()
    _edited(file, claim=json.loads(older)["claim"] | {"guarantee": "none"})
    with pytest.raises(ConfigError, match="differs from the statement whose checksum is in private/chain_seals.json"):
        run(node(), job)
    file.write_text(older)
    (folder / "private" / "chain_seals.json").unlink()
    with pytest.raises(ConfigError, match="chain.json: its checksum is missing"):
        run(node(), job)


def test_an_older_statement_of_the_chain_that_is_put_back_is_detected(place):
    (folder,) = Path("outputs").glob("two-*")
    found, checked_by = chain_seal.read(folder) or pytest.fail("it has a statement")
    assert checked_by == "ledger"
    older = (folder / "release" / "chain.json").read_text()
    chain_seal.write(RunFolder(folder), dataclasses.replace(found, replicate=7))
    (folder / "release" / "chain.json").write_text(older)
    with pytest.raises(ConfigError, match="differs from the statement"):
        chain_seal.read(folder)


def test_a_changed_statement_of_a_stage_is_detected(place):
    (folder,) = Path("outputs").glob("two-*")
    file = _folder("pretrain") / "release" / "privacy.json"
    _edited(file, delta=1e-9)
    with pytest.raises(ConfigError, match="differs from the statement whose checksum is in private/ledger"):
        run(node(), "explain")
    # Sealed in its own ledger, but not what the chain was stated from.
    sealed_anew(_folder("pretrain"))
    with pytest.raises(ConfigError, match=r"differs from the statement of this stage that two-\w+/release/chain.json was made from"):
        chain_seal.check(folder)


def test_a_stage_that_was_replaced_by_another_run_is_detected(place):
    (folder,) = Path("outputs").glob("two-*")
    shutil.rmtree(_folder("pretrain"))
    for stated in Path("outputs").glob("two-*"):
        shutil.move(stated, place / stated.name)
    with pytest.raises(ConfigError, match="is stale"):
        run(node())
    with pytest.raises(ConfigError, match="holds another run than"):
        shutil.copytree(place / folder.name, folder, dirs_exist_ok=True)
        chain_seal.check(folder)


def test_a_copy_of_the_release_is_read_by_its_manifest(place, tmp_path):
    (folder,) = Path("outputs").glob("two-*")
    own = seals.stated_id(folder / "release")
    run(node())
    assert own and seals.stated_id(folder / "release") == own
    copy = tmp_path / "handed" / folder.name
    shutil.copytree(folder / "release", copy / "release")
    assert (chain_seal.read(copy) or (None, None))[1] == "manifest"
    _edited(copy / "release" / "chain.json", replicate=7)
    with pytest.raises(ConfigError, match="chain.json: differs from the file that was released with its statement"):
        chain_seal.read(copy)
    (copy / "release" / "dpx_manifest.json").unlink()
    assert (chain_seal.read(copy) or (None, "manifest"))[1] is None
    _edited(copy / "release" / "chain.json", format=2)
    with pytest.raises(ConfigError, match="was written with the format number 2, not 3"):
        chain_seal.read(copy)
