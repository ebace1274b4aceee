"""Accidents of folders: files lost, cut, edited, rolled back, copied. In every case epsilon does not fall below the epsilon spent.

Each test goes through the job itself, and looks at what was drawn by watching root secrets: whoever draws is charged.
"""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import dpx
from dpx.declaration import ConfigError
from dpx.files import orbax_checkpoints
from dpx.files.orbax_checkpoints import Checkpoints
from dpx.files.run_folder import RunFolder
from dpx.job.account import Account
from dpx.job.explain import Explain
from dpx.job.released_jobs import Evaluate
from dpx.pages import pictures
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret
from dpx.statement.seals import MANIFEST
from dpx.training import loop

from ..composed import composed
from ..processes import micro_run
from ..training.sharing import run_job

STEPS = 8
PLAIN = micro_run(STEPS)


@pytest.fixture(scope="module", autouse=True)
def without_pictures():
    """What is accounted for is in the tables; drawing them takes longer than a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "write", lambda *_: "")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def drawn(monkeypatch) -> set[tuple[bytes, int]]:
    """Every (root secret, step) that a batch was drawn with."""
    seen: set[tuple[bytes, int]] = set()
    generator = RootSecret.generator

    def watched(self, purpose, *parts):
        if purpose == "sample":
            seen.add((self._secret, int(parts[0])))
        return generator(self, purpose, *parts)

    monkeypatch.setattr(RootSecret, "generator", watched)
    return seen


def train(data: Path, path: Path, *overrides: str, fork: str | None = None, every: int = 2, until: int | None = None) -> dict:
    """Runs the job in `path`, killed before step `until`; the statement it leaves."""
    parts = composed(*PLAIN, f"data.directory={data}", f"schedule.checkpoint_every={every}", *overrides)
    run_job(parts, path, fork, until)
    return claim_of(path)


def claim_of(path: Path) -> dict:
    return json.loads((path / "release" / "privacy.json").read_text())


def charged(path: Path) -> int:
    return sum(run.count for run in Ledger(path / "private" / "ledger").segments())


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    train(data, path)
    return path


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def delete(ledger: Path) -> None:
    ledger.unlink()


def cut(ledger: Path) -> None:
    ledger.write_bytes(ledger.read_bytes()[:-7])


def edit(ledger: Path) -> None:
    text = ledger.read_text()
    assert '"noise_multiplier": 2.0' in text
    ledger.write_text(text.replace('"noise_multiplier": 2.0', '"noise_multiplier": 9.0'))


def set_back(ledger: Path) -> None:
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[: len(lines) // 2]))


ACCIDENTS = [delete, cut, edit, set_back]


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_ledger_that_was_lost_cut_edited_or_set_back_never_lowers_epsilon(data, copy, accident):
    before = claim_of(copy)["epsilon"]["rdp"]
    accident(copy / "private" / "ledger")
    try:
        after = train(data, copy)["epsilon"].get("rdp", np.inf)
    except ConfigError as refused:
        assert "ledger" in str(refused)
        return
    assert after >= before, f"epsilon fell from {before} to {after}"


@pytest.mark.parametrize("look", [Account(accountant="rdp"), Evaluate(), Explain()], ids=["account", "evaluate", "explain"])
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_nothing_looks_at_a_run_whose_ledger_falls_short(data, copy, accident, look):
    experiment, *_ = composed(*PLAIN, f"data.directory={data}")
    accident(copy / "private" / "ledger")
    with pytest.raises(ConfigError, match="ledger"):
        look(experiment, RunFolder(copy))


def test_a_checkpoint_moved_away_in_a_later_noise_epoch_leaves_no_draw_uncharged(data, tmp_path, drawn):
    path = tmp_path / "run"
    train(data, path, until=5)
    (path / "private" / "root_secret_0").unlink()
    train(data, path, until=7)
    for steps in (4, 6):
        shutil.move(path / "private" / "checkpoints" / str(steps), tmp_path / f"away-{steps}")
    train(data, path)
    assert len(drawn) <= charged(path), "steps were drawn that nothing charges for"
    assert len({secret for secret, _ in drawn}) == 3 and Ledger(path / "private" / "ledger").noise_epochs[-1].from_step == 2


def test_a_fork_whose_first_checkpoint_is_lost_leaves_no_draw_uncharged(data, finished, tmp_path, drawn):
    path = tmp_path / "fork"
    train(data, path, fork=f"{finished}@4", every=4, until=7)
    shutil.rmtree(path / "private" / "checkpoints" / "4")
    train(data, path, fork=f"{finished}@4", every=4)
    assert len(drawn) <= charged(path) - STEPS, "steps were drawn that nothing charges for"


@pytest.mark.parametrize(
    "released",
    [
        pytest.param(["telemetry=released"], id="telemetry"),
        pytest.param(["clip=quantile", "clip.clipping_norm=1.0"], id="quantile", marks=pytest.mark.slow),
    ],
)
def test_no_value_is_released_ahead_of_the_statement_that_charges_for_it(data, tmp_path, released):
    path = tmp_path / "run"
    for until in (5, 7):
        claim = train(data, path, *released, every=100 if until == 5 else 3, until=until)
        telemetry = path / "release" / "telemetry.jsonl"
        lines = telemetry.read_text().splitlines() if telemetry.exists() else []
        assert claim["epsilon"]["rdp"] > 0 or not lines, f"epsilon {claim['epsilon']['rdp']} beside {len(lines)} released values"
        assert claim["spent"]["charged_steps"] >= len(lines)
    assert len(lines) == 6, "published with the statement of the last checkpoint"


def test_a_lost_root_secret_opens_a_new_noise_epoch(data, tmp_path, drawn):
    path = tmp_path / "run"
    train(data, path, until=5)
    (path / "private" / "root_secret_0").unlink()
    train(data, path)
    assert len(drawn) <= charged(path), "steps were drawn that nothing charges for"


def test_a_sum_that_changed_on_replay_meets_a_fresh_key_and_both_are_charged(data, tmp_path, monkeypatch, drawn):
    """Stands for a kernel that adds up otherwise each time, another library, or other rows behind the same manifest."""
    path, whole = tmp_path / "run", loop.as_chunk
    train(data, path, every=4, until=7)
    before = {step for _, step in drawn}

    def other_rows(*arguments):
        chunk = whole(*arguments)
        return chunk._replace(rows_KB=chunk.rows_KB | {"tokens": np.roll(chunk.rows_KB["tokens"], 1, axis=-1)})

    monkeypatch.setattr(loop, "as_chunk", other_rows)
    claim = train(data, path, every=4)
    # Steps 4 to 6 ran and were shown before; 4 is drawn again under the old key, compared, and then under a fresh one.
    assert before == set(range(7)) and charged(path) == 7 + 4
    assert len({secret for secret, _ in drawn}) == 2 and len(drawn) == 7 + 4
    assert claim["epsilon"]["rdp"] > claim["planned"]["epsilon"]["rdp"]
    assert (path / "private" / "checkpoints" / "8").exists()


def test_both_of_a_folder_and_its_copy_go_on_under_keys_of_their_own(data, tmp_path, drawn):
    path, other = tmp_path / "run", tmp_path / "other"
    train(data, path, until=5)
    shutil.copytree(path, other)
    train(data, path)
    own = set(drawn)
    drawn.clear()
    train(data, other)
    assert drawn and not {secret for secret, _ in drawn} & {secret for secret, _ in own}
    experiment, *_ = composed(*PLAIN, f"data.directory={data}")
    Account(ledgers=[str(path), str(other)], accountant="rdp")(experiment, RunFolder(tmp_path / "joint"))
    tables = json.loads((tmp_path / "joint" / "release" / "account.json").read_text())["tables"]
    assert sum(row["steps"] for row in tables[0]["rows"]) >= len(own | drawn), "jointly they charge for every draw"


def test_a_disk_that_fills_between_ledger_and_checkpoint_loses_no_charge(data, tmp_path, drawn):
    path = tmp_path / "run"

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_checkpoints.ocp.training.Checkpointer, "save_async", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            train(data, path)
    assert len(drawn) == charged(path) == 2
    train(data, path)
    assert len(drawn) == charged(path) == STEPS


def test_a_clock_that_is_set_back_changes_no_step_and_no_charge(data, tmp_path, monkeypatch, drawn):
    """The newest checkpoint is the one of most steps; no draw and no order depends on the time."""
    path, clock = tmp_path / "run", time.time
    train(data, path, until=5)
    monkeypatch.setattr(time, "time", lambda: clock() - 86_400.0)
    train(data, path)
    assert len(drawn) == charged(path) == STEPS and len(Ledger(path / "private" / "ledger").noise_epochs) == 1
    assert max(Checkpoints(path / "private" / "checkpoints", 3).steps) == STEPS


def test_a_fork_of_a_fork_is_charged_for_all_three(data, finished, tmp_path, drawn):
    child, grandchild = tmp_path / "child", tmp_path / "grandchild"
    train(data, child, fork=f"{finished}@4")
    train(data, grandchild, fork=f"{child}@6")
    assert len(drawn) == 4 + 2 and charged(grandchild) == STEPS + 4 + 2


def test_a_run_whose_private_tree_is_gone_is_not_begun_again(data, copy):
    shutil.rmtree(copy / "private")
    with pytest.raises(ConfigError, match="ledger"):
        train(data, copy)


def test_a_release_of_another_run_is_told_apart(data, copy, tmp_path):
    train(data, tmp_path / "other", "replicate=1")
    shutil.rmtree(copy / "release")
    shutil.copytree(tmp_path / "other" / "release", copy / "release")
    with pytest.raises(ConfigError, match="ledger"):
        train(data, copy)


def test_a_release_that_was_handed_on_is_answered_for_and_called_unchecked(data, copy, capsys):
    experiment, *_ = composed(*PLAIN, f"data.directory={data}")
    for look in (Account(accountant="rdp"), Explain()):
        look(experiment, RunFolder(copy))
        assert "UNCHECKED" not in capsys.readouterr().out
    assert dpx.load(copy).is_checked
    shutil.rmtree(copy / "private")
    for look in (Account(accountant="rdp"), Explain()):
        look(experiment, RunFolder(copy))
        assert "AS ITS SENDER STATES" in capsys.readouterr().out
    assert (dpx.load(copy).is_checked, dpx.load(copy).checked_by) == (False, "manifest")
    (copy / "release" / MANIFEST).unlink()
    Explain()(experiment, RunFolder(copy))
    assert "UNCHECKED" in capsys.readouterr().out and dpx.load(copy).checked_by is None
    assert not (copy / "private").exists()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param([], [], id="nothing", marks=pytest.mark.slow),
        pytest.param(["lr_schedule.learning_rate=0.1"], [], id="rate"),
        pytest.param(["noise.noise_multiplier=3.0"], ["noise_multiplier"], id="noise"),
        pytest.param(["steps=10"], ["steps"], id="steps", marks=pytest.mark.slow),
    ],
)
def test_a_fork_that_plans_anew_after_results_has_no_guarantee(data, finished, tmp_path, change, names):
    claim = train(data, tmp_path / "fork", *change, fork=f"{finished}@6")
    assert claim["guarantee"] == ("none" if names else "dp")
    for name in names:
        assert claim["epsilon"] == {} and name in claim["reasons"][0]
        assert next(item["value"] for item in claim["unsupported"] if item["name"] == "epsilon/rdp") > 0
    assert bool(claim["epsilon"]) != bool(names)
    again = train(data, tmp_path / "again", *change, fork=f"{tmp_path / 'fork'}@8")
    assert again["guarantee"] == claim["guarantee"], "a fork of it does not mend that"


def test_what_a_kill_left_half_written_stops_nothing(data, copy):
    (copy / "private" / "checkpoints" / "6").rename(copy / "private" / "checkpoints" / "6.orbax-checkpoint-tmp")
    draft = copy / "private" / "checkpoints" / "6.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA"
    draft.write_text(json.dumps(json.loads(draft.read_text()) | {"custom_metadata": None}))
    (copy / "release" / "params" / "_CHECKPOINT_METADATA").unlink()
    assert train(data, copy)["guarantee"] == "dp"
