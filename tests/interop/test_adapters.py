"""Adapters in PEFT's layout: added to the base model as PEFT adds them, they are the weights with adapters merged."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.weights import Leaves, by_path, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.written import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Written, adapters, written
from dpx.models.lora import add_adapters, merge_adapters
from dpx.models.trained import Adapters, Biases
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel
from dpx.task.objective import objective

from .cases import CLASSES, VOCABULARY, Case, inputs, values

FAMILIES = ["bert_classes_a", "roberta_classes_b", "distilbert_classes_a", "gpt2_classes_a", "llama_classes_b"]
LANGUAGE = [
    "gpt2_lm_a",
    "llama_lm_a",
    "mistral_lm_a",
    "smollm3_lm_a",
    "olmo2_lm_a",
    "qwen2_lm_a",
    "qwen3_lm_a",
    "gemma2_lm_a",
    "gemma3_text_lm_a",
    "vaultgemma_lm_a",
]
TRAIN = Adapters(rank=2, alpha=6.0, targets=("query", "value", "attention_out", "down"), head=True)
SPECIAL = SpecialIds(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)
TASK = Classification(classes=CLASSES)


class Trained:
    """A checkpoint with adapters and a head as training might have left them."""

    def __init__(self, name: str, folder: Path, train: Adapters = TRAIN, task: Any = TASK):
        self.case, self.train, self.task = Case.read(name), train, task
        self.init = FromCheckpoint(path=str(self.case.write(folder)))
        self.checkpoint = Checkpoint(self.init.path)
        taken = self.checkpoint.select(task.parameter_shapes(self.checkpoint.model, VOCABULARY))
        picks = train.selection().picks
        base = {path: leaf + np.float32(0.125) * picks(path) for path, leaf in self.checkpoint.leaves(taken).items()}
        tree = add_adapters(nested(base), jax.random.key(0), rank=train.rank, alpha=train.alpha, targets=tuple(train.targets))
        drawn = {path: values(path, leaf.shape) for path, leaf in by_path(tree).items() if path.endswith("/b")}
        self.leaves: Leaves = by_path(tree) | drawn

    @property
    def model(self) -> Any:
        return self.checkpoint.model

    def out(self) -> Written:
        return adapters(self.init, self.train, self.model, self.task, self.leaves)


@pytest.mark.parametrize("name", FAMILIES)
def test_base_and_adapters_are_the_merged_weights(name: str, tmp_path: Path):
    trained = Trained(name, tmp_path)
    found, kind = trained.out(), trained.case.config["model_type"]
    merged = by_path(merge_adapters(jax.tree.map(jnp.asarray, nested(trained.leaves))))
    special = dataclasses.replace(SPECIAL, pad_id=1 if kind == "roberta" else 0)
    whole = written(trained.model, TASK, merged, VOCABULARY, [], special).tensors
    given = {name.removeprefix("base_model.model."): tensor for name, tensor in found.tensors.items()}
    assert all(name.startswith("base_model.model.") for name in found.tensors)
    changed = 0
    for tensor, expected in whole.items():
        own, module = trained.case.tensors[tensor], tensor.rpartition(".")[0]
        base = values(tensor, own)
        if tensor.endswith(".weight") and re.fullmatch(found.config["target_modules"], module):
            b_dr, a_rp = (given.pop(f"{module}.lora_{factor}.weight") for factor in "BA")
            assert a_rp.shape[0] == _of(found.config["rank_pattern"], module, found.config["r"])
            scale = _of(found.config["alpha_pattern"], module, found.config["lora_alpha"]) / a_rp.shape[0]
            product = scale * (b_dr @ a_rp)
            base, changed = base + (product.T if found.config["fan_in_fan_out"] else product), changed + 1
        if tensor in given:
            assert any(module == saved or module.startswith(f"{saved}.") for saved in found.config["modules_to_save"])
            base = given.pop(tensor)
        np.testing.assert_allclose(base, expected, atol=1e-6, err_msg=tensor)
    assert not given and changed == (3 if kind == "gpt2" else 4) * trained.model.layers
    assert found.config["base_model_name_or_path"] == Path(trained.init.path).name and found.config["task_type"] == "SEQ_CLS"


def _of(pattern: dict[str, Any], module: str, usual: Any) -> Any:
    return next((value for key, value in pattern.items() if re.fullmatch(key, module)), usual)


def test_adapters_of_a_language_model_bring_nothing_else(tmp_path: Path):
    train = Adapters(rank=2, alpha=6.0)
    for name, task in (("gpt2_lm_a", CausalLanguageModel()), ("bert_lm_a", MaskedLanguageModel(next_sentence=True))):
        found = Trained(name, tmp_path / name, train, task).out()
        assert found.config["modules_to_save"] is None and all(".lora_" in tensor for tensor in found.tensors)


def test_what_peft_cannot_add_is_refused_in_one_line(tmp_path: Path):
    trained = Trained("bert_classes_a", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"^train=bias: does not train adapters .*\. Export whole weights: job.format=hf"):
        adapters(trained.init, Biases(head=True), trained.model, TASK, trained.leaves)
    with pytest.raises(ConfigError, match=r"^init=random: does not name a base model for the adapters\. .*job.format=hf"):
        adapters(RandomStart(), TRAIN, trained.model, TASK, trained.leaves)
    with pytest.raises(ConfigError, match=r"^train.head=true with task=mlm.*: PEFT saves whole modules"):
        Trained("bert_lm_a", tmp_path / "lm", TRAIN, MaskedLanguageModel(next_sentence=True)).out()
    gpt2 = Trained("gpt2_classes_a", tmp_path / "gpt2")
    with pytest.raises(
        ConfigError,
        match=r"^init.path=.*: pads with 0, the token that ends a text, so the model would ignore the end of a text\. Export whole",
    ):
        adapters(gpt2.init, TRAIN, gpt2.model, TASK, gpt2.leaves, gpt2.case.config["pad_token_id"])
    held = {name: values(name, shape) for name, shape in trained.case.tensors.items()}
    held["bert.embeddings.LayerNorm.bias"] = held["bert.embeddings.LayerNorm.bias"] + np.float32(1)
    weights.write(tmp_path / "a" / "model.safetensors", held)
    with pytest.raises(
        ConfigError, match=r"contains other values of embeddings/norm/bias than the values that the run began from\. Restore it"
    ):
        trained.out()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for a name that is going
@pytest.mark.parametrize("name", [*FAMILIES, *LANGUAGE])
def test_peft_computes_the_same_logits(name: str, tmp_path: Path):
    peft, transformers, torch = (pytest.importorskip(package) for package in ("peft", "transformers", "torch"))
    is_lm = "_lm_" in name
    targets = ("query", "value") if name.startswith("gpt2") else ("*",)
    trained = Trained(name, tmp_path / "base", *([Adapters(rank=2, alpha=6.0, targets=targets), CausalLanguageModel()] if is_lm else []))
    found, folder = trained.out(), tmp_path / "adapters"
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(found.config))
    weights.write(folder / ADAPTER_WEIGHTS, found.tensors)
    base = getattr(transformers, found.architecture).from_pretrained(trained.init.path, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    rows, kind = inputs(trained.case.config["model_type"]), trained.case.config["model_type"]
    places, length = np.arange(rows["tokens"].shape[1]), rows["length"][:, None]
    given = {"input_ids": rows["tokens"], "attention_mask": places < length}
    if kind == "bert":
        given["token_type_ids"] = (places >= rows["segment_start"][:, None]) & (places < length)
    with torch.no_grad():
        theirs = model(**{key: torch.tensor(np.array(one, np.int64)) for key, one in given.items()}).logits.numpy()
    of = objective(trained.model, trained.task, VOCABULARY, SPECIAL)
    params = jax.tree.map(jnp.asarray, nested(trained.leaves))
    if is_lm:
        # A text with a second segment would have that one, a completion, as its only target.
        batch = of.batch(jnp.zeros(2, jnp.uint32), {**rows, "segment_start": rows["length"], "record": np.arange(3)})
        log_p = torch.log_softmax(torch.tensor(theirs), -1).numpy()[:, :-1]
        of_next = np.take_along_axis(log_p, rows["tokens"][:, 1:, None], -1)[..., 0]
        is_asked = np.arange(1, rows["tokens"].shape[1]) < length
        expected = -np.where(is_asked, of_next, 0).sum(1) / is_asked.sum(1)
        np.testing.assert_allclose(jax.jit(of.losses)(params, batch)[0], expected, atol=1e-5)
        return
    batch = of.batch(jnp.zeros(2, jnp.uint32), {**rows, "label": np.zeros(3, np.int32), "record": np.arange(3)})
    np.testing.assert_allclose(jax.jit(of.logits)(params, batch), theirs, atol=1e-5)  # type: ignore[attr-defined]
