"""An unreadable checkpoint is refused in one line that names the fault, before any array of the model exists."""

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.weights import INDEX, WEIGHTS
from dpx.interop.checkpoint import Checkpoint
from dpx.models.checkpoint_shape import model_of
from dpx.models.shape import Bert

from . import cases
from .cases import Case


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Case.read("bert_body_a").write(tmp_path / "model")


def shapes(checkpoint: Checkpoint):
    return checkpoint.model.parameter_shapes(cases.VOCABULARY, outputs=2)  # type: ignore[call-arg]


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as found:
        checkpoint = Checkpoint(str(folder))
        checkpoint.leaves(checkpoint.select(shapes(checkpoint)))
    assert "\n" not in str(found.value)
    return str(found.value)


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {name: cases.values(name, shape) for name, shape in Case.read("bert_body_a").tensors.items()}


def test_a_pickle_is_never_opened(folder: Path):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    assert "pytorch_model.bin, and such a file can run code when it is read. Convert it to safetensors" in refused(folder)
    assert "is a file that can run code" in refused(folder / "pytorch_model.bin")


@pytest.mark.parametrize("kept", [4, 200, -5])
def test_a_file_that_is_cut_short(folder: Path, kept: int):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:kept])
    assert "is not a complete safetensors file" in refused(folder) and "Copy it again" in refused(folder)


def test_one_name_of_today_and_one_of_the_first_years(folder: Path):
    held = stored(folder)
    weights.write(folder / WEIGHTS, held | {"embeddings.LayerNorm.gamma": held["embeddings.LayerNorm.weight"] + np.float32(1)})
    assert "contains embeddings.LayerNorm.weight also under its old name. Keep one of them" in refused(folder)


def test_a_name_too_long_for_a_path(folder: Path):
    assert refused(Path("a" * 300)).endswith("no such folder. Name a folder that holds config.json.")


def test_a_file_that_is_misnamed(folder: Path):
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    assert f"contains no {WEIGHTS}, only weights.safetensors" in refused(folder)
    (folder / WEIGHTS).write_bytes(b"PK\x03\x04 a zip, say")
    assert "is not a complete safetensors file" in refused(folder)


def test_a_tensor_under_another_name_leaves_no_random_layer(folder: Path):
    held = stored(folder)
    held["encoder.layer.1.output.dense.weights"] = held.pop("encoder.layer.1.output.dense.weight")
    weights.write(folder / WEIGHTS, held)
    assert "lacks encoder.layer.1.output.dense.weight for layers/down/kernel" in refused(folder)


def test_a_table_of_another_vocabulary(folder: Path):
    held = stored(folder)
    held["embeddings.word_embeddings.weight"] = held["embeddings.word_embeddings.weight"][:-1]
    weights.write(folder / WEIGHTS, held)
    assert "has vocab_size=64, but the weights hold a table of 63 rows (embeddings.word_embeddings.weight)" in refused(folder)


def test_shards_by_their_index(folder: Path):
    held = stored(folder)
    names = sorted(held)
    halves = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in halves.items():
        weights.write(folder / file, {name: held[name] for name in part})
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file for file, part in halves.items() for name in part}}))
    checkpoint = Checkpoint(str(folder))
    leaves = checkpoint.leaves(checkpoint.select(shapes(checkpoint)))
    np.testing.assert_array_equal(leaves["embeddings/word"], held["embeddings.word_embeddings.weight"])
    weights.write(folder / "model-2.safetensors", {name: held[name] + np.float32(1) for name in names[8:]})
    assert f"model-2.safetensors: contains {names[8]}, which model-1.safetensors also contains. Keep one" in refused(folder)
    weights.write(folder / "model-2.safetensors", {name: held[name] for name in names[9:-1]})
    assert f"model-2.safetensors: does not contain {names[-1]}, which its index names" in refused(folder)
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    assert f"model-2.safetensors: is missing, but {INDEX} names it" in refused(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    assert "names ../../elsewhere.safetensors, which is not a safetensors file in the same folder" in refused(folder)


def test_an_index_that_is_left_beside_the_whole_file_is_not_read(folder: Path):
    weights.write(folder / "model-1.safetensors", {name: values + np.float32(1) for name, values in stored(folder).items()})
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(stored(folder), "model-1.safetensors")}))
    checkpoint = Checkpoint(str(folder))
    held = checkpoint.leaves(checkpoint.select(shapes(checkpoint)))["embeddings/word"]
    np.testing.assert_array_equal(held, stored(folder)["embeddings.word_embeddings.weight"])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", np.float16), ("BF16", None)])
def test_half_precision_is_widened(folder: Path, kind: str, dtype: type | None):
    held = stored(folder)
    if dtype is not None:
        tensors_of = {name: values.astype(dtype) for name, values in held.items()}
        raw = {name: (values.tobytes(), kind) for name, values in tensors_of.items()}
        expected = tensors_of["embeddings.LayerNorm.bias"].astype(np.float32)
    else:
        cut = {name: (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16) for name, values in held.items()}
        raw = {name: (values.tobytes(), kind) for name, values in cut.items()}
        expected = (cut["embeddings.LayerNorm.bias"].astype(np.uint32) << 16).view(np.float32)
    header, place = {}, 0
    for name, (data, written) in raw.items():
        header[name] = {"dtype": written, "shape": list(held[name].shape), "data_offsets": [place, place + len(data)]}
        place += len(data)
    encoded = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(data for data, _ in raw.values()))
    checkpoint = Checkpoint(str(folder))
    leaves = checkpoint.leaves(checkpoint.select(shapes(checkpoint)))
    assert leaves["embeddings/norm/bias"].dtype == np.float32
    np.testing.assert_array_equal(leaves["embeddings/norm/bias"], expected)


def test_a_head_of_other_classes_is_made_new_and_said(tmp_path: Path):
    checkpoint = Checkpoint(str(Case.read("bert_classes_a").write(tmp_path)))
    taken = checkpoint.select(checkpoint.model.parameter_shapes(cases.VOCABULARY, outputs=5))  # type: ignore[call-arg]
    assert taken.made_new == ("classifier/bias", "classifier/kernel") and taken.left_out == ("classifier.bias", "classifier.weight")
    assert any("classifier/kernel" in line for line in taken.in_words())


@pytest.mark.parametrize(
    ("name", "changes"),
    [("roberta_classes_a", {"classifier": "relu"}), ("distilbert_classes_a", {"classifier": "dense"})]
    + [("bert_classes_a", {"classifier": "linear"}), ("bert_classes_a", {"pool": "mean"})],
)
def test_a_head_that_is_read_otherwise_is_made_new(name: str, changes: dict[str, str], tmp_path: Path):
    checkpoint = Checkpoint(str(Case.read(name).write(tmp_path)))
    assert isinstance(checkpoint.model, Bert)
    model = dataclasses.replace(checkpoint.model, **changes)  # type: ignore[arg-type]
    shapes = model.parameter_shapes(cases.VOCABULARY, outputs=cases.CLASSES)
    made_new = checkpoint.select(shapes, model).made_new
    assert made_new and all(path.startswith("classifier/") for path in made_new)
    assert not checkpoint.select(checkpoint.model.parameter_shapes(cases.VOCABULARY, outputs=cases.CLASSES), checkpoint.model).made_new


def test_names_of_the_first_years(folder: Path):
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): values
        for name, values in stored(folder).items()
    }
    weights.write(folder / WEIGHTS, renamed)
    checkpoint = Checkpoint(str(folder))
    leaves = checkpoint.leaves(checkpoint.select(shapes(checkpoint)))
    np.testing.assert_array_equal(leaves["embeddings/norm/scale"], renamed["embeddings.LayerNorm.gamma"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "has model_type 't5', which dpx cannot read. Use one of bert, distilbert, gemma2, gemma3_text, gpt2, "),
        ({"hidden_act": "relu"}, "has the activation hidden_act=relu"),
        ({"position_embedding_type": "relative_key"}, "has position_embedding_type=relative_key, but dpx supports only absolute"),
        ({"hidden_size": None}, "does not set hidden_size"),
    ],
)
def test_a_config_that_dpx_has_no_model_for(changes: dict[str, object], message: str):
    found = {key: value for key, value in (Case.read("bert_body_a").config | changes).items() if value is not None or key not in changes}
    with pytest.raises(ConfigError) as refusal:
        model_of(found, "config.json")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert_body_a", {"hidden_size": "16"}, "has hidden_size='16', which is not a whole number of 1 or more"),
        ("bert_body_a", {"num_hidden_layers": True}, "has num_hidden_layers=True, which is not a whole number"),
        ("bert_body_a", {"vocab_size": None}, "has vocab_size=None, which is not a whole number"),
        ("bert_body_a", {"max_position_embeddings": 0}, "has max_position_embeddings=0, which"),
        ("bert_body_a", {"layer_norm_eps": float("nan")}, "has layer_norm_eps=nan, which is not a number of 0 or more"),
        ("bert_body_a", {"initializer_range": None}, "has initializer_range=None, which is not a number"),
        ("bert_body_a", {"tie_word_embeddings": "false"}, "has tie_word_embeddings='false', which is neither true nor false"),
        ("bert_body_a", {"hidden_act": ["gelu"]}, "has the activation hidden_act=['gelu']"),
        ("bert_body_a", {"model_type": ["bert"]}, "has model_type ['bert']"),
        ("roberta_classes_a", {"pad_token_id": None}, "has pad_token_id=None, which is not a whole number of 0 or more"),
        ("roberta_classes_a", {"max_position_embeddings": 2}, "has max_position_embeddings=2, which is not a whole number of 3 or more"),
        ("distilbert_classes_a", {"dim": 16.0}, "has dim=16.0, which is not a whole number"),
        ("gpt2_classes_a", {"n_inner": "24"}, "has n_inner='24', which is not a whole number"),
    ],
)
def test_a_value_of_config_json_that_cannot_be(name: str, changes: dict[str, object], message: str):
    with pytest.raises(ConfigError) as refusal:
        model_of(Case.read(name).config | changes, "config.json")
    assert str(refusal.value).startswith(f"config.json: {message}") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("named", [None, "RobertaForMultipleChoice", ["RobertaModel", None], 5])
def test_architectures_of_any_form_are_read(named: object):
    model = model_of(Case.read("roberta_classes_a").config | {"architectures": named}, "config.json")
    assert isinstance(model, Bert) and model.classifier == ("pooler" if named == "RobertaForMultipleChoice" else "dense")


def test_a_model_from_config_json_is_written_out(folder: Path):
    given = ["init=hf", f"init.path={folder}", "model=hf", "data=random", "task=classification", "data.vocabulary.size=64"]
    cfg = recipes.compose([*given, "data.sequence_length=16"])
    node = config.resolved(cfg)["model"]
    assert node["_target_"] == "dpx.models.shape.Bert" and (node["layers"], node["width"], node["vocabulary_size"]) == (2, 16, 64)
    assert config.build(cfg)[0].model.name == "bert_2x16"
    with pytest.raises(ConfigError, match="no such folder"):
        config.build(recipes.compose(["init=hf", "init.path=./nowhere", "model=hf"]))


def rotary(name: str, **changes) -> str:
    with pytest.raises(ConfigError) as found:
        model_of(Case.read(name).config | changes, "config.json")
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama_lm_a", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "scales rotary positions by rope_type='yarn'"),
        ("llama_lm_a", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama_lm_a", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "does not set low_freq_factor of rope_scaling"),
        ("llama_lm_a", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "has partial_rotary_factor=0.5"),
        ("llama_lm_a", {"mlp_bias": True}, "has mlp_bias=True"),
        ("llama_lm_a", {"hidden_act": "gelu"}, "has hidden_act=gelu"),
        ("llama_lm_a", {"quantization_config": {"bits": 4}}, "has a quantization_config"),
        ("llama_lm_a", {"model_type": "gemma3n"}, "has model_type 'gemma3n', which dpx cannot read. Use one of bert, "),
        ("qwen2_lm_a", {"use_sliding_window": True}, "has use_sliding_window=True"),
        ("gemma3_text_lm_a", {"use_bidirectional_attention": True}, "has use_bidirectional_attention=True"),
        ("gemma2_lm_b", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "at regular distances"),
        ("smollm3_lm_b", {"no_rope_layers": [0, 1, 0]}, "in which the layers without positions do not come at regular distances"),
        ("smollm3_lm_b", {"no_rope_layers": [1, 2, 1]}, "which is not 0 or 1 for each of its 3 layers"),
        ("smollm3_lm_b", {"use_sliding_window": True}, "has use_sliding_window=True"),
        ("gemma2_lm_b", {"layer_types": ["full_attention"]}, "which is not a kind for each of its 3 layers"),
    ],
)
def test_what_a_decoders_config_asks_for_and_is_not_computed(name, changes, words):
    assert words in rotary(name, **changes)


def test_a_config_that_contradicts_its_tensors(tmp_path: Path):
    folder = Case.read("qwen3_lm_a").write(tmp_path)
    known = json.loads((folder / "config.json").read_text())
    for changes, words in (
        (
            {"num_key_value_heads": 2},
            "has model.layers.0.self_attn.k_proj.weight of shape (2, 16, 6), not (2, 16, 12), for layers/key",
        ),
        ({"num_hidden_layers": 1, "layer_types": None}, "contains model.layers.1.input_layernorm.weight"),
        ({"attention_bias": True}, "lacks model.layers.0.self_attn.o_proj.bias"),
        ({"model_type": "llama"}, "contains model.layers.0.self_attn.k_norm.weight"),
        ({"tie_word_embeddings": False}, "does not tie the head to the table, but the weights lack lm_head.weight"),
    ):
        (folder / "config.json").write_text(json.dumps(known | changes))
        checkpoint = Checkpoint(str(folder))
        with pytest.raises(ConfigError) as found:
            checkpoint.select(checkpoint.model.parameter_shapes(cases.VOCABULARY))
        assert words in str(found.value), str(found.value)
