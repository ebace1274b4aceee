"""Real SIGKILLs: a killed run, started again with the same command, ends with the same bits as one never killed."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dpx.files.records import to_json
from dpx.privacy.ledger import Ledger
from tests.processes import COARSE, MAIN, answers, environment

STEPS = 24
COMMAND = (
    *(
        "model=micro",
        "model.layers=1",
        "data=synthetic",
        f"steps={STEPS}",
        "batch_schedule.size=24",
        "microbatch=8",
        "privacy.delta=1e-4",
        "accountant=rdp",
    ),
    *(
        "seed=7",
        "schedule.evaluate_every=12",
        "schedule.checkpoint_every=5",
        "schedule.evaluation_rows=32",
        "noise=multiplier",
        "noise.noise_multiplier=0.6",
        COARSE,
    ),
)


# What differs with noise in the forward pass: its rows are compared before their noise is drawn again.
FORWARD = ("data=synthetic_labels", "task=classification", "mechanism=dp_fp", "mechanism.micro_batches=3", "accountant=pld")
FORWARD += ("privacy.adjacency=zero_out_text", "data.source.examples=400", "train=last_layer")
# A head alone compiles least, and leaves one file more for a kill to cut.
HEAD = ("data=synthetic_labels", "task=classification", "data.source.examples=400", "train=last_layer")


def _command(folder: Path, *more: str) -> list[str]:
    return [*COMMAND, *more, f"hydra.run.dir={folder}/run", f"data.directory={folder.parent}/data"]


def _start(folder: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", f"{MAIN}; main()", *_command(folder, *more)]
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _steps_seen(folder: Path) -> int:
    path = folder / "run" / "private" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _ending(folder: Path):
    """Everything that must be equal: released parameters' bytes, and the ledger less its random name."""
    from orbax.checkpoint import v1 as ocp

    params = ocp.load(str((folder / "run" / "release" / "params").absolute()))
    segments = [
        {k: v for k, v in to_json(segment).items() if k not in ("origin", "epoch_name")}
        for segment in Ledger(folder / "run" / "private" / "ledger").segments()
    ]
    return params, segments


def _bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for _, leaf in sorted(_leaves(tree))]


def _leaves(tree, path=""):
    for name, value in tree.items():
        yield from _leaves(value, f"{path}/{name}") if isinstance(value, dict) else [(f"{path}/{name}", value)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kills", "more"),
    [
        pytest.param(1, HEAD, id="head"),
        pytest.param(1, (), id="1", marks=pytest.mark.slow),
        pytest.param(4, (), id="4", marks=pytest.mark.slow),
        *(pytest.param(2, (f"optimizer={name}",), id=name, marks=pytest.mark.slow) for name in ("sgd", "lion", "adafactor")),
        pytest.param(2, FORWARD, id="dp_fp", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_and_started_again_gives_the_same_bits(tmp_path, kills, more):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    moments = random.Random(1)
    for _ in range(kills):
        process = _start(killed, *more)
        before, target = _steps_seen(killed), moments.randint(1, STEPS // (kills + 1))
        while process.poll() is None and _steps_seen(killed) < before + target:
            time.sleep(0.005)
        time.sleep(moments.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for ended in answers([(folder, _command(folder, *more)) for folder in (killed, whole)], trains_alike=True):
        assert ended.returncode == 0, ended.stderr[-2000:]

    (params, runs), (expected_params, expected_runs) = _ending(killed), _ending(whole)
    assert _bytes(params) == _bytes(expected_params)
    assert runs == expected_runs == [runs[0]] and runs[0]["steps"] == [[0, STEPS]]
    lines = [json.loads(line) for line in (killed / "run" / "private" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
