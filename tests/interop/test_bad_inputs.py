"""What people get wrong in rows, checkpoints and adapters: the command ends with code 2 and one line, before anything is trained."""

import gzip
import re
import shutil
from pathlib import Path

import pytest

from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.files import weights
from dpx.files.weights import WEIGHTS
from tests.processes import Answer, answers

from . import cases
from .conftest import WORDS

LORA = ("train=lora", "train.head=true")
# Name -> (what is changed of a command that stands, what the line says: the value, and what to do).
BAD = {
    "label missing": (["data.source.paths=unlabelled.csv"], r"unlabelled.csv:3: has no label under 'label'\. Give every row"),
    "label missing in test": (["data.source.test_paths=unlabelled.csv"], r"unlabelled.csv:3: has no label under 'label'\. "),
    "label unknown in test": (["data.source.test_paths=unknown.csv"], r"unknown.csv:3: has the label 'maybe', .* 0, 1\. Correct"),
    "class never seen": (["data.source.labels=[0,1,2]", "task.classes=3"], r"labels: 2: no training row has .*allow_unseen_labels"),
    "missing column": (["data.source.text_field=words"], r"rows.csv:2: has no column 'words'; its columns are text, label\. Name the"),
    "empty text": (["data.source.paths=empty.csv"], r"empty.csv:3: has an empty text under 'text'\. Give it text"),
    "a line of 10 MB": (["data.source.paths=long.csv.gz"], r"long.csv.gz:3: the line has more than 4194304 bytes\. .*shorten the record"),
    "another architecture": (["init.path=t5"], r"config.json: has model_type 't5'.* Use one of bert, distilbert"),
    "a model of another shape": (["model=micro"], r"has embeddings.LayerNorm.bias of shape \(16,\), not \(32,\).* Use model=hf"),
    "wrong vocabulary": (
        ["data.vocabulary.path=other.txt"],
        r"another vocabulary than the vocabulary of this run's data.* Add data.vocabulary.path=",
    ),
    "a vocabulary too long": (["data.vocabulary.path=long.txt"], r"long.txt: has \d+ tokens, but .*size=64\. Set data.vocabulary.size="),
    "truncated weights": (["init.path=truncated"], r"truncated/model.safetensors: is not a complete safetensors file .* Copy it again"),
    "misnamed weights": (["init.path=misnamed"], r"misnamed: contains no model.safetensors, only weights.safetensors\. Name"),
    "a misnamed tensor": (["init.path=renamed"], r"lacks encoder.layer.1.output.dense.weight for layers/down/kernel\. Use"),
    "a pickle": (["init.path=pickled"], r"pickled: stores its weights in pytorch_model.bin, .* Convert it to safetensors"),
    "targets of no parameter": ([*LORA, "train.targets=[qeury]"], r"qeury: does not match any target of adapters\. The nearest are query"),
    "paths of no parameter": (
        ["train=matching", "train.paths=[layers/qeury/*,classifier/*,pooler/*]"],
        r"qeury.*: matches no parameter\. ",
    ),
    "a rank above the width": ([*LORA, "train.rank=17"], r"rank=17: is not possible for a matrix of shape \(16, 16\)\. Use a rank"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    rows = [f"{WORDS[number % 30]} {WORDS[number % 7]},{number % 2}" for number in range(40)]
    tables = {
        "rows": rows,
        "unlabelled": [*rows[:1], "bade,"],
        "unknown": [*rows[:1], "bade,maybe"],
        "empty": [*rows[:1], ' " ",1'.strip()],
    }
    for name, lines in tables.items():
        (root / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    with gzip.open(root / "long.csv.gz", "wt", compresslevel=1) as file:
        file.write("\n".join(["text,label", rows[0], f"{'a ' * 5_000_000},1"]) + "\n")
    case = cases.Case.read("bert_body_a")
    whole = case.write(root / "model")
    (whole / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    (root / "other.txt").write_text("\n".join([*SPECIAL_TOKENS, *reversed(WORDS)]) + "\n")
    (root / "long.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS, *(f"w{number}" for number in range(40))]) + "\n")
    broken = {name: shutil.copytree(whole, root / name) for name in ("truncated", "misnamed", "renamed", "pickled", "t5")}
    (broken["truncated"] / WEIGHTS).write_bytes((whole / WEIGHTS).read_bytes()[:-100])
    (broken["misnamed"] / WEIGHTS).rename(broken["misnamed"] / "weights.safetensors")
    held = {name: cases.values(name, shape) for name, shape in case.tensors.items()}
    held["encoder.layer.1.output.dense.weights"] = held.pop("encoder.layer.1.output.dense.weight")
    weights.write(broken["renamed"] / WEIGHTS, held)
    (broken["pickled"] / WEIGHTS).unlink()
    (broken["pickled"] / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    (broken["t5"] / "config.json").write_text('{"model_type": "t5"}')
    return root


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, Answer]:
    """What each command came to, all in one process."""
    given = ["init=hf", "init.path=model", "init.provenance=public", "model=hf", "data=table", "data.source.paths=rows.csv"]
    given += ["data.source.labels=[0,1]", "task=classification", "data.vocabulary.size=64", "data.public_fraction=0", "train=last_layer"]
    given += ["data.heldout_fraction=0.2", "data.sequence_length=12", "steps=2", "microbatch=8", "batch_schedule.size=8", "name=bad"]
    given += ["noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-3"]
    said = answers([(folder, [*given, *changes]) for changes, _ in BAD.values()])
    return dict(zip(BAD, said, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line_and_exit_code_2(name: str, answered: dict[str, Answer], folder: Path):
    assert re.search(BAD[name][1], answered[name].refusal())
    assert not list(folder.glob("outputs/*/release/params")) and not (folder / "opened").exists(), "nothing was trained, nothing executed"
