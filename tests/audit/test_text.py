"""Text canaries: their rows, who is handed out, exposure by hand, and a run without noise that betrays them."""

import dataclasses
import json

import numpy as np
import pytest

from dpx.audit import text
from dpx.batch_schedule import Constant
from dpx.data.declarations import Data, Synthetic, Vocabulary
from dpx.data.prepare import prepare
from dpx.declaration import Refused
from dpx.experiment import Schedule
from dpx.job.audit_canaries import AuditCanaries
from dpx.mechanism.declarations import NoPrivacy
from dpx.privacy.declarations import Privacy
from dpx.run_folder import RunFolder
from tests.training.conftest import declare


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    directory = str(tmp_path_factory.getbasetemp() / "data")
    source = Synthetic(documents=60, words_per_document=80, states=16)
    data = Data(name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory)
    fields = {"data": data, "steps": 3, "seed": 3, "schedule": Schedule(evaluation_rows=32)}
    return lambda **changes: declare(**(fields | changes))


@pytest.fixture(scope="module")
def store(experiment):
    made = experiment()
    plain = prepare(made.data, made.privacy)
    is_in = np.array([True, False, True, False, False])
    return text.WithCanaries(plain, text.canary_tokens(plain.manifest, 5, np.random.default_rng(0)), is_in)


def test_a_canary_is_a_row_like_any_other(store):
    rows, own = store.canary_rows(np.arange(5)), store.rows("protected", [0])
    assert {name: (value.dtype, value.shape[1:]) for name, value in rows.items()} == {
        name: (value.dtype, value.shape[1:]) for name, value in own.items()
    }
    assert set(rows["tokens"][:, 0]) == {store.manifest.cls_id} and set(rows["tokens"][:, -1]) == {store.manifest.sep_id}
    assert rows["tokens"].max() < store.manifest.pieces and store.manifest.pad_id not in rows["tokens"]


def test_only_canaries_that_are_in_are_handed_out(store):
    first = store.first
    found = store.rows("protected", [0, 3, *range(first, first + 5)])
    assert found["record"].tolist() == [0, 3, first, first + 2]
    assert store.manifest.rows["protected"] == first + 5
    assert store.rows("heldout", [0])["record"].tolist() == [0]


def test_exposure_and_area_by_hand():
    scores, is_in = np.array([5.0, 3.0, 0.0, 1.0, 2.0, 4.0]), np.array([True, True, True, False, False, False])
    np.testing.assert_allclose(text.exposures(scores, is_in), [2, 1, 0])
    assert text.area_under_curve(scores, is_in) == pytest.approx((3 + 2 + 0) / 9)


def test_nothing_to_compare_with_is_refused():
    with pytest.raises(Refused, match="none is out"):
        text.exposures(np.zeros(3), np.ones(3, bool))


def test_a_private_run_is_attacked_beside_the_run_and_left_undecided(experiment, tmp_path, capsys):
    AuditCanaries(canaries=60, masks=2, guesses=20)(experiment(), RunFolder(tmp_path))
    document = json.loads((tmp_path / "private" / "audit_canaries.json").read_text())
    assert 0.2 < document["auc"] < 0.8 and document["claim"] > 0
    assert document["epsilon_lower_bound_one_run"] <= document["claim"]
    assert not (tmp_path / "release").exists() and "no pass line" in capsys.readouterr().out


def test_plain_training_betrays_its_canaries(experiment, tmp_path):
    """The attack has power: every other row at each step, nothing clipped, few rows beside the canaries."""
    source = Synthetic(documents=10, words_per_document=80, states=16)
    data = dataclasses.replace(experiment().data, source=source)
    plain = experiment(data=data, mechanism=NoPrivacy(), steps=150, batch_schedule=Constant(size=48), microbatch=24)
    document = AuditCanaries(canaries=60, masks=8, guesses=20).attack(plain, RunFolder(tmp_path))
    assert document["auc"] > 0.75 and document["exposure_mean"] > document["exposure_mean_by_chance"]


def test_counted_sizes_are_refused(experiment, tmp_path):
    made = experiment(privacy=Privacy(delta=1e-4, adjacency="replace_one"))
    with pytest.raises(Refused, match="^privacy.adjacency=replace_one"):
        AuditCanaries()(made, RunFolder(tmp_path))
