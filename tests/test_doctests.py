"""The examples in the docstrings of what dpx exports."""

import doctest
import importlib

import pytest

MODULES = ("dpx.clipping.clipped_grad", "dpx.mechanism.tree_noise", "dpx.privacy.accounting", "dpx.privacy.solve")


@pytest.mark.parametrize("module", MODULES)
def test_every_example_gives_what_it_shows(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0 and found.failed == 0
