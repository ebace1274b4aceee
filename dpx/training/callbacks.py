"""Tells the callbacks of a run (`dpx.config.callback`) what they may know, and drops one that fails."""

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from dpx.config.callback import Callback, Moment
from dpx.console import stage
from dpx.statement.statement_records import AnyRun

Event = Literal["on_start", "on_evaluation", "on_save", "on_end"]


class Callbacks:
    """The callbacks of the run in the folder `name`, by their names in the config. Without one it does nothing."""

    def __init__(self, declared: Mapping[str, Callback], name: str, steps: int):
        self._declared, self._name, self._steps = dict(declared), name, steps
        # As the ledger has it: a callback does not change this while the run goes on.
        self._given = {name for name, one in declared.items() if one.protected}
        self._stated: AnyRun | None = None
        self._lines: list[Mapping[str, Any]] = []
        self._measured: Mapping[str, float] = {}

    def publish(self, lines: Iterable[Mapping[str, Any]], stated: AnyRun) -> None:
        """Takes the lines of released telemetry that `stated`, which is on disk, charges for."""
        self._stated = stated
        self._lines += [MappingProxyType(dict(line)) for line in lines] if self._declared else []

    def measure(self, scalars: Mapping[str, float]) -> None:
        """Takes the metrics of the newest step, which only callbacks that are declared so are given."""
        self._measured = scalars

    def tell(self, event: Event, step: int) -> None:
        """Calls one method of every callback after `step` steps."""
        lines, self._lines = tuple(self._lines), []
        for name, one in list(self._declared.items()):
            assert self._stated is not None
            protected = MappingProxyType(dict(self._measured)) if name in self._given else None
            moment = Moment(self._name, step, self._steps, copy.deepcopy(self._stated), lines, protected)
            try:
                getattr(one, event)(moment)
            # A package may call `sys.exit`.
            except (Exception, SystemExit) as error:
                del self._declared[name]
                words = next(iter(str(error).splitlines()), "") or type(error).__name__
                stage(f"callbacks.{name} is dropped ({event}: {words}); the run goes on")
