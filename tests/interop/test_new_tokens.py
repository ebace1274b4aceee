"""A tokenizer with more tokens than a checkpoint's table has rows: the run adds them, trains them alone, and transformers loads what it
exports."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files import weights
from dpx.files.orbax_checkpoints import released
from dpx.files.weights import by_path
from dpx.models.checkpoint_shape import LAYOUTS
from dpx.models.networks import DecoderForCausalLM
from tests.processes import COARSE

from ..training.sharing import run_job
from .test_export import export
from .test_text_parity import TOKENS, WORDS, checkpoint

NEW = ["<call>", "</call>", "<who>"]


def grown(folder: Path, name: str) -> Path:
    """The family's small checkpoint, whose tokenizer has three tokens more than its table has rows."""
    checkpoint(folder, name, True, False)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.add_tokens([f"<unused{number}>" for number in range(TOKENS - own.get_vocab_size())])
    assert own.add_tokens(NEW) == 3 and own.get_vocab_size() == TOKENS + 3
    own.save(str(folder / "tokenizer.json"))
    return folder


def composed(root: Path, folder: Path, *overrides: str) -> Any:
    words = WORDS.split()
    rows = [{"prompt": f"<call>{words[n % 8]}</call> {n}", "answer": f"<who> {words[n % 7]}"} for n in range(40)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["init=hf", f"init.path={folder}", "init.provenance=public", "data=table", "task=causal_lm", "model.new_tokens=mean"]
    given += [f"data.source.paths={root}/rows.jsonl", "data.source.prompt_field=prompt", "data.source.completion_field=answer"]
    given += ["data.heldout_fraction=0.2", "data.sequence_length=32", f"data.directory={root}/data", "steps=2", "microbatch=4"]
    given += ["batch_schedule.size=8", "noise=multiplier", "noise.noise_multiplier=1.0", "accountant=rdp", "privacy.delta=1e-3"]
    given += ["schedule.evaluation_rows=4", "lr_schedule.learning_rate=0.01", COARSE]
    return recipes.compose([*given, *overrides])


def run_of(root: Path, cfg: Any) -> tuple[Any, Path]:
    experiment, job = config.build(cfg)
    run_job((experiment, job, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg)))), root / "outputs" / "run", None, None)
    return experiment, root / "outputs" / "run"


def tensors(folder: Path) -> dict[str, np.ndarray]:
    held = weights.Tensors(folder)
    return dict(held.read(held.shapes))


@pytest.mark.parametrize("train", ["train=rows", pytest.param("train=lora train.rows=new train.rank=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["llama_lm_b", pytest.param("qwen2_lm_a", marks=pytest.mark.slow), pytest.param("gpt2_lm_a", marks=pytest.mark.slow)]
)
def test_new_rows_are_trained_and_loaded_by_transformers(tmp_path: Path, name: str, train: str):
    """A tied table (Llama's second), an untied head (Qwen 2), and GPT-2's."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = grown(tmp_path / "model", name)
    experiment, run = run_of(tmp_path, composed(tmp_path, folder, *train.split()))
    model, params = experiment.model, released(run / "release" / "params")
    stated = json.loads((run / "release" / "privacy.json").read_text())["train"]
    assert stated == ("rows: 3 of new tokens" if train == "train=rows" else "lora; rows: 3 of new tokens")
    assert (model.new_rows, experiment.vocabulary_size, experiment.data.vocabulary.size) == (3, TOKENS + 3, TOKENS + 3)
    leaves, given, layout = by_path(params), tensors(folder), LAYOUTS[name.split("_")[0]]
    (word,) = next(part.names for part in layout.body if part.path == "embeddings/word")
    old_VH = next(leaf for tensor, leaf in given.items() if tensor.endswith(word))
    np.testing.assert_array_equal(leaves["embeddings/word"], old_VH)
    # Trained from the mean, by no more than two steps of Adam.
    moved = np.abs(leaves["embeddings/new"] - old_VH.mean(0))
    assert 0 < moved.max() < 0.05 and (moved.max(axis=1) > 0).all()
    assert model.tied or np.abs(leaves["decoder_new"] - leaves["decoder"].mean(0)).max() > 0

    to = export(run)
    theirs, own = transformers.AutoModelForCausalLM.from_pretrained(to).eval(), transformers.AutoTokenizer.from_pretrained(to)
    assert theirs.config.vocab_size == len(own) == TOKENS + 3 and theirs.get_input_embeddings().weight.shape[0] == TOKENS + 3
    ids = own("<call>river</call><who> stone")["input_ids"]
    assert {TOKENS, TOKENS + 1, TOKENS + 2} <= set(ids) and max(ids) == TOKENS + 2
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits.numpy()
    module, length = DecoderForCausalLM(model, TOKENS + 3), jnp.array([len(ids)])
    found: Any = module.apply({"params": params}, jnp.array([ids]), length)
    assert found.shape == wanted.shape == (1, len(ids), TOKENS + 3)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for tensor, leaf in tensors(to).items():
        is_table = leaf.shape[0] == TOKENS + 3
        same = leaf[:TOKENS] if is_table else leaf
        if "rows=new" not in train:
            mine = next(one for named, one in given.items() if _bare(named) == _bare(tensor))
            assert same.tobytes() == mine.tobytes(), tensor
    if "lora" in train:
        with pytest.raises(ConfigError, match="model.new_tokens=mean: PEFT adds adapters to a base model, and that has no rows"):
            export(run, "job.format=peft", f"job.to={tmp_path}/adapters")


def _bare(tensor: str) -> str:
    return tensor.removeprefix("transformer.").removeprefix("model.")


def test_a_tokenizer_beside_the_checkpoint_may_have_more_behind_its_tokens(tmp_path: Path):
    folder, other = checkpoint(tmp_path / "model", "llama_lm_b", True, False), grown(tmp_path / "grown", "llama_lm_b")
    named = f"data.vocabulary.path={other}"
    plain = config.resolved(composed(tmp_path, folder, named))
    assert plain["model"]["new_rows"] == 3 and plain["data"]["vocabulary"]["size"] == TOKENS + 3
    with pytest.raises(
        ConfigError, match=r"model.new_tokens=mean: the tokenizer has \d+ tokens, and the checkpoint's table already has 300"
    ):
        config.resolved(composed(tmp_path, folder))
    shuffled = json.loads((other / "tokenizer.json").read_text())
    first, second = list(shuffled["model"]["vocab"])[60:62]
    shuffled["model"]["vocab"][first], shuffled["model"]["vocab"][second] = (shuffled["model"]["vocab"][one] for one in (second, first))
    (other / "tokenizer.json").write_text(json.dumps(shuffled))
    with pytest.raises(ConfigError, match="has other tokens in its rows than the tokenizer of this run's data"):
        run_of(tmp_path, composed(tmp_path, folder, named, "train=rows"))


def test_without_the_word_the_run_is_refused_and_the_word_is_named(tmp_path: Path):
    folder = grown(tmp_path / "model", "llama_lm_b")
    with pytest.raises(ConfigError, match="has 303 tokens, but the table .* has 300 rows .* or add rows with model.new_tokens=mean"):
        run_of(tmp_path, composed(tmp_path, folder, "model.new_tokens=null"))
