"""A config that ties the head to the table, beside weights with another head: the file's head is used, and a line says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dpx.declaration import ConfigError
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.shape import OfCheckpoint, written_out
from dpx.task.declarations import CausalLanguageModel, MaskedLanguageModel

from .cases import VOCABULARY, Case

FAMILIES = {"llama_lm_a": ("model.embed_tokens.weight", "lm_head.weight"), "gpt2_lm_a": ("transformer.wte.weight", "lm_head.weight")}
FAMILIES |= {"bert_lm_a": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")}


def conflicting(folder: Path, name: str, add: float, rows: int = VOCABULARY) -> Path:
    Case.read(name).write(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, (table, head) = load_file(folder / "model.safetensors"), FAMILIES[name]
    save_file(tensors | {head: tensors[table][:rows] + np.float32(add)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_the_weights_is_used_and_said(tmp_path: Path, name: str):
    table, head = FAMILIES[name]
    checkpoint = Checkpoint(str(conflicting(tmp_path / "other", name, 1.0)))
    assert not checkpoint.model.tied and written_out(OfCheckpoint(path=str(tmp_path / "other")))["tied"] is False
    task = MaskedLanguageModel(next_sentence=True) if name.startswith("bert") else CausalLanguageModel()
    taken = checkpoint.select(task.parameter_shapes(checkpoint.model, VOCABULARY))
    assert f"config.json ties the head to the table, but the weights hold another {head}, which is used" in taken.in_words()
    leaves = checkpoint.leaves(taken)
    path = "mlm/decoder" if name.startswith("bert") else "decoder"
    np.testing.assert_array_equal(leaves[path], leaves["embeddings/word"] + np.float32(1.0))
    again = Checkpoint(str(conflicting(tmp_path / "same", name, 0.0)))
    assert again.model.tied and not again.select(task.parameter_shapes(again.model, VOCABULARY)).notes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_of_another_shape_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="config.json: ties the head to the table, but the weights hold .* of shape"):
        Checkpoint(str(conflicting(tmp_path / "other", name, 1.0, rows=VOCABULARY - 4)))
