"""Writes the measurements of a run where its config says (`dpx.config.declared_loggers`): a table on this machine, and services.

A service gets what a statement on disk covers, just after that is written, so the times of sending tell no more than those of the
released files. Metrics without noise are sent only by declaration, once the ledger has noted it. Each service has its own thread:
one that fails or hangs is dropped with one line, and the run goes on.
"""

import csv
import io
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from dpx.config.declared_loggers import Loggers, Mlflow, Wandb
from dpx.console import stage
from dpx.durable import make_private, write_durably
from dpx.files.run_folder import RunFolder
from dpx.statement.statement_records import AnyRun, RunStatement, headline

TABLE = "metrics.csv"
# What may wait for a slow service, in records, and how long the end of a run waits for it.
_MOST_WAITING, _LAST_WAIT_S = 100_000, 60.0
# Keys of a config that are not settings of a run, or that its noise could be drawn again from.
_NOT_SETTINGS = ("job", "seed", "logger", "tags", "notes")


class Table:
    """`metrics.csv`, with a row for each step. A new metric adds a column to all rows."""

    def __init__(self, path: Path, lines: Iterable[Mapping[str, Any]]):
        self._path, self._columns, self.fault = path, ["step"], ""
        self._rows = list(lines)
        self._rewrite()

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds the metrics of a step. The first fault ends the table."""
        if self.fault:
            return
        if row.keys() <= set(self._columns):
            try:
                with self._path.open("a", newline="") as file:
                    file.write(self._text([row], is_first=False))
            except OSError as error:
                self._drop(error)
        else:
            try:
                with self._path.open(newline="") as file:
                    self._rows = [*csv.DictReader(file), dict(row)]
            except OSError as error:
                return self._drop(error)
            self._rewrite()

    def _rewrite(self) -> None:
        self._columns += [name for name in dict.fromkeys(name for row in self._rows for name in row) if name not in self._columns]
        try:
            write_durably(self._path, self._text(self._rows, is_first=True))
        except OSError as error:
            self._drop(error)
        self._rows = []

    def _text(self, rows: Iterable[Mapping[str, Any]], *, is_first: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if is_first:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _drop(self, error: OSError) -> None:
        self.fault = (error.strerror or type(error).__name__).lower()
        stage(f"logger=csv is dropped ({self.fault}); the run goes on")


class Service(Protocol):
    """What a service of measurements does; it is called in the service's own thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the values of one step, counted from 1; steps may come in any order."""
        ...

    def state(self, facts: Mapping[str, Any]) -> None:
        """Sends facts of the whole run, in place of earlier ones."""
        ...

    def end(self, is_finished: bool) -> None:
        """Sends what is left and ends the run there."""
        ...


class Begun:
    """What a service is told of a run when it begins: all of it is in `release/`. `identity` names the ledger, and so the run, for ever."""

    def __init__(self, folder: RunFolder, identity: str):
        self.name, self.identity = folder.path.name, identity
        self.beside = folder.path.absolute().parent
        config: Any = OmegaConf.to_container(OmegaConf.create(folder.released_config_yaml))
        self.settings = dict(_flat({key: value for key, value in config.items() if key not in _NOT_SETTINGS}, ""))
        self.tags, self.notes = tuple(config.get("tags") or ()), str(config.get("notes") or "")


def _flat(node: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, node


class WandbRun:
    """A run of Weights & Biases. Of the machine it gets nothing: no console, host, code, packages or use of memory."""

    def __init__(self, declared: Wandb, begun: Begun):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        # Not in the run's folder, where links are not allowed: W&B links its own logs.
        make_private(begun.beside / "wandb")
        nothing_else = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            host="",
            init_timeout=_LAST_WAIT_S,
            save_code=False,
            silent=True,
            symlink=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=declared.project,
            entity=declared.entity,
            group=declared.group,
            mode=declared.mode,
            id=begun.identity,
            resume="allow",
            name=begun.name,
            tags=list(begun.tags),
            notes=begun.notes or None,
            config=begun.settings,
            dir=str(begun.beside),
            settings=nothing_else,
        )
        # W&B drops a step that is not above the last one, and released values come later than others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def state(self, facts: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(facts))

    def end(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowRun:
    """A run on an MLflow tracking server, found again by a tag with the name of its ledger. The client adds no tag of the machine."""

    _MOST_PARAMS, _LONGEST = 100, 500

    def __init__(self, declared: Mlflow, begun: Begun):
        # MLflow reports its use to its makers, and would try an address that does not answer for minutes.
        for name, value in (("DISABLE_TELEMETRY", "true"), ("HTTP_REQUEST_MAX_RETRIES", "2"), ("HTTP_REQUEST_TIMEOUT", "20")):
            os.environ.setdefault(f"MLFLOW_{name}", value)
        from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient(tracking_uri=declared.tracking_uri)
        experiment = self._client.get_experiment_by_name(declared.experiment)
        at = self._client.create_experiment(declared.experiment) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([at], filter_string=f"tags.`dpx.ledger` = '{begun.identity}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = dict.fromkeys(begun.tags, "") | {"dpx.ledger": begun.identity, "mlflow.note.content": begun.notes}
        self._id = self._client.create_run(at, tags=tags, run_name=begun.name).info.run_id
        params = [Param(key, str(value)[: self._LONGEST]) for key, value in begun.settings.items()]
        for first in range(0, len(params), self._MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self._MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()])

    def state(self, facts: Mapping[str, Any]) -> None:
        self._client.log_batch(
            self._id, tags=[self._tag(f"dpx.{name}", "none" if value is None else str(value)) for name, value in facts.items()]
        )

    def end(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


class _Waiting:
    """A service behind a thread: what is put is sent in order, and nobody waits for it."""

    def __init__(self, name: str, open_service: Callable[[], Service]):
        self._name, self._queue, self._is_told = name, queue.SimpleQueue[Callable[[Service], None] | None](), False
        self.fault = ""
        self._thread = threading.Thread(target=self._work, args=(open_service,), daemon=True, name=f"logger={name}")
        self._thread.start()

    def put(self, send: Callable[[Service], None]) -> None:
        if not self.fault and self._queue.qsize() >= _MOST_WAITING:
            self.fault = f"{_MOST_WAITING:,} records wait for it"
        if self.fault:
            self._tell()
        else:
            self._queue.put(send)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_LAST_WAIT_S)
        if self._thread.is_alive() and not self.fault:
            self.fault = f"no answer for {_LAST_WAIT_S:.0f} s"
        self._tell()

    def _tell(self) -> None:
        if self.fault and not self._is_told:
            self._is_told = True
            stage(f"logger={self._name} is dropped ({self.fault}); the run goes on")

    def _work(self, open_service: Callable[[], Service]) -> None:
        try:
            service = open_service()
            while (send := self._queue.get()) is not None and not self.fault:
                send(service)
        # A library may call `sys.exit`.
        except BaseException as error:
            self.fault = next(iter(str(error).splitlines()), "") or type(error).__name__


class Services:
    """The services of a run, each in its own thread. Without a service it does nothing."""

    def __init__(self, declared: Loggers, begun: Begun, known: Mapping[str, Callable[[Any, Begun], Service]] = {}):
        makers = {"wandb": WandbRun, "mlflow": MlflowRun} | dict(known)
        self._sends_protected = declared.send_protected
        self._all = [_Waiting(name, _opener(makers[name], getattr(declared, name), begun)) for name in declared.services]
        self._is_finished = False

    def publish(self, lines: Iterable[Mapping[str, Any]], stated: AnyRun) -> None:
        """Sends the lines of released telemetry that `stated`, which is on disk, charges for, and what it claims."""
        # Without a proof they replace those of an earlier statement.
        facts: dict[str, Any] = {"guarantee": stated.guarantee, "reasons": "; ".join(stated.reasons), "epsilon": None, "delta": None}
        of_steps = [
            (line["step"], {f"released/{name}": value for name, value in line.items() if name not in ("epoch", "step")}) for line in lines
        ]
        if isinstance(stated, RunStatement) and stated.guarantee == "dp":
            facts |= {"epsilon": headline(stated), "delta": stated.delta}
            spent = stated.spent.epsilon.get(stated.accountant)
            if spent is not None and stated.spent.steps:
                of_steps.append((stated.spent.steps, {"privacy/epsilon": spent}))
        for step, values in of_steps:
            self._put(lambda service, step=step, values=values: service.log(step, values))
        self._put(lambda service: service.state(facts))

    def protected(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends metrics without noise, where the config declares that it does."""
        if self._sends_protected:
            values = {name: value for name, value in scalars.items() if not name.startswith(("released/", "privacy/"))}
            self._put(lambda service: service.log(step, values))

    def finish(self) -> None:
        """Says that the run has come to its end."""
        self._is_finished = True

    def close(self) -> None:
        """Sends what is left, and waits a minute at most for it."""
        is_finished = self._is_finished
        self._put(lambda service: service.end(is_finished))
        for one in self._all:
            one.close()

    def _put(self, send: Callable[[Service], None]) -> None:
        for one in self._all:
            one.put(send)


def _opener(make: Callable[[Any, Begun], Service], declared: Any, begun: Begun) -> Callable[[], Service]:
    return lambda: make(declared, begun)
