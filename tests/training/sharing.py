"""Sessions of runs that compute alike may share what they compile: tracing is most of a run this small."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpx.training import session


def shared(make: Callable[..., Any], key: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """`make`, called once for each `key` of its arguments."""
    kept: dict[tuple[Any, ...], Any] = {}

    def made(*given: Any) -> Any:
        name = key(*given)
        if name not in kept:
            kept[name] = make(*given)
        return kept[name]

    return made


@contextlib.contextmanager
def shared_programs(
    step_key: Callable[..., tuple[Any, ...]], evaluation_key: Callable[..., tuple[Any, ...]]
) -> Iterator[pytest.MonkeyPatch]:
    """Within it sessions share steps by `step_key` and evaluations by `evaluation_key` of what they are made from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "make_step", shared(session.make_step, step_key))
        patch.setattr(session, "held_out", shared(session.held_out, evaluation_key))
        yield patch
