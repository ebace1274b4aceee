"""Runs of these tests share what they compile."""

import pytest

from ..training import sharing


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with sharing.shared_programs():
        yield
