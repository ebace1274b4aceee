"""The canaries' step under the main job's mechanism, sound or with one part replaced."""

import pytest

from dpx import config
from dpx.config import recipes
from dpx.training.dirac import Attack, Setting


@pytest.fixture(scope="session")
def experiment():
    return config.build(recipes.compose(["clipping_method=book_keeping"]))[0]


@pytest.fixture(scope="session")
def canaries(experiment):
    """An `Attack` by 20,000 coins under a claim of epsilon 2."""
    return lambda **changes: Attack.build(experiment.one_step, experiment.mesh, Setting(**changes))
