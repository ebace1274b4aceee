"""Measurements never stop a run: what cannot be written is dropped and counted, and what can be is whole."""

import contextlib
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import pytest

from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.durable import write_durably
from dpx.files import results
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Plan
from dpx.training import metrics
from dpx.training.metrics import EventFile, LossyFile, MetricsWriter, Released, varied_first

ENOUGH = 400


@pytest.fixture
def limit():
    """Sets how large files may grow: beyond it a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def scalars_of(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("2_utility/train_loss")]


def test_a_disk_that_is_full_blocks_nothing_and_what_was_dropped_is_counted_in_one_line(tmp_path, limit, capsys):
    def measured() -> None:
        limit(4000)
        writer = MetricsWriter(tmp_path / "private", 0)
        writer.describe("model: micro", {})
        for step in range(1, ENOUGH + 1):
            writer.write(step, {"train/loss": 1.0, "weights/word": [1.0, 2.0]})
        limit(resource.RLIM_INFINITY)
        # Space was freed.
        writer.write(ENOUGH + 1, {"train/loss": 1.0})
        writer.close()

    (tmp_path / "private").mkdir()
    # In a separate thread, so that a writer that blocks fails the test and not the suite.
    thread = threading.Thread(target=measured, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive(), "the writer blocks"
    steps = [json.loads(line)["step"] for line in (tmp_path / "private" / "metrics.jsonl").read_text().splitlines()]
    seen = scalars_of(tmp_path / "private" / "tensorboard")
    for found in (steps, seen):
        assert found == [*range(1, len(found)), ENOUGH + 1] and 10 < len(found) < ENOUGH
    (said,) = capsys.readouterr().err.splitlines()
    counts = f"{ENOUGH + 1 - len(steps)} of metrics.jsonl and {ENOUGH + 1 - len(seen)} of TensorBoard records"
    assert said == f"measurements that could not be written were dropped ({counts}): file too large"


def test_a_record_that_failed_leaves_nothing_of_itself(tmp_path, monkeypatch):
    file, whole = LossyFile(tmp_path / "lines", b"start\n"), os.pwrite

    def nearly_full(handle: int, data: bytes, at: int) -> int:
        if at:
            raise OSError(28, "No space left on device")
        return whole(handle, data[:3], at)

    monkeypatch.setattr(metrics.os, "pwrite", nearly_full)
    file.append(b"lost\n")
    assert (tmp_path / "lines").read_bytes() == b"" and (file.dropped, file.fault) == (1, "no space left on device")
    monkeypatch.setattr(metrics.os, "pwrite", whole)
    file.append(b"one\n")
    monkeypatch.setattr(metrics.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    monkeypatch.setattr(metrics.os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    file.append(b"lost\n")
    monkeypatch.undo()
    file.append(b"two\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"start\none\ntwo\n" and file.dropped == 2


def test_a_device_that_is_full_is_no_fault_of_the_run():
    file = LossyFile(Path("/dev/full"))
    for _ in range(3):
        file.append(b"lost\n")
    assert (file.dropped, file.fault) == (3, "no space left on device")
    file.close()


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file")
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 1.0}\n'
    assert "(1 of TensorBoard records): " in capsys.readouterr().err


def test_a_run_that_goes_on_measures_its_steps_once(tmp_path):
    """TensorBoard forgets the steps that are measured again; a line that was cut or changed is dropped."""
    for first, last in ((0, 5), (3, 8)):
        writer = MetricsWriter(tmp_path, first)
        for step in range(first + 1, last + 1):
            writer.write(step, {"train/loss": float(step)})
        writer.close()
        with (tmp_path / "metrics.jsonl").open("a") as lines:
            lines.write('[3]\n{"step": "a"}\n{"step": 2, "tr')
    assert scalars_of(tmp_path / "tensorboard") == list(range(1, 9))
    MetricsWriter(tmp_path, 7).close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == list(range(1, 8))


def test_a_folder_whose_steps_count_from_0_is_one_line_and_stays_as_it_was(tmp_path):
    """As an older dpx counted: a run that went on would lose a step, or count one twice."""
    older = '{"epoch": 0, "step": 0, "train/loss": 3.0}\n{"epoch": 0, "step": 1, "train/loss": 2.0}\n'
    for name, opened in (("metrics.jsonl", lambda path: MetricsWriter(path.parent, 1)), ("telemetry.jsonl", Released)):
        (tmp_path / name).write_text(older)
        with pytest.raises(
            ConfigError, match=rf"{name}: counts its steps from 0, as an older dpx did. Use the dpx that wrote it, or train"
        ):
            opened(tmp_path / name)
        assert (tmp_path / name).read_text() == older
    with pytest.raises(ConfigError, match="counts its steps from 0"):
        results.read(tmp_path)


def test_a_file_of_the_claim_that_cannot_be_written_is_named_in_one_line(tmp_path, limit):
    """Ledger, statement and released values are not dropped: the run ends, and can resume from its last checkpoint."""
    with contextlib.closing(Ledger(tmp_path / "ledger")) as ledger:
        released = Released(tmp_path / "telemetry.jsonl")
        released.hold(0, 1, {"released/loss": 1.0})
        before = (tmp_path / "ledger").read_bytes()
        limit(len(before) + 5)
        for name, write in {
            "ledger": lambda: ledger.declare_plan(Plan(steps=2)),
            "privacy.json": lambda: write_durably(tmp_path / "privacy.json", "x" * 9999),
            "telemetry.jsonl": lambda: [released.hold(0, step, {"released/loss": 1.0}) for step in range(99)] and released.publish(None),
        }.items():
            with pytest.raises(OSError) as caught:
                write()
            fault = "no space left on device" if name == "ledger" else "file too large"
            expected = f"{tmp_path / name}: {fault}. Free space or repair the disk, and run the same command."
            assert str(as_refused(caught.value)) == expected
        limit(resource.RLIM_INFINITY)
        ledger.declare_plan(Plan(steps=2))
    assert Ledger(tmp_path / "ledger").plan == Plan(steps=2) and {path.name for path in tmp_path.iterdir()} == {"ledger", "telemetry.jsonl"}


def test_an_event_file_holds_text_and_nothing_is_written_ahead_of_its_start(tmp_path):
    file = EventFile(tmp_path / "events", 1)
    assert not (tmp_path / "events").exists()
    file.add_text("config", "model: micro")
    file.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert events.Tags()["tensors"] == ["config/text_summary"]
    shutil.rmtree(tmp_path / "events")


def test_the_keys_of_the_command_line_come_first_then_epsilon_and_the_learning_rate(tmp_path):
    (tmp_path / "hydra").mkdir()
    given = ["run=x", "~tune", "+experiment=e", "data.vocabulary.size=512", "clip.clipping_norm=0.5", "train=lora", "train.rank=4"]
    (tmp_path / "hydra" / "overrides.yaml").write_text(json.dumps(given))
    config = "train:\n  rank: 4\ndata:\n  vocabulary:\n    size: 512\n"
    columns = {"steps": 2, "learning_rate": 0.1, "clipping_norm": 0.5, "epsilon": None}
    varied = {"experiment": "e", "data.vocabulary.size": 512, "clipping_norm": 0.5, "train": "lora", "train.rank": 4}
    shown = varied_first(columns, tmp_path, config)
    assert list(shown.items()) == [*varied.items(), ("epsilon", None), ("learning_rate", 0.1), ("steps", 2)]
    assert list(varied_first(columns, tmp_path / "gone", config)) == ["epsilon", "learning_rate", "steps", "clipping_norm"]
