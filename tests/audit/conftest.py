"""The canaries' step under the main job's mechanism, sound or with one part replaced."""

import pytest

from dpx import config, recipes
from dpx.audit.dirac import Canaries, Setting


@pytest.fixture(scope="session")
def experiment():
    return config.build(recipes.compose(["clipping=book_keeping"]))[0]


@pytest.fixture(scope="session")
def canaries(experiment):
    """`Canaries` of 20,000 coins under a claim of epsilon 2."""
    return lambda **changes: Canaries.of(experiment, Setting(**changes))
