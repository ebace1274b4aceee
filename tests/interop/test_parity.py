"""Small checkpoints of every family and head give the hidden states and logits that transformers gives, and come back bit for bit."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import ops
from dpx.data.tokenizer import SpecialIds
from dpx.files import weights
from dpx.files.weights import nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import written
from dpx.models.checkpoint_shape import ROTARY
from dpx.models.modules import Embeddings, stack
from dpx.models.networks import AnyDecoder, BertForPreTraining, DecoderForCausalLM
from dpx.models.rotary_layers import capped
from dpx.models.shape import Bert, Model
from dpx.task.classification import Objective
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel
from dpx.task.mlm import segments

from . import cases
from .cases import CLASSES, VOCABULARY, Case, inputs

NAMES = cases.names()


class Encoder(nn.Module):
    """A model without its head."""

    model: Bert

    @nn.compact
    def __call__(self, tokens_BT, segment_BT, length_B):
        x_BTH, _ = Embeddings(self.model, VOCABULARY, name="embeddings")(tokens_BT, segment_BT, length_B, None)
        return stack(self, self.model, x_BTH, length_B, None)


def hidden_of(model: Model, params, tokens_BT, segment_BT, length_B):
    """The vector of each token after the last layer and, in a decoder, its norm."""
    if isinstance(model, Bert):
        return Encoder(model).apply({"params": params}, tokens_BT, segment_BT, length_B)
    held = params | {"decoder": jnp.zeros((VOCABULARY, model.width))}
    return DecoderForCausalLM(model, VOCABULARY).apply({"params": held}, tokens_BT, length_B, None, lambda h_BTH, _: h_BTH)


def asked(name: str):
    return {key: jnp.asarray(value) for key, value in inputs(name.split("_")[0]).items()}


def shapes_of(model: Model, name: str):
    if "_classes_" in name:
        return Classification(classes=CLASSES).parameter_shapes(model, VOCABULARY)
    if not isinstance(model, Bert):
        return CausalLanguageModel().parameter_shapes(model, VOCABULARY)
    return MaskedLanguageModel(next_sentence=name.startswith("bert_lm")).parameter_shapes(model, VOCABULARY)


def logits_of(model: Model, name: str, params):
    given = asked(name)
    tokens, length = given["tokens"], given["length"]
    segment = segments(tokens.shape[1], given["segment_start"], length)
    if "_classes_" in name:
        module = Objective(model, Classification(classes=CLASSES), VOCABULARY).module
        return {"logits": module.apply({"params": params}, tokens, segment, length)}
    if not isinstance(model, Bert):
        logits: Any = DecoderForCausalLM(model, VOCABULARY).apply({"params": params}, tokens, length, None, ops.decode)
        return {"logits": capped(logits, getattr(model, "logit_cap", None))}
    slots = jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))
    module = BertForPreTraining(model, VOCABULARY, name.startswith("bert_lm"))
    logits, pairs = module.apply({"params": params}, tokens, segment, length, slots)  # type: ignore[misc]
    return {"logits": logits} | ({} if pairs is None else {"next_sentence": pairs})


# The second checkpoint of each kind has another width, other layers and another activation: one of them a family.
SMOLLM2 = Path(os.environ.get("DPX_DATA", "../shared/data")) / "smollm2"
SECOND = {"bert_lm_b", "distilbert_classes_b", "gpt2_body_b", "roberta_classes_b"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name.endswith("_b") and name not in SECOND)) for name in NAMES]
)
def test_hidden_states_and_logits_are_those_of_transformers(name: str, tmp_path: Path):
    case = Case.read(name)
    checkpoint = Checkpoint(str(case.write(tmp_path)))
    model = checkpoint.model
    taken = checkpoint.select(shapes_of(model, name))
    is_whole = "_body_" not in name or not isinstance(model, Bert)
    assert not taken.made_new if is_whole else all(path.startswith("mlm/") for path in taken.made_new)
    assert not taken.left_out if is_whole else set(taken.left_out) == {"pooler.dense.weight", "pooler.dense.bias"}
    params = jax.tree.map(jnp.asarray, nested(checkpoint.leaves(taken)))
    given = asked(name)
    is_token = np.asarray(jnp.arange(given["tokens"].shape[1]) < given["length"][:, None])
    segment = segments(given["tokens"].shape[1], given["segment_start"], given["length"])

    def computed(params: Any) -> dict[str, Any]:
        hidden: dict[str, Any] = {"hidden": hidden_of(model, params, given["tokens"], segment, given["length"])}
        return hidden | (logits_of(model, name, params) if "_body_" not in name else {})

    with jax.default_matmul_precision("highest"):
        found = jax.jit(computed)(params)
    assert found.keys() == case.expected.keys()
    for key, expected in case.expected.items():
        of_tokens = found[key].ndim == 3
        mine, theirs = (np.asarray(one)[is_token] if of_tokens else np.asarray(one) for one in (found[key], expected))
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_comes_back_bit_for_bit(name: str, tmp_path: Path):
    case = Case.read(name)
    checkpoint = Checkpoint(str(case.write(tmp_path)))
    taken = checkpoint.select(shapes_of(checkpoint.model, name))
    back = {}
    for path, leaf in checkpoint.leaves(taken).items():
        back |= taken.parts[path].theirs(leaf)
    assert back.keys() | set(taken.left_out) >= case.tensors.keys() - {"cls.predictions.decoder.bias", "lm_head.decoder.bias"}
    for tensor, values in back.items():
        assert values.tobytes() == cases.values(tensor, case.tensors[tensor]).tobytes(), tensor


def _theirs(folder: Path, tokens: np.ndarray) -> np.ndarray:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "_lm_" in name and name.rsplit("_lm_")[0] in ROTARY])
def test_transformers_computes_the_same_of_a_decoder_that_is_written(name: str, tmp_path: Path):
    checkpoint = Checkpoint(str(Case.read(name).write(tmp_path / "read")))
    model, task = checkpoint.model, CausalLanguageModel()
    leaves = checkpoint.leaves(checkpoint.select(task.parameter_shapes(model, VOCABULARY)))
    found = written(model, task, leaves, VOCABULARY, [], SpecialIds(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4))
    (tmp_path / found.config_file).write_text(json.dumps(found.config))
    weights.write(tmp_path / found.weights_file, found.tensors)
    given = inputs("llama")
    is_token = np.arange(given["tokens"].shape[1]) < given["length"][:, None]
    np.testing.assert_allclose(_theirs(tmp_path, given["tokens"])[is_token], Case.read(name).expected["logits"][is_token], atol=1e-5)
    again = Checkpoint(str(tmp_path)).model
    assert dataclasses.replace(again, name=model.name) == model


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs SmolLM2-135M as a folder, in DPX_DATA")
def test_smollm2_computes_what_transformers_computes():
    checkpoint = Checkpoint(str(SMOLLM2))
    model = checkpoint.model
    assert isinstance(model, AnyDecoder) and model.vocabulary_size is not None
    params = nested(checkpoint.leaves(checkpoint.select(CausalLanguageModel().parameter_shapes(model, model.vocabulary_size))))
    tokens = np.random.default_rng(0).integers(5, model.vocabulary_size, (2, 64)).astype(np.int32)
    module = DecoderForCausalLM(model, model.vocabulary_size)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda params: module.apply({"params": params}, jnp.asarray(tokens), jnp.array([64, 64]), None, ops.decode))(params)
    expected = _theirs(SMOLLM2, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
