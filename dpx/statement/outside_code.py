"""Lists the packages that a claim trusts: code from outside this tree that takes part in training or in the statement.

What dpx proves and tests is its own code, which includes packages that its own distribution installs (`dpx.packages.is_of_dpx`).
A part or a job from any other package may draw, clip or count in a way that differs from what it
states, and a package that is only imported may have changed dpx's own functions. So all three are named, and a run with any of them is
stated as trusted, not proved: `guarantee` is `dp_by_<package>`, and epsilon is listed under `unsupported`. Code of no listed package, such
as a notebook's, is named by its module.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from dpx import packages
from dpx.privacy.events import ACCOUNTANTS
from dpx.privacy.segments import Segment

# The separator between the names of several packages, here and in the ledger.
AND = "+"
BY = "dp_by_"
# In the name of a number: of one of the rows that hold the same text.
ONE_COPY = "one_copy"


class Part(NamedTuple):
    """Describes one part of an experiment, or the job that runs it: its config key, its package and its class."""

    key: str
    package: str
    kind: str


def parts(declared: Any) -> list[Part]:
    """Returns every part of `declared` whose class is not dpx's own; what was found before stands for itself."""
    return list(_parts(declared, ""))


def packages_of(declared: Any, job: Any = None) -> tuple[str, ...]:
    """Returns the names of the packages that a claim about `declared` trusts in this process; empty if all of the code is dpx's own.

    They are the packages of its parts, the package of the class of the `job` that runs it, and every listed package that is imported so
    far. They are computed again at each charged step, since a package may be imported at any time.
    """
    return joined((part.package for part in (*parts(declared), *_of_job(job))), imported())


def imported() -> tuple[str, ...]:
    """Returns the listed packages that this process has imported, including packages that are set aside."""
    tops = {package.name.partition(".")[0] for package in packages.listed()}
    return joined(top for top in tops if top in sys.modules and not _is_known(top))


def joined(*names: Iterable[str]) -> tuple[str, ...]:
    """Returns each name once, in alphabetical order."""
    return tuple(sorted({name for group in names for name in group}))


def packages_of_segments(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Returns the packages that charged steps trust, as recorded in their ledger."""
    return joined(*(segment.by.split(AND) for segment in segments if segment.by))


def guarantee(is_private: bool, reasons: list[str], by: tuple[str, ...]) -> str:
    """Returns the value of `guarantee` in a statement, a plan or a study: `not_private`, `none`, `dp_by_<packages>` or `dp`."""
    if not is_private:
        return "not_private"
    if reasons:
        return "none"
    return BY + AND.join(by) if by else "dp"


def packages_of_guarantee(guarantee: str) -> tuple[str, ...] | None:
    """Returns the packages that a stated guarantee trusts, empty for `dp`; `None` without a guarantee."""
    if guarantee == "dp":
        return ()
    return tuple(guarantee.removeprefix(BY).split(AND)) if guarantee.startswith(BY) else None


def heading(name: str, guarantee: str) -> str:
    """Returns how people read the name of a number that dpx has not proved, such as `epsilon/pld`.

    A run that trusts packages has an epsilon with a condition; any other number, as of a sampler that did not run, is not a bound.
    """
    method, _, other = name.removeprefix("epsilon/").partition("/")
    if (by := packages_of_guarantee(guarantee)) and method in ACCOUNTANTS and not other:
        return f"epsilon ({method}), if the code of {' and '.join(by)} does what it declares"
    told = {"": "", ONE_COPY: ", of one copy"}.get(other, f", as if by sampler={other}")
    return f"not a bound: epsilon ({method}{told})"


def sentences(by: tuple[str, ...]) -> list[str]:
    """Returns the reason, in one sentence, why dpx has not proved an epsilon as a bound; empty if `by` is empty."""
    named = " and ".join(f"{name} {packages.version_of(name)}" for name in by)
    return [f"the claim depends on code of {named}, which dpx has neither proved nor tested"] if by else []


def facts(declared: Any, job: Any = None) -> list[dict[str, Any]]:
    """Returns a statement's facts about the packages whose code takes part: name, version, and the class at each config key.

    A package that is only imported has no class.
    """
    outside = [*parts(declared), *_of_job(job)]
    return [
        {"package": name, "version": packages.version_of(name), "parts": {one.key: one.kind for one in outside if one.package == name}}
        for name in packages_of(declared, job)
    ]


def _of_job(job: Any) -> Iterator[Part]:
    """Returns the class of a job and its base classes before the first that is dpx's own; empty for a job of dpx."""
    for kind in takewhile(lambda kind: not packages.is_of_dpx(package_of(kind)), type(job).__mro__):
        if not _is_known(package_of(kind)):
            yield Part("job", package_of(kind), f"{kind.__module__}.{kind.__qualname__}")


def _is_known(package: str) -> bool:
    return package in sys.stdlib_module_names or packages.is_of_dpx(package)


def _parts(value: Any, key: str) -> Iterator[Part]:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _parts(item, f"{key}.{name}".lstrip("."))
        return
    if isinstance(value, Part):
        yield value
        return
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _parts(item, f"{key}.{number}")
        return
    package = package_of(type(value))
    if not _is_known(package):
        yield Part(key, package, f"{type(value).__module__}.{type(value).__qualname__}")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))


def package_of(kind: type) -> str:
    """Returns the top-level package that defines `kind`; "unknown" for a class that names a module of dpx but is not found there."""
    root = kind.__module__.partition(".")[0]
    looked_up: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        looked_up = getattr(looked_up, name, None)
    return root if root != packages.OWN or looked_up is kind else "unknown"
