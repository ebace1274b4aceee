"""Reads a number, or several labels, of a record of the user's files. An empty value is a target that the row lacks."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpx.data.record_reader import label_text, value_of
from dpx.data.schema import UNKNOWN
from dpx.declaration import ConfigError, require

_TRUTHS = {"0": 0, "1": 1, "false": 0, "true": 1, "": UNKNOWN}


def number_of(where: str, record: Mapping[str, Any], field: str) -> float | None:
    """Returns the number of a record; `None` if it is empty. Raises `ConfigError` for what is not a finite number of 32 bits."""
    value = value_of(where, record, field)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    # What float32 cannot hold would be infinite in a row.
    is_number = math.isfinite(number) and abs(number) < 3.4e38
    require(is_number, where, f"has {str(value)[:40]!r} under {field!r}, which is not a number", "Correct it, or leave it empty")
    return number


def labels_of(where: str, record: Mapping[str, Any], names: Sequence[str], listed: str | None) -> tuple[int, ...]:
    """Returns 1 for each of the `names` that is true of a record, 0 for one that is not, and `UNKNOWN` for one that the record lacks.

    Each name is a column of 0 or 1; or the column `listed` has the names that are true: a list, its JSON text, or names between
    semicolons. Raises `ConfigError` for another value, or another name.
    """
    if listed is None:
        found = []
        for name in names:
            value = value_of(where, record, name)
            truth = _TRUTHS.get("" if value is None else label_text(value).strip().lower())
            if truth is None:
                raise ConfigError(where, f"has {str(value)[:40]!r} under {name!r}, which is neither 0 nor 1", "Write 0, 1, or nothing")
            found.append(truth)
        return tuple(found)
    value = value_of(where, record, listed)
    if value is None:
        return (UNKNOWN,) * len(names)
    if isinstance(value, str):
        value = _listed(where, value, listed)
    require(isinstance(value, list), where, f"has {str(value)[:40]!r} under {listed!r}, which is not a list of labels", "Correct the row")
    true = [label_text(one) for one in value]
    known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    other = [one for one in true if one not in names]
    reason = f"has the label {(other or [''])[0]!r}, which is not among {known}"
    require(not other, where, reason, "Correct the row, or data.source.label_names")
    return tuple(int(name in true) for name in names)


def _listed(where: str, text: str, field: str) -> Any:
    """Returns the names in a field of text, as a list; none in an empty one."""
    if not text.lstrip().startswith("["):
        return [one.strip() for one in text.split(";") if one.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(where, f"has a list under {field!r} that is not JSON", "Write it as JSON, or its names with ; between") from None
