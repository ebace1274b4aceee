"""A config that ties the head to the table, beside weights with another head: the file's head is used, and a line says so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import written
from dpx.models.checkpoint_shape import LAYOUTS, OfCheckpoint, written_out
from dpx.task.declared_task import CausalLanguageModel, MaskedLanguageModel

from .cases import VOCABULARY, Case, names, values

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
    # A classifier does not read it.
    without = checkpoint.select({path: one.shape for path, one in checkpoint.leaves(taken).items() if path.startswith(("emb", "layers"))})
    assert not without.notes and head in without.left_out
    leaves = checkpoint.leaves(taken)
    path = "mlm/decoder" if name.startswith("bert") else "decoder"
    np.testing.assert_array_equal(leaves[path], leaves["embeddings/word"] + np.float32(1.0))
    again = Checkpoint(str(conflicting(tmp_path / "same", name, 0.0)))
    assert again.model.tied and not again.select(task.parameter_shapes(again.model, VOCABULARY)).notes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_of_another_shape_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="config.json: ties the head to the table, but the weights hold .* of shape"):
        Checkpoint(str(conflicting(tmp_path / "other", name, 1.0, rows=VOCABULARY - 4)))


LM = sorted(name for name in names() if name.endswith("_lm_a"))


def changed(folder: Path, name: str, config: dict[str, Any], more: dict[str, tuple[int, ...]], without: tuple[str, ...] = ()) -> Checkpoint:
    """The family's checkpoint with another config, with `more` tensors and without some."""
    Case.read(name).write(folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {key: values(key, shape) for key, shape in more.items()}
    save_file({key: value for key, value in tensors.items() if key not in without}, folder / "model.safetensors")
    return Checkpoint(str(folder))


def selected(checkpoint: Checkpoint, name: str) -> Any:
    is_encoder = name.startswith(("bert", "roberta", "distilbert"))
    task = MaskedLanguageModel(next_sentence=name.startswith("bert")) if is_encoder else CausalLanguageModel()
    return checkpoint.select(task.parameter_shapes(checkpoint.model, VOCABULARY))


@pytest.mark.parametrize("name", LM)
def test_one_rule_names_conflicts_of_every_family(tmp_path: Path, name: str):
    layout = LAYOUTS[Case.read(name).config["model_type"]]
    (head,) = layout.decoder.names
    shape, module = (VOCABULARY, 16), head.removesuffix("weight")
    # The config ties the head, and the weights hold another of its shape: it is used and said. One of another shape is refused.
    found = selected(changed(tmp_path / "tied", name, {"tie_word_embeddings": True}, {head: shape}), name)
    assert f"config.json ties the head to the table, but the weights hold another {head}, which is used" in found.in_words()
    with pytest.raises(ConfigError, match=rf"ties the head to the table, but the weights hold {head} of shape \(60, 16\)"):
        changed(tmp_path / "shape", name, {"tie_word_embeddings": True}, {head: (60, 16)})
    # The config does not tie the head, and the weights lack it.
    with pytest.raises(ConfigError, match=f"config.json: does not tie the head to the table, but the weights lack {head}. Set tie_word"):
        selected(changed(tmp_path / "lacks", name, {"tie_word_embeddings": False}, {}, (head,)), name)
    # The head has a tensor more than its family.
    extra = f"{module}scale"
    with pytest.raises(ConfigError, match=f"contains {extra} of the head, for which its family has no place"):
        selected(changed(tmp_path / "more", name, {}, {extra: (16,)}), name)
    # The table has other rows than the config says.
    with pytest.raises(
        ConfigError, match=r"config.json: has vocab_size=60, but the weights hold a table of 64 rows .* Set vocab_size to 64"
    ):
        changed(tmp_path / "table", name, {"vocab_size": 60}, {})


@pytest.mark.parametrize("name", ["bert_lm_a", "roberta_lm_a"])
def test_of_two_biases_the_one_that_the_head_of_transformers_reads_is_used(tmp_path: Path, name: str):
    layout = LAYOUTS[Case.read(name).config["model_type"]]
    assert layout.bias is not None
    (one, other), (head,) = layout.bias, layout.decoder.names
    checkpoint = changed(tmp_path / "two", name, {}, {other: (VOCABULARY,)})
    found = selected(checkpoint, name)
    assert f"the weights hold {one} and another {other}, which is used" in found.in_words()
    np.testing.assert_array_equal(checkpoint.leaves(found)["mlm/output_bias"], values(other, (VOCABULARY,)))
    with pytest.raises(ConfigError, match="which are one bias"):
        selected(changed(tmp_path / "shape", name, {}, {other: (60,)}), name)
    with pytest.raises(ConfigError, match=f"the weights lack {other}, which an untied head of transformers reads"):
        selected(changed(tmp_path / "untied", name, {"tie_word_embeddings": False}, {head: (VOCABULARY, 16)}), name)
    untied = changed(tmp_path / "both", name, {"tie_word_embeddings": False}, {head: (VOCABULARY, 16), other: (VOCABULARY,)})
    task = MaskedLanguageModel(next_sentence=name.startswith("bert"))
    leaves = untied.leaves(selected(untied, name))
    special = SpecialIds(1, 3, 0, 2, 4)
    tensors = written(untied.model, task, leaves, VOCABULARY, [], special).tensors
    np.testing.assert_array_equal(tensors[one], tensors[other])
