"""The micro model of the training tests."""

from tests.training.conftest import micro as micro
