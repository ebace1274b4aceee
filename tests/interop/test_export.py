"""Exported weights: bit for bit those of the run, in the layout of transformers, with a statement and without a figure of private text."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit

from dpx import config
from dpx.data import tokenizer as text_tokenizer
from dpx.data.prepare import prepare
from dpx.data.rows import marked_examples
from dpx.data.store import Store
from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import RunFolder
from dpx.files.weights import nested
from dpx.interop import tokenizer_files
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.export import _with_padding, _written_whole
from dpx.interop.written import family_of, written
from dpx.models.shape import Bert, Decoder
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel
from dpx.task.objective import objective

from . import cases
from .cases import CLASSES, VOCABULARY, Case
from .conftest import WORDS, train

FLAT: dict[str, Any] = {"name": "m", "layers": 1, "width": 4, "heads": 1, "feed_forward": 4}


def export(run: Path, *overrides: str) -> Path:
    cfg = OmegaConf.merge(OmegaConf.load(run / "private" / "config.yaml"), {"job": {"_target_": "dpx.job.released_jobs.Export"}})
    experiment, job = config.build(OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides))))  # type: ignore[arg-type]
    job(experiment, RunFolder(run))
    return run / "release" / "hf"


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """Adapters and a new head on a checkpoint."""
    return train(place, "adapted", "train=lora", "train.head=true", "train.rank=2", "init.provenance=public")


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return export(run)


def test_a_folder_holds_all_that_transformers_reads(exported: Path, run: Path):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "vocabulary_learnt_from.json",
        "privacy.json",
        "dpx_config.yaml",
        "README.md",
        "dpx_manifest.json",
    }
    declared = json.loads((exported / "config.json").read_text())
    assert declared["architectures"] == ["BertForSequenceClassification"] and declared["label2id"] == {"0": 0, "1": 1}
    assert (exported / "privacy.json").read_bytes() == (run / "release" / "privacy.json").read_bytes()


def test_its_card_is_the_statement_and_no_figure(exported: Path, run: Path):
    card, results = (exported / "README.md").read_text(), json.loads((run / "private" / "results.json").read_text())
    stated = json.loads((run / "release" / "privacy.json").read_text())
    assert f"guarantee: **{stated['guarantee']}**" in card and f"{stated['epsilon']['rdp']:.4g}" in card and "train=lora" in card
    assert all(line in card for line in (*stated["not_covered"], *stated["assumptions"]))
    # As a word: the random name of a release may contain it.
    assert re.search(r"\bf1\b", card) is None
    assert not any(word in card for word in ("accuracy", "matthews", str(results["heldout"]["loss"])[:6]))


def test_its_card_has_what_a_hub_reads_and_no_path(exported: Path, run: Path, place: Path, tmp_path: Path):
    hydra = run / "private" / "hydra"
    hydra.mkdir(exist_ok=True)
    (hydra / "overrides.yaml").write_text(f"- init.path={place}/model\n- data.source.paths=[{place}/rows.csv]\n- steps=2\n")
    (place / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    export(run, f"job.to={tmp_path}/hub", "job.base=someone/small")
    card, front = (tmp_path / "hub" / "README.md").read_text(), (exported / "README.md").read_text()
    assert 'license: "mit"\nbase_model: "someone/small"\npipeline_tag: text-classification' in card
    assert "python -m dpx init.path=model 'data.source.paths=[rows.csv]' steps=2\n" in card and str(place) not in card
    assert 'pipeline("text-classification", model=".")("A text.", truncation=True)' in card
    assert 'license: "unknown"' in front and "base_model" not in front
    settings = json.loads((tmp_path / "hub" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 12
    with pytest.raises(ConfigError, match="job.base=/models/a: is a path"):
        export(run, "job.base=/models/a")


def test_logits_are_the_runs_with_adapters_merged(exported: Path, run: Path):
    experiment, _ = config.build(OmegaConf.load(run / "private" / "config.yaml"))  # type: ignore[arg-type]
    store = prepare(experiment.data, experiment.privacy)
    of: Any = objective(experiment.model, experiment.task, VOCABULARY, store.manifest)
    checkpoint = Checkpoint(str(exported))
    assert checkpoint.model == Bert(**{**vars(experiment.model), "name": checkpoint.model.name})  # type: ignore[arg-type]
    taken = checkpoint.select(of.task.parameter_shapes(experiment.model, VOCABULARY))
    assert not taken.made_new and not taken.left_out
    batch = of.batch(jnp.zeros(2, jnp.uint32), store.rows("protected", np.arange(8)))
    params = jax.tree.map(jnp.asarray, nested(checkpoint.leaves(taken)))
    own = jax.jit(of.logits)(released(run / "release" / "params"), batch)
    np.testing.assert_allclose(jax.jit(of.logits)(params, batch), own, atol=1e-5)


def test_the_exported_tokenizer_marks_text_as_rows_were_marked(exported: Path, run: Path):
    experiment, _ = config.build(OmegaConf.load(run / "private" / "config.yaml"))  # type: ignore[arg-type]
    store = prepare(experiment.data, experiment.privacy)
    rows, own, vocabulary = store.rows("protected", np.arange(5)), Tokenizer.from_file(str(exported / "tokenizer.json")), store.vocabulary()
    for tokens, length in zip(rows["tokens"], rows["length"], strict=True):
        text = " ".join(vocabulary[token] for token in tokens[1 : length - 1])
        assert own.encode(text).ids == tokens[:length].tolist()


@pytest.mark.parametrize("name", [name for name in cases.names() if "_body_" not in name])
def test_every_family_goes_out_as_it_came_in(name: str, tmp_path: Path):
    case = Case.read(name)
    checkpoint = Checkpoint(str(case.write(tmp_path)))
    model = checkpoint.model
    is_classifier, is_encoder = "_classes_" in name, isinstance(model, Bert)
    lm = MaskedLanguageModel(next_sentence=name.startswith("bert")) if is_encoder else CausalLanguageModel()
    task = Classification(classes=CLASSES) if is_classifier else lm
    leaves = checkpoint.leaves(checkpoint.select(task.parameter_shapes(model, VOCABULARY)))
    special = SpecialIds(pad_id=case.config.get("pad_token_id") or 0, unk_id=3, cls_id=4, sep_id=5, mask_id=6)
    found = written(model, task, leaves, VOCABULARY, [], special)
    assert found.family == case.config["model_type"] and found.architecture == case.config["architectures"][0]
    assert found.tensors.keys() <= case.tensors.keys()
    for tensor, values in found.tensors.items():
        assert values.tobytes() == cases.values(tensor, case.tensors[tensor]).tobytes(), tensor
    written_to = tmp_path / "again"
    written_to.mkdir()
    shutil.copyfile(tmp_path / "model.safetensors", written_to / "model.safetensors")
    (written_to / "config.json").write_text(json.dumps(found.config))
    assert Checkpoint(str(written_to)).model == model


def test_adapters_go_out_alone_with_the_name_of_their_base(run: Path, exported: Path, place: Path, tmp_path: Path):
    export(run, "job.format=peft", f"job.to={tmp_path}/adapters")
    folder = tmp_path / "adapters"
    assert {path.name for path in folder.iterdir()} == {path.name for path in exported.iterdir()} - {"config.json", "model.safetensors"} | {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    declared, card = json.loads((folder / "adapter_config.json").read_text()), (folder / "README.md").read_text()
    assert declared["base_model_name_or_path"] == "model" and declared["modules_to_save"] == [
        "bert.pooler.dense",
        "classifier",
    ]
    assert "library_name: peft" in card and "job.format=peft" in card and "guarantee: **dp**" in card
    assert "BertForSequenceClassification.from_pretrained(" in card and "num_labels=2" in card


def test_what_has_no_class_is_refused(exported: Path, run: Path):
    for changes in ({"pool": "mean"}, {"classifier": "linear"}):
        model = Bert(name="m", layers=1, width=8, heads=1, feed_forward=8, **changes)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Train with model.pool=cls and the classifier of the model's own family"):
            family_of(model, Classification(classes=2))
    with pytest.raises(ConfigError, match="already exists. Delete it, or name another folder with job.to"):
        export(run)


class OneMark(Store):
    """A store of rows that were cut with GPT-2's tokenizer: one mark for all."""

    def __init__(self, folder: Path):
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(iter(["a text"]), vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
        trained._tokenizer.save(str(folder / "tokenizer.json"))
        self.folder, self.manifest = folder, SpecialIds(pad_id=0, unk_id=0, cls_id=0, sep_id=0, mask_id=0)  # type: ignore[assignment]
        self.size = trained.get_vocab_size()

    def tokenizer(self) -> text_tokenizer.TextTokenizer:
        return text_tokenizer.of_path(self.folder / "tokenizer.json", self.size)

    def vocabulary(self) -> list[str]:
        ids = Tokenizer.from_file(str(self.folder / "tokenizer.json")).get_vocab()
        return sorted(ids, key=lambda token: ids[token])


@pytest.mark.parametrize("spare", [0, 3])
def test_where_padding_is_the_last_mark_a_classifier_gets_padding_of_its_own(spare: int, tmp_path: Path):
    store = OneMark(tmp_path)
    model = Decoder(name="m", layers=1, width=4, heads=1, feed_forward=4, positions=16)
    leaves = {"embeddings/word": np.ones((store.size + spare, 4), np.float32)}
    padded, special = _with_padding(model, Classification(classes=2), leaves, store)
    assert special.pad_id == store.size and len(padded["embeddings/word"]) == max(store.size + 1, store.size + spare)
    np.testing.assert_array_equal(padded["embeddings/word"][: store.size], leaves["embeddings/word"][: store.size])
    (tmp_path / "out").mkdir()
    tokenizer_files.write(tmp_path / "out", store, special, model, Classification(classes=2), 16)
    again = text_tokenizer.of_path(tmp_path / "out", store.size + 1)
    assert again.special == special and len(again.vocabulary) == store.size + 1
    rows = marked_examples(again, [[[5, 6]]], 8)
    # What transformers' class reads: the last token that is not padding.
    assert np.flatnonzero(rows["tokens"][0] != special.pad_id)[-1] == rows["length"][0] - 1
    for task, kind in ((CausalLanguageModel(), model), (Classification(classes=2), Bert(**FLAT))):
        assert _with_padding(kind, task, leaves, store) == (leaves, store.manifest)


@pytest.mark.parametrize("segments", [0, 1, 2])
def test_a_second_text_is_of_segment_1_where_the_model_has_it(segments: int, tmp_path: Path):
    store = OneMark(tmp_path)
    (tmp_path / "out").mkdir()
    special, model = SpecialIds.from_ids(store.manifest), Bert(**FLAT, segments=segments)
    tokenizer_files.write(tmp_path / "out", store, special, model, MaskedLanguageModel(next_sentence=False), 16)
    told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert ("token_type_ids" in told["model_input_names"]) is (segments == 2)
    assert max(Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("a", "b").type_ids) == int(segments == 2)


def test_what_roberta_would_count_otherwise_is_refused():
    leaves = {"embeddings/position": np.zeros((18, 4), np.float32)}
    model, task = Bert(**FLAT, positions=16, position_offset=2, segments=1), MaskedLanguageModel(next_sentence=False)
    with pytest.raises(ConfigError, match=r"^model.position_offset=2: RoBERTa needs 1 with this id for padding\. Train with"):
        written(model, task, leaves, VOCABULARY, [], SpecialIds(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4))
    with pytest.raises(ConfigError, match="^model.segments=0: no model of transformers combines it with model.position_offset=2"):
        family_of(Bert(**FLAT, position_offset=2, segments=0), task)


def test_an_export_that_cannot_be_written_is_a_line_and_leaves_nothing(run: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for to, said in (("file/inside", "cannot be written"), ("a" * 250, "cannot be written"), ("link", "already exists")):
        with pytest.raises(ConfigError, match=f"^{tmp_path / to}: {said}"):
            export(run, f"job.to={tmp_path / to}")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "release" / "privacy.json").unlink()
    with pytest.raises(ConfigError, match="contains weights but not their statement"):
        export(copy, f"job.to={tmp_path / 'out'}")


def test_exported_weights_are_no_free_start(exported: Path, place: Path):
    with pytest.raises(ConfigError, match="contains weights that a run of dpx trained and exported. Use init=run init.run=adapted"):
        train(place, "laundered", f"init.path={exported}", "init.provenance=public")


def test_a_changed_ledger_or_other_weights_are_not_exported(run: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "release" / "hf", ignore_errors=True)
    ledger = (copy / "private" / "ledger").read_text().splitlines(keepends=True)
    (copy / "private" / "ledger").write_text("".join(ledger[:-1]))
    with pytest.raises(ConfigError):
        export(copy)
    assert not (copy / "release" / "hf").exists()


@pytest.mark.slow
def test_a_decoder_goes_out_with_its_tokenizer_and_chat_template(place: Path, tmp_path: Path):
    """Its tokenizer marks where a text begins and ends, and the class of its family adds one mark that the vocabulary lacks."""
    case = Case.read("qwen3_lm_a")
    folder, letters = case.write(tmp_path / "decoder"), sorted({letter for word in WORDS for letter in word})
    own = Tokenizer(BPE({token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *letters])}, []))
    own.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    own.add_special_tokens(["<pad>", "<s>", "</s>"])
    own.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    overrides = (f"init.path={folder}", "task=causal_lm", "train=lora", "train.rank=2", "train.targets=['*']", "init.provenance=public")
    run = train(place, "decoder", *overrides)
    exported = export(run)
    assert (exported / "chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
    again = text_tokenizer.of_path(exported, 64)
    assert (again.special.pad_id, again.special.cls_id, again.special.sep_id, again.special.mask_id) == (0, 1, 2, 15)
    assert again.vocabulary[3:] == [*letters, "<|endoftext|>"]
    experiment, _ = config.build(OmegaConf.load(run / "private" / "config.yaml"))  # type: ignore[arg-type]
    rows = prepare(experiment.data, experiment.privacy).rows("protected", np.arange(4))
    first = rows["tokens"][0, : rows["length"][0]].tolist()
    # A text of a table has the marks of its tokenizer, which puts none around it.
    assert min(first) > 2
    # A prompt has no mark before it: its tokenizer puts none there, and the export keeps it.
    assert (exported / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    checkpoint = Checkpoint(str(exported))
    leaves = checkpoint.leaves(checkpoint.select(CausalLanguageModel().parameter_shapes(experiment.model, VOCABULARY)))
    changed = {path for path, leaf in leaves.items() if not np.array_equal(leaf, _read(folder, experiment.model)[path])}
    assert changed == {f"layers/{name}/kernel" for name in ("query", "key", "value", "attention_out", "gate", "up", "down")}
    export(run, "job.format=peft", f"job.to={tmp_path}/adapters")
    assert (tmp_path / "adapters" / "chat_template.jinja").is_file()


def _read(folder: Path, model: Any) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint(str(folder))
    return checkpoint.leaves(checkpoint.select(CausalLanguageModel().parameter_shapes(model, VOCABULARY)))


@pytest.mark.slow
def test_transformers_computes_the_same_logits(exported: Path, run: Path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    experiment, _ = config.build(OmegaConf.load(run / "private" / "config.yaml"))  # type: ignore[arg-type]
    store = prepare(experiment.data, experiment.privacy)
    of = objective(experiment.model, experiment.task, VOCABULARY, store.manifest)
    rows = store.rows("protected", np.arange(8))
    own = of.logits(released(run / "release" / "params"), of.batch(jnp.zeros(2, jnp.uint32), rows))  # type: ignore[attr-defined]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(str(exported)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(exported))
    vocabulary = store.vocabulary()
    texts = [
        " ".join(vocabulary[token] for token in tokens[1 : length - 1])
        for tokens, length in zip(rows["tokens"], rows["length"], strict=True)
    ]
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(own, theirs, atol=1e-5)


def test_what_a_killed_export_left_is_removed_by_the_next_one_and_said(tmp_path, capsys):
    left = tmp_path / ".out.7.0123abcd"
    left.mkdir()
    (left / "tokenizer.json").write_text("{}")
    with _written_whole(tmp_path / "out") as unfinished:
        (unfinished / "config.json").write_text("{}")
        assert sorted(path.name for path in tmp_path.iterdir()) == [unfinished.name]
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
    assert "removed what an export left that was killed" in " ".join(capsys.readouterr().err.split())
