"""The closing table of a sweep, and what each point came to."""

import io
import threading
from pathlib import Path

from dpx.console import Console
from dpx.files.run_folder import Status
from dpx.launch.sweep_tables import Outcome, show


def _shown(*outcomes: Outcome) -> str:
    written = io.StringIO()
    show(list(outcomes), Console(file=written, width=200))
    return written.getvalue()


def test_a_path_in_brackets_is_shown_as_it_is() -> None:
    paths = "data.source.paths=[/some/where.jsonl.gz,/else.txt]"
    assert paths in _shown(Outcome(Path("a"), (paths,), "failed", error="[/some]: no such file"))
    assert "[/some]: no such file" in _shown(Outcome(Path("a"), (paths,), "failed", error="[/some]: no such file"))


def test_only_what_differs_is_named() -> None:
    shown = _shown(Outcome(Path("a"), ("steps=1", "seed=1"), "finished", 0.25), Outcome(Path("b"), ("steps=1", "seed=2"), "failed"))
    assert "seed=2" in shown and "steps=1" not in shown and "25.00%" in shown


def test_an_error_that_several_points_share_is_told_once_and_a_finished_point_has_none() -> None:
    points = [Outcome(Path(f"p{seed}"), (f"seed={seed}",), "failed", error="one long line") for seed in (1, 2, 3, 4)]
    finished = [Outcome(Path(f"p{seed}"), (f"seed={seed}",), "finished", 0.25) for seed in (5, 6)]
    shown = _shown(*points[:3], *finished, points[3])
    assert shown.count("one long line") == 1 and shown.count("as above") == 2 and shown.count("as seed=") == shown.count("as seed=1") == 1


def test_jobs_of_several_threads_keep_their_entries(tmp_path: Path) -> None:
    jobs = [Status(tmp_path, name) for name in ("train", "audit", "evaluate", "export")]
    writers = [threading.Thread(target=lambda job=job: [job.write("running", step=step) for step in range(20)]) for job in jobs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [job.read()["step"] for job in jobs] == [19] * 4


def test_a_status_that_was_damaged_says_nothing(tmp_path: Path) -> None:
    status = Status(tmp_path, "train")
    status.write("finished")
    for damaged in ("[]", "3", '{"train": 1}', "{"):
        (tmp_path / "private" / "status.json").write_text(damaged)
        assert status.read() == {}
    status.write("finished")
    assert status.read()["state"] == "finished"
