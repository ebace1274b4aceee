"""Writes text and tables for people to the standard streams."""

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import rich.console
import rich.text

from dpx.declaration import ConfigError


def require_standard_streams() -> None:
    """Opens `/dev/null` in place of standard streams that this process was started without (`2>&-`).

    Otherwise the next file that is opened would get the number of such a stream, and text that libraries write to the stream would go into
    the file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system assigns the lowest free number: this one.
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w"))


def _discard(stream: Any) -> None:
    """Discards everything that is written to `stream` from now on."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def closed_pipe() -> ConfigError:
    """Returns the error to report if the reader of standard output has closed it (`| head`), and discards all later output."""
    _discard(_answers or sys.stdout)
    return ConfigError("standard output", "was closed before everything was written", "Read all of it, or write it to a file")


# What standard output shows: tables, one JSON object for each run, or nothing. The command line sets it once.
Form = Literal["text", "json", "quiet"]
_form: Form = "text"
_answer: Any = None
# Where answers go while `answers_alone` holds standard output.
_answers: Any = None


def set_form(form: Form) -> None:
    """Sets what this process shows from now on, before any job runs."""
    global _form, _answer
    _form, _answer = form, None


def form() -> Form:
    """Returns what this process shows."""
    return _form


def answer(document: Any) -> None:
    """Keeps the answer of a job, a JSON value, for the object that `--json` prints of its run."""
    global _answer
    _answer = document


def taken_answer() -> Any:
    """Returns the answer that the newest job kept, `None` if it kept none, and forgets it."""
    global _answer
    taken, _answer = _answer, None
    return taken


def tell_answer(**facts: Any) -> None:
    """Prints, under `--json` alone, one line: `facts` about a run, with the answer of its job."""
    if _form == "json":
        try:
            print(json.dumps(facts), flush=True, file=_answers or sys.stdout)
        except BrokenPipeError:
            raise closed_pipe() from None


@contextlib.contextmanager
def answers_alone() -> Iterator[None]:
    """Within it, under `--json`, standard output receives answers alone: whatever else is written there goes to standard error."""
    global _answers
    if _form != "json":
        yield
        return
    _answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = None


# Controls but tabs and ends of lines, letters that turn the direction of others, and halves of letters.
_OF_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Console(rich.console.Console):
    """A Rich console that raises `closed_pipe` if its reader has closed the stream. Rich itself exits with code 1 and no message.

    On standard output it prints nothing under `--json` and `--quiet`.
    """

    def __init__(self, **settings: Any):
        super().__init__(quiet=_form != "text" and "file" not in settings, **settings)

    def on_broken_pipe(self) -> NoReturn:
        raise closed_pipe()

    def render_str(self, text: str, **settings: Any) -> rich.text.Text:
        """Renders a text, as one cell of a table also is, without what a terminal would obey."""
        return super().render_str(harmless(text), **settings)


class _Lossy:
    """A stream that discards its text if its reader has closed it or its file can no longer be written."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._tried(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, action: Callable[..., Any], *text: str) -> None:
        try:
            action(*text)
        except OSError as fault:
            # The stream keeps what it could not write, and would fail again at each write and at the end of the process.
            if fault.errno != errno.ENOSPC:
                with contextlib.suppress(OSError):
                    _discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress_console() -> Console:
    """Returns a console on standard error for progress messages. Writing to it never fails, so work does not stop because nobody reads
    them."""
    file: Any = _Lossy(sys.stderr)
    return Console(file=file) if _form != "quiet" else Console()


def harmless(text: str) -> str:
    """Returns a text in which controls of a terminal are written as in Python; a received file may hold them."""
    return _OF_A_TERMINAL.sub(lambda found: ascii(found[0])[1:-1], text)


def tell(line: str) -> None:
    """Writes a line to standard error; discards it if it can no longer be written."""
    stream = _Lossy(sys.stderr)
    stream.write(f"{harmless(line)}\n")
    stream.flush()


def wide_console() -> Console:
    """Returns a console as wide as the terminal, or with 160 columns without a terminal: a table cut to 80 columns is not readable in a
    log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def stage(text: str) -> None:
    """Writes to standard error which stage of the work starts now; standard output receives only tables."""
    progress_console().print(text, highlight=False, markup=False, soft_wrap=True)


def figure(value: float, places: int = 3) -> str:
    """Returns `value` as text with `places` decimal places, and with at least two digits if it is small or huge: 7.394, 0.039, 0.00027,
    3.7e+19."""
    is_readable = value == 0 or 10 ** (1 - places) <= abs(value) < 1e9
    return f"{value:.{places}f}" if is_readable else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Returns a time as text, in seconds, minutes or hours: 0.35 s, 12.4 min, 7,616.0 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"
