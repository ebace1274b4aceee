"""The head with fewest parameters that transformers loads: the default where it alone is trained, clipped exactly, exported as measured."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.weights import by_path, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import with_identity, written
from dpx.models import trainable, trained
from dpx.models.checkpoint_shape import OfCheckpoint, written_out
from dpx.models.shape import Bert
from dpx.task.declared_targets import MultiLabel
from dpx.task.declared_task import Classification, MultipleChoice
from dpx.task.objective import objective
from tests.clipping.batches import SPECIAL as MARKS
from tests.clipping.batches import VOCABULARY as WORDS
from tests.clipping.batches import bert
from tests.clipping.exactness import Case as Exact
from tests.clipping.exactness import assert_exact
from tests.clipping.families import rows

from . import cases
from .cases import CLASSES, VOCABULARY, Case
from .conftest import train
from .test_export import export

BODIES = {"bert_body_a": "linear_tanh", "roberta_lm_a": "linear_tanh", "distilbert_lm_a": "linear_relu"}


def model_of(node: dict[str, Any]) -> Bert:
    return Bert(**{name: value for name, value in node.items() if name != "_target_"})


@pytest.mark.parametrize(("name", "classifier"), BODIES.items())
def test_the_smallest_head_is_loaded_by_transformers_and_by_dpx(name: str, classifier: str, tmp_path: Path):
    """Its own parameters are those of the last map alone, and what is loaded computes what was trained."""
    declared = OfCheckpoint(path=str(Case.read(name).write(tmp_path / "body")))
    model, task = model_of(written_out(declared, is_head_alone=True)), Classification(classes=CLASSES)
    assert model.classifier == classifier and written_out(declared)["classifier"] in ("pooler", "dense", "relu")
    own: Any = objective(model, task, VOCABULARY, MARKS)
    params = jax.jit(own.init)(np.array([1, 2], np.uint32))
    head = trainable.split(params, trained.LAST_LAYER)[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(head)) == model.width * CLASSES + CLASSES
    family = name.partition("_")[0]
    given = cases.inputs(family) | {"record": np.arange(3, dtype=np.int32)}
    expected = np.asarray(own.logits(params, own.batch(np.zeros(2, np.uint32), given | {"label": np.zeros(3, np.int32)})))
    whole, leaves = with_identity(model, task, by_path(jax.tree.map(np.asarray, params)))
    special = SpecialIds(pad_id=1 if family == "roberta" else 0, unk_id=3, cls_id=2, sep_id=3, mask_id=4)
    to = tmp_path / "exported"
    to.mkdir()
    made = written(whole, task, leaves, VOCABULARY, [], special)
    (to / "config.json").write_text(json.dumps(made.config))
    weights.write(to / "model.safetensors", made.tensors)
    read = Checkpoint(str(to))
    again: Any = objective(read.model, task, VOCABULARY, MARKS)
    selected = read.select(task.parameter_shapes(read.model, VOCABULARY))
    assert not selected.made_new
    batch = again.batch(np.zeros(2, np.uint32), given | {"label": np.zeros(3, np.int32)})
    np.testing.assert_allclose(again.logits(jax.tree.map(jax.numpy.asarray, nested(read.leaves(selected))), batch), expected, atol=1e-6)
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(to).eval()
    tokens, length = (torch.tensor(given[one]).long() for one in ("tokens", "length"))
    kinds = {"token_type_ids": (torch.arange(9) >= torch.tensor(given["segment_start"])[:, None]) & (torch.arange(9) < length[:, None])}
    with torch.no_grad():
        more = {key: value.long() for key, value in kinds.items()} if family == "bert" else {}
        theirs = loaded(tokens, attention_mask=(torch.arange(9) < length[:, None]).long(), **more).logits.numpy()
    np.testing.assert_allclose(theirs, expected, atol=1e-5)


def test_a_head_that_the_checkpoint_has_is_trained_further(tmp_path: Path):
    declared = OfCheckpoint(path=str(Case.read("bert_classes_a").write(tmp_path / "classes")))
    assert written_out(declared, is_head_alone=True)["classifier"] == "pooler"
    mean = OfCheckpoint(path=str(Case.read("bert_body_a").write(tmp_path / "body")), pool="mean")
    assert written_out(mean, is_head_alone=True)["classifier"] == "pooler", "transformers pools by no mean"


@pytest.mark.parametrize("classifier", ["linear_tanh", pytest.param("linear_relu", marks=pytest.mark.slow)])
def test_the_head_is_clipped_exactly(classifier: str):
    of: Any = objective(bert(classifier=classifier), Classification(classes=3), WORDS, MARKS)
    assert_exact(Exact.build(of, rows(of)), trained.LAST_LAYER)


def test_a_head_of_another_family_is_refused():
    leaves = {"classifier/kernel": np.zeros((4, 2), np.float32), "classifier/bias": np.zeros(2, np.float32)}
    shape: dict[str, Any] = {"name": "m", "layers": 1, "width": 4, "heads": 1, "feed_forward": 4}
    with pytest.raises(ConfigError, match="model.classifier=linear_relu: transformers' classifier of this family has tanh"):
        with_identity(Bert(**shape, classifier="linear_relu"), MultiLabel(labels=2), leaves)
    model, held = with_identity(Bert(**shape, position_offset=2, classifier="linear_tanh"), MultipleChoice(choices=2), leaves)
    assert isinstance(model, Bert) and model.classifier == "pooler" and "pooler/kernel" in held, "choices of RoBERTa read the pooler"
    assert with_identity(Bert(**shape), MultiLabel(labels=2), leaves)[1] is leaves


def test_the_default_head_of_a_run_is_exported(place: Path):
    run = train(place, "small_head", "train=last_layer", "init.provenance=public")
    claim = json.loads((run / "release" / "privacy.json").read_text())
    assert claim["init"]["origins"][0]["checkpoint"]["made_new"] == ["classifier/bias", "classifier/kernel"]
    folder = export(run)
    held = Checkpoint(str(folder))
    selected = held.select(Classification(classes=2).parameter_shapes(held.model, VOCABULARY))
    np.testing.assert_array_equal(held.leaves(selected)["pooler/kernel"], np.eye(held.model.width))
