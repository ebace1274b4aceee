"""Hydra's own errors, said as value, reason and fix."""

import pytest

from dpx import recipes
from dpx.command_line import as_refused
from dpx.declaration import Refused


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["stepz=3"], "stepz: unknown key. Did you mean steps?"),
        (["modle=tiny"], "modle: unknown key. Did you mean model?"),
        (["privacy.dleta=1e-6"], "privacy.dleta: unknown key. Did you mean privacy.delta?"),
        (["model=tinyy"], "model=tinyy: no such option. Use one of tiny,"),
        (["model=zzz"], "model=zzz: no such option. Use one of base,"),
        (["+experiment=anil_2m"], "experiment=anil_2m: no such option. Use one of anil_2m_batch,"),
        (["experiment=anil_2m_batch"], "experiment: not in the default config. Write +experiment=anil_2m_batch."),
        (["steps"], "steps: not of the form key=value."),
        (["data.source.paths=[a"], "data.source.paths=[a: not of the form key=value."),
    ],
)
def test_composition_errors(overrides: list[str], line: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        recipes.compose(overrides)
    assert str(as_refused(raised.value)).startswith(line)


def test_a_refusal_is_found_below_what_wraps_it() -> None:
    try:
        try:
            raise Refused("x=1", "wrong", "Use 2")
        except Refused as inner:
            raise RuntimeError("around it") from inner
    except RuntimeError as outer:
        assert str(as_refused(outer)) == "x=1: wrong. Use 2."


def test_a_defect_is_not_the_users() -> None:
    assert as_refused(KeyError("inside")) is None


def test_paths_with_two_dots_survive() -> None:
    assert str(Refused("../a.txt", "no such file.", "Name a file that exists.")) == "../a.txt: no such file. Name a file that exists."
