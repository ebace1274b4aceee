"""Processes that a test starts: this checkout, one device, programs compiled as quickly as those of the tests."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]


# For runs whose epsilon nobody looks at closely: composing privacy losses finely takes as long as a small run.
WIDTH = 5e-3
COARSE = f"+accountant.value_discretization_interval={WIDTH}"


def micro_run(steps: int) -> list[str]:
    """The command line of a private run that is over in seconds: one layer, since what is compiled is most of it."""
    sizes = ["model=micro", "model.layers=1", "data=synthetic", f"steps={steps}", "microbatch=8", "batch_schedule.size=16"]
    return [
        *sizes,
        "schedule.evaluation_rows=32",
        "noise=multiplier",
        "noise.noise_multiplier=2.0",
        "accountant=rdp",
        "privacy.delta=1e-4",
        COARSE,
    ]


def head_run(steps: int) -> list[str]:
    """As `micro_run`, of a classifier whose head alone is trained, which compiles least: where what is around the steps is the subject."""
    sizes = ["model=micro", "model.layers=1", "data=synthetic_labels", "data.source.examples=200", "train=last_layer", f"steps={steps}"]
    return sizes + micro_run(steps)[4:]


def environment(**more: str) -> dict[str, str]:
    """Of this process, less the simulated devices, with the cache of compiled programs and with `more`."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    inherited = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    return inherited | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "true"} | more


class Answer(NamedTuple):
    """What one command line came to."""

    returncode: int
    stdout: str
    stderr: str

    def refusal(self) -> str:
        """The only line of the error, which is the last one, of a command that was refused."""
        assert self.returncode == 2, self
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert self.stderr.rstrip().endswith(line), self
        return line


MAIN = "from tests import quickly; from dpx.__main__ import main"

# Importing is most of what a command line costs that trains nothing, compiling of what one costs that does.
_DRIVER = f"""
import contextlib, io, json, os, sys
{MAIN}
given = json.load(sys.stdin)
if given["trains_alike"]:
    from tests.training.sharing import shared_programs
    shared_programs().__enter__()
told = []
for folder, line in given["lines"]:
    os.chdir(folder)
    sys.argv, code = ["dpx", *line], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            exec(line, {{"__name__": "__main__"}}) if isinstance(line, str) else main()
        except SystemExit as ended:
            code = ended.code
    told.append((code, out.getvalue(), errors.getvalue()))
json.dump(told, sys.__stdout__)
"""


def answers(lines: Sequence[tuple[Path, Sequence[str]]], *, trains_alike: bool = False, **more: str) -> list[Answer]:
    """(folder, arguments) one after another through `main`, all in one process; a string in place of arguments is Python code to run there.
    With `trains_alike`, runs with the same computation share compiled programs. `more` sets environment variables of the process."""
    each = [(str(folder), line if isinstance(line, str) else list(line)) for folder, line in lines]
    given = json.dumps({"lines": each, "trains_alike": trains_alike})
    command = [sys.executable, "-c", _DRIVER]
    ended = subprocess.run(
        command, input=given, env=environment(COLUMNS="160", **more), capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [Answer(*told) for told in json.loads(ended.stdout)]
