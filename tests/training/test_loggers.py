"""What leaves the machine is what the statement covers, unless the user declared more; a logger that fails stops no run."""

import csv
import dataclasses
import http.server
import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dpx import packages
from dpx.claim import statement
from dpx.claim.calibration import calibrate
from dpx.config.declared_loggers import Csv, Loggers, Mlflow, TensorBoard, Wandb
from dpx.config.declared_tuning import Tune
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import WITHOUT_NOISE
from dpx.statement.statement_records import RunStatement
from dpx.training import loggers
from dpx.training.loggers import Begun, Services
from dpx.training.metrics import MetricsWriter

from ..made_statement import made_statement
from .conftest import declare

TELEMETRY = [{"epoch": 0, "step": 1, "loss": 2.5}, {"epoch": 0, "step": 2, "loss": 2.25}]
SECRET = {"train/loss": 0.12345, "grad/norm": 7.0}
CONFIG = """
name: main
steps: 4
seed: 8765309
tags: [first, second]
notes: tried once
data: {source: {paths: /home/somebody/letters.txt}}
logger: {_target_: dpx.config.declared_loggers.Loggers}
"""


class Heard:
    """A service that keeps what it is told."""

    def __init__(self, declared: Any, begun: Begun):
        del declared
        self.logged, self.facts, self.ended = [], {}, None
        self.settings = begun.settings
        HEARD.append(self)

    def log(self, step, values):
        self.logged.append((step, dict(values)))

    def state(self, facts):
        self.facts = facts

    def end(self, is_finished):
        self.ended = is_finished


HEARD: list[Heard] = []


def begun(path: Path) -> Begun:
    return Begun(RunFolder(path / "main-0123456789", CONFIG), "a1b2c3d4")


def stated(path: Path) -> RunStatement:
    """The statement of two steps, with an epsilon of 4 so far and of 8 at the end."""
    made = made_statement(Ledger(path / "ledger"), epsilon={"rdp": 8.0}, accountant="rdp")
    return dataclasses.replace(made, spent=dataclasses.replace(made.spent, steps=2, epsilon={"rdp": 4.0}))


def tell(services: Services, path: Path) -> None:
    """A run of two steps and their statement."""
    for step in (1, 2):
        services.protected(step, SECRET | {"released/loss": 2.5, "privacy/epsilon": 1.0})
    services.publish(TELEMETRY, stated(path))
    services.finish()
    services.close()


@pytest.mark.parametrize("sends_protected", [False, True])
def test_a_service_gets_what_the_statement_covers_and_metrics_without_noise_only_by_declaration(tmp_path, sends_protected):
    HEARD.clear()
    tell(Services(Loggers(wandb=Wandb(), send_protected=sends_protected), begun(tmp_path), {"wandb": Heard}), tmp_path)
    (heard,) = HEARD
    released = [(1, {"released/loss": 2.5}), (2, {"released/loss": 2.25})]
    epsilon = [(2, {"privacy/epsilon": 4.0})]
    assert heard.logged == ([(1, SECRET), (2, SECRET)] if sends_protected else []) + released + epsilon
    assert heard.facts["guarantee"] == "dp" and heard.facts["epsilon"] == 8.0 and heard.ended
    assert heard.settings == {"name": "main", "steps": 4, "data.source.paths": "letters.txt"}, "neither the seed nor a place"


def test_no_epsilon_is_sent_without_a_proof(tmp_path):
    HEARD.clear()
    services = Services(Loggers(mlflow=Mlflow()), begun(tmp_path), {"mlflow": Heard})
    services.publish([], dataclasses.replace(stated(tmp_path), guarantee="none", reasons=("fixed_seed",), epsilon={}))
    services.close()
    assert HEARD[0].logged == [] and HEARD[0].ended is False
    # A service keeps what is not replaced, such as the epsilon of an earlier statement of the same run.
    assert HEARD[0].facts == {"guarantee": "none", "reasons": "fixed_seed", "epsilon": None, "delta": None}


def test_a_service_that_fails_or_hangs_is_dropped_with_one_line(tmp_path, monkeypatch, capsys):
    def refuses(declared, begun):
        raise RuntimeError("no such project\nand more")

    hangs = threading.Event()

    def waits(declared, begun):
        hangs.wait()
        return Heard(declared, begun)

    monkeypatch.setattr(loggers, "_LAST_WAIT_S", 0.05)
    declared = Loggers(wandb=Wandb(), mlflow=Mlflow())
    tell(Services(declared, begun(tmp_path), {"wandb": refuses, "mlflow": waits}), tmp_path)
    hangs.set()
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "logger=mlflow is dropped (no answer for 0 s); the run goes on",
        "logger=wandb is dropped (no such project); the run goes on",
    ]


def test_the_table_has_a_column_for_every_metric_and_is_cut_where_a_run_goes_on(tmp_path, capsys):
    both = Loggers(tensorboard=TensorBoard(), csv=Csv())
    for first in (0, 2):
        writer = MetricsWriter(tmp_path, first, both)
        for step in range(first + 1, 4):
            writer.write(step, {"train/loss": float(step)} | ({"heldout/loss": [1.0, 2.0]} if step == 3 else {}))
        writer.close()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3"] and rows[0]["heldout/loss/layer_01"] == ""
    assert rows[2] == {"step": "3", "train/loss": "3.0", "heldout/loss/layer_00": "1.0", "heldout/loss/layer_01": "2.0"}
    writer = MetricsWriter(tmp_path, 3, Loggers(csv=Csv()))
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    writer.write(4, {"train/loss": 1.0})
    writer.write(5, {"train/loss": 1.0})
    writer.close()
    assert capsys.readouterr().err == "logger=csv is dropped (is a directory); the run goes on\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_without_tensorboard_no_event_file_is_written(tmp_path):
    writer = MetricsWriter(tmp_path, 0, Loggers())
    writer.describe("", {})
    writer.write(1, {"a": 1.0})
    writer.hparams({}, [])
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_who_was_given_metrics_without_noise_stays_in_the_statement(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.note_sent(["wandb"])
    ledger.note_sent(["wandb", "mlflow"])
    ledger.close()
    again, declared = Ledger(tmp_path / "ledger"), declare()
    stated = statement.build(declared.claim, None, calibrate(declared.claim, 1000), again)
    assert WITHOUT_NOISE + "this run gives to wandb and mlflow" in stated.not_covered


def test_no_service_is_told_of_the_trials_of_a_search_whose_number_is_secret():
    with pytest.raises(ConfigError, match="^logger=wandb with tune.charge=repeat_and_select: only the winner"):
        declare(tune=Tune(charge="repeat_and_select"), logger=Loggers(wandb=Wandb()))
    assert declare(tune=Tune(charge="repeat_and_select")) and declare(tune=Tune(charge="composition"), logger=Loggers(wandb=Wandb()))


@pytest.mark.parametrize(
    ("line", "is_refused"), [("project = letters", False), ("base_url = https://theirs", True), ("http_proxy: x", True)]
)
def test_a_file_of_the_working_folder_does_not_choose_a_server(tmp_path, monkeypatch, line, is_refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "require_extra", lambda value, extra: None)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"# mine\n[default]\nentity = me\n{line}\n")
    if is_refused:
        with pytest.raises(ConfigError, match="^wandb/settings: sets (base_url|http_proxy) of W&B"):
            Loggers(wandb=Wandb()).require_usable()
    else:
        Loggers(wandb=Wandb()).require_usable()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("file:///mlruns", "is not the address of a server"),
        ("https://me:pass@host", "holds a user or a query"),
        ("http://h/?key=1", "holds"),
    ],
)
def test_the_address_of_a_server_holds_no_secret(uri, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Mlflow(tracking_uri=uri)
    assert "pass" not in str(refused.value) and "key=1" not in str(refused.value)


class _Server(http.server.BaseHTTPRequestHandler):
    """The part of MLflow's REST API that a run uses; it keeps every request."""

    requests: list[tuple[str, Any]] = []

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        path = self.path.partition("?")[0].rpartition("mlflow/")[2]
        self.requests.append((path, body))
        run = {"info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"}, "data": {}}
        answers = {
            "experiments/get-by-name": {"experiment": {"experiment_id": "7", "name": "dpx"}},
            "runs/search": {"runs": []},
            "runs/create": {"run": run},
            "runs/get": {"run": run},
            "runs/update": {"run_info": run["info"]},
        }
        text = json.dumps(answers.get(path, {})).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.mark.skipif(not packages.is_installed("mlflow"), reason="the extra mlflow is not installed")
def test_what_an_mlflow_server_is_sent(tmp_path, capsys):
    _Server.requests.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tell(Services(Loggers(mlflow=Mlflow(tracking_uri=f"http://127.0.0.1:{server.server_port}")), begun(tmp_path)), tmp_path)
        server.shutdown()
    assert capsys.readouterr().err == ""
    sent = [(path, body) for path, body in _Server.requests if path in ("runs/create", "runs/log-batch", "runs/update")]
    metrics = [(one["key"], one["step"], one["value"]) for _, body in sent for one in body.get("metrics", ())]
    assert ("released/loss", 2, 2.25) in [(key, int(step), value) for key, step, value in metrics]
    params = {one["key"]: one["value"] for _, body in sent for one in body.get("params", ())}
    assert params == {"name": "main", "steps": "4", "data.source.paths": "letters.txt"}
    tags = {one["key"] for _, body in sent for one in body.get("tags", ())}
    assert tags >= {"dpx.ledger", "dpx.guarantee", "dpx.epsilon", "first"} and not any(tag.startswith("mlflow.source") for tag in tags)
    assert sent[-1][1]["status"] == "FINISHED"
    said = json.dumps(_Server.requests)
    assert "train/loss" not in said and "8765309" not in said and str(tmp_path) not in said


@pytest.mark.skipif(not packages.is_installed("wandb"), reason="the extra wandb is not installed")
def test_what_weights_and_biases_is_sent(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell(Services(Loggers(wandb=Wandb(mode="offline")), begun(tmp_path)), tmp_path)
    assert "is dropped" not in capsys.readouterr().err
    (file,) = (tmp_path / "wandb").rglob("*.wandb")
    told = file.read_bytes()
    for name in (b"released/loss", b"privacy/epsilon", b"letters.txt", b"first", b"guarantee"):
        assert name in told, name
    for name in (b"train/loss", b"8765309", str(tmp_path).encode(), os.getcwd().encode(), socket.gethostname().encode(), b"pytest"):
        assert not re.search(re.escape(name), told), name
    assert (tmp_path / "wandb").stat().st_mode & 0o077 == 0 and not (tmp_path / "main-0123456789").exists()
