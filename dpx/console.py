"""Where tables for people go."""

from rich.console import Console


def wide() -> Console:
    """The terminal, or 160 columns where there is none: a table cut to 80 says nothing in a log."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
