"""Where text and tables for people go."""

import os
import sys
from typing import NoReturn

from rich.console import Console

from dpx.declaration import ConfigError


def closed_pipe() -> ConfigError:
    """The error to report where the reader of standard output has gone (`| head`). What is written there from now on is thrown away."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return ConfigError("standard output", "was closed before everything was written", "Read all of it, or write it to a file")


def _refuse_closed_pipe(self: Console) -> NoReturn:
    raise closed_pipe()


# Rich's own answer is exit code 1 without a word.
Console.on_broken_pipe = _refuse_closed_pipe


def wide_console() -> Console:
    """The terminal, or 160 columns where there is none: a table cut to 80 says nothing in a log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def stage(text: str) -> None:
    """Says on standard error what takes time from now on; tables alone go to standard output."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def figure(value: float, places: int = 3) -> str:
    """`value` to `places` decimal places, and with at least two digits where it is small or huge: 7.394, 0.039, 0.00027, 3.7e+19."""
    is_readable = value == 0 or 10 ** (1 - places) <= abs(value) < 1e9
    return f"{value:.{places}f}" if is_readable else f"{value:.2g}"
