"""A Gemma through the step on several devices: its matrices are split by output or input, and norms and sums are one device's."""

from typing import Any

import jax
import numpy as np
import pytest

from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.models.families import Gemma
from dpx.task.declared_task import CausalLanguageModel
from dpx.task.mlm import Special
from dpx.task.objective import objective
from tests.training.conftest import LENGTH, VOCABULARY, make_rows
from tests.training.test_step import INIT, _assert_close, _make, _on, _reference, _sums, _total

GEMMA = Gemma(name="micro", layers=2, width=32, heads=4, key_value_heads=1, head_dim=8, feed_forward=48, positions=32)
DATA = Data(
    name="synthetic",
    source=Synthetic(documents=10, words_per_document=50, states=8),
    vocabulary=Vocabulary(size=VOCABULARY),
    sequence_length=LENGTH,
    pairs="none",
)
# What is split over `tensor` in computation, and along which axis; the rest is whole there.
SPLIT = {"query": 2, "key": 2, "value": 2, "attention_out": 1, "gate": 2, "up": 2, "down": 1}


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1)], ids=["2x2x2", "4"])
def test_the_sum_on_a_mesh_is_that_of_one_device(mesh):
    of: Any = objective(GEMMA, CausalLanguageModel(), VOCABULARY, Special(0, 1, 2, 3, 4))
    experiment = _on(mesh, "traced", model=GEMMA, task=of.task, data=DATA)
    step, rows = _make(experiment, of, microbatch=1), make_rows(4)
    params = step.init(INIT, None).params
    alone = _reference(experiment, of)(jax.tree.map(np.asarray, params), rows)
    for name, axis in SPLIT.items():
        spec = step.gather(params)["layers"][name]["kernel"].sharding.spec
        assert [place for place, given in enumerate(spec) if given == "tensor"] == ([axis] if mesh[2] > 1 else [])
    sums = _sums(step, params, rows)
    np.testing.assert_allclose(np.sort(np.ravel(sums["count"]["norm"]))[-4:], np.sort(alone.norms_B), rtol=1e-5)
    _assert_close(_total(sums), alone.total)
