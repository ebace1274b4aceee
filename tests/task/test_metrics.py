"""F1 and Matthews' correlation are scikit-learn's."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dpx.task.declared_task import of_confusion
from dpx.task.losses import confusion

CASES = json.loads(Path(__file__).with_name("metrics.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_scikit_learn(case):
    true, answered = np.asarray(case["true"]), np.asarray(case["answered"])
    is_padding = np.arange(len(true) + 3) >= len(true)
    padded_answered, padded_true = (np.pad(values, (0, 3)) for values in (answered, true))
    counted = np.asarray(jax.jit(confusion, static_argnums=3)(padded_answered, padded_true, is_padding, case["classes"]), np.float64)
    assert counted.sum() == len(true)
    found = of_confusion(counted)
    assert found == pytest.approx(case["expected"], abs=1e-12)


def test_no_rows_are_no_division_by_zero():
    assert of_confusion(np.zeros((2, 2))) == {"macro_f1": 0.0, "micro_f1": 0.0, "matthews": 0.0}
