"""Counts through how many files and calls four things go in one short run of training, in the checkout that is the working folder.

python experiments/benchmarks/visits.py <new folder of the run>

A visit is a pair (function that calls, function of dpx that is called) where an argument of the call, or the object whose method it is, is
the thing; a pair counts once. The run is `model=micro data=synthetic steps=2`, followed with `sys.setprofile` in the main thread, so it
also works at an earlier commit, from a worktree of it.

- the experiment: the root record of the config.
- a config value: `clip.clipping_norm`, as the declared clip or as the number.
- the parameters through a step: from the call of `one_step` to its return, in the first step, tracing included; the state, or a tree that
  holds the embeddings.
- the facts of a statement: inside the first call of `claim.statement.build`, each entry into another file of `claim` or `statement` than
  the one entered before, in their order. Arguments are not looked at.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NORM = 0.73125
OF_FACTS = ("claim/", "statement/")


def is_experiment(value: Any) -> bool:
    return type(value).__name__ == "Experiment"


def is_norm(value: Any) -> bool:
    return isinstance(value, float) and abs(value - NORM) < 1e-6 or type(value).__name__ == "Flat"


def is_of_parameters(value: Any) -> bool:
    return type(value).__name__ == "State" or (isinstance(value, dict) and "embeddings" in value)


class Followed:
    """The visits of each thing, and the files that facts of a statement came from, in their order."""

    def __init__(self, root: Path):
        self._root, self._files = f"{root}{os.sep}", dict[str, str | None]()
        self.visits: dict[str, set[tuple[str, str]]] = {name: set() for name in ("experiment", "config value", "parameters in a step")}
        self.facts: list[str] = []
        # The frames of the first step and of the first statement, while they run.
        self._step: Any = None
        self._build: Any = None
        self._has_stepped = self._has_built = False

    def file_of(self, path: str) -> str | None:
        """Returns the file below dpx/, `None` for any other."""
        if path not in self._files:
            self._files[path] = path.removeprefix(self._root) if path.startswith(self._root) else None
        return self._files[path]

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return":
            if frame is self._step:
                self._step, self._has_stepped = None, True
            if frame is self._build:
                self._build, self._has_built = None, True
        file = self.file_of(code.co_filename)
        if event != "call" or file is None:
            return
        if code.co_name == "one_step" and file == "training/loop.py" and not self._has_stepped:
            self._step = frame
        caller = frame.f_back
        while caller is not None and self.file_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        before = None if caller is None else self.file_of(caller.f_code.co_filename)
        if self._build is not None and before != file and file.startswith(OF_FACTS):
            self.facts.append(file)
        if code.co_name == "build" and file == "claim/statement.py" and not self._has_built and self._build is None:
            self._build = frame
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]
        things: dict[str, Callable[[Any], bool]] = {"experiment": is_experiment, "config value": is_norm}
        if self._step is not None:
            things["parameters in a step"] = is_of_parameters
        for name, is_thing in things.items():
            if any(map(is_thing, given)):
                by = "" if caller is None else f"{before}:{caller.f_code.co_qualname}"
                self.visits[name].add((by, f"{file}:{code.co_qualname}"))


def main(folder: str) -> None:
    checkout = Path.cwd()
    sys.path.insert(0, str(checkout))
    sys.argv = [
        "dpx",
        "model=micro",
        "data=synthetic",
        "steps=2",
        "batch_schedule.size=32",
        f"clip.clipping_norm={NORM}",
        f"hydra.run.dir={folder}",
    ]
    followed = Followed(checkout / "dpx")
    from dpx.__main__ import main as run

    sys.setprofile(followed)
    try:
        run()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.setprofile(None)
    for name, pairs in followed.visits.items():
        files = sorted({called.partition(":")[0] for _, called in pairs})
        print(json.dumps({"thing": name, "visits": len(pairs), "files": len(files), "in": files}))
    entered = [file for file, _ in itertools.groupby(file for file in followed.facts if file != "claim/statement.py")]
    print(json.dumps({"thing": "facts of a statement", "visits": len(entered), "files": len(set(entered)), "in": entered}))


if __name__ == "__main__":
    main(*sys.argv[1:])
