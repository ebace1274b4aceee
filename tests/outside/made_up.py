"""The package of `dpx_pond/` as if it were installed: on the path, beside a made-up record of its distribution."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

POND = Path(__file__).parent / "dpx_pond" / "dpx_pond"


def record(site: Path, name: str, version: str = "0.3.1", entry: str | None = None) -> None:
    """What an installer writes of a distribution that is imported by `name`."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[dpx.packages]\n{name} = {entry or name}\n")


def package(site: Path, name: str, files: dict[str, str], version: str = "0.1") -> None:
    """A package of these files, and its record."""
    for path, text in {"__init__.py": "", **files}.items():
        (site / name / path).parent.mkdir(parents=True, exist_ok=True)
        (site / name / path).write_text(text)
    record(site, name, version)


@contextmanager
def on_path(site: Path) -> Iterator[None]:
    """Within it what lies in `site` is installed; afterwards nothing of it is imported any more."""
    before = set(sys.modules)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(site)
            yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("dpx_"):
                del sys.modules[name]


@contextmanager
def as_if_unimported(name: str = "dpx_pond") -> Iterator[None]:
    """Within it `name` is installed and not imported, as in a process that used nothing of it; afterwards it is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            patch.delitem(sys.modules, module)
        yield
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]


def pond(site: Path, version: str = "0.3.1") -> Path:
    """`site`, with the pond in it."""
    site.mkdir(parents=True, exist_ok=True)
    (site / "dpx_pond").symlink_to(POND)
    record(site, "dpx_pond", version)
    return site
