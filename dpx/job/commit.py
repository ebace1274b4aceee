"""Finds the version of the code that runs: the commit of the checkout, if dpx runs from a checkout."""

import subprocess
from pathlib import Path

import dpx

_CHECKOUT = Path(dpx.__file__).resolve().parents[1]


def commit() -> str | None:
    """Returns the short hash of HEAD, with `+` if `dpx/` or `conf/` differ from it; `None` in an installed wheel or without git."""
    if not (_CHECKOUT / ".git").exists():
        return None
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "dpx", "conf") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_CHECKOUT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
