"""What people get wrong with decoders: the command ends with code 2 and one line, before anything is trained, and loses nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.processes import Answer, answers

from .cases import Case
from .conftest import WORDS

TRAIN = ["init=hf", "init.path=model", "init.provenance=public", "data=table", "task=causal_lm", "train=lora", "name=bad"]
TRAIN += ["data.source.paths=rows.jsonl", "data.source.prompt_field=ask", "data.source.completion_field=say", "data.sequence_length=12"]
TRAIN += ["steps=2", "microbatch=8", "batch_schedule.size=8", "noise=multiplier", "noise.noise_multiplier=2.0", "privacy.delta=1e-3"]
GENERATE = ["job=generate", "generate.checkpoint=model", "generate.prompts=asked.jsonl", "generate.output=said.jsonl"]
GENERATE += ["generate.prompts_provenance=public", "generate.max_new_tokens=4"]
# Name -> (a command that stands, what is changed of it, what the line says: the value, and what to do).
BAD = {
    "a family that is not known": (
        TRAIN,
        ["init.path=mamba"],
        r"config.json: has model_type 'mamba'.* Use one of bert, distilbert",
    ),
    "a config that contradicts its tensors": (TRAIN, ["init.path=wide"], r"k_proj.weight of shape .*, not .*, for layers/key/kernel\. Use"),
    "a config with fewer layers": (TRAIN, ["init.path=short"], r"contains model.layers.1.* which its config does not declare\. Use"),
    "a template without its fields": (
        TRAIN,
        ["data.source.template='{prompt} {answer}'"],
        r"has the fields prompt, answer\. Write {prompt}, then",
    ),
    "an empty completion": (TRAIN, ["data.source.paths=empty.jsonl"], r"empty.jsonl:3: has an empty text under 'say'\. Give it text"),
    "an empty prompt": (TRAIN, ["data.source.paths=unasked.jsonl"], r"unasked.jsonl:3: has an empty text under 'ask'\. Give it text"),
    "a missing column": (TRAIN, ["data.source.completion_field=no"], r"rows.jsonl:1: has no column 'no'; its columns are ask, say\. Name"),
    "a window above the model's": (TRAIN, ["data.sequence_length=17"], r"data.sequence_length=17: .* has 16 positions\. Use"),
    "a tokenizer without a padding token": (TRAIN, ["init.path=unpadded"], r"has no pad token\. Name it in tokenizer_config.json"),
    "a rank above a matrix": (
        TRAIN,
        ["train.targets=[key]", "train.rank=13"],
        r"rank=13: is not possible for a matrix of shape \(24, 12\)\. Use a rank",
    ),
    "a target of no matrix": (TRAIN, ["train.targets=[gates]"], r"gates: does not match any target of adapters\. The nearest are gate"),
    "a prompt longer than the window": (
        GENERATE,
        ["generate.prompts=long.jsonl"],
        r"long.jsonl:2: has a prompt of 20 tokens; .* for 12",
    ),
    "a field that the rows lack": (GENERATE, ["generate.template='On {topic}'"], r"asked.jsonl:1: has no column 'topic'; its columns"),
    "completions without a tokenizer's padding": (GENERATE, ["generate.checkpoint=unpadded"], r"has no pad token\. Name it in tokenizer_"),
}


def _rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    rows = [{"ask": f"{WORDS[number % 30]}", "say": WORDS[number % 7]} for number in range(40)]
    _rows(root / "rows.jsonl", rows)
    _rows(root / "empty.jsonl", [*rows[:2], {"ask": "bade", "say": " "}])
    _rows(root / "unasked.jsonl", [*rows[:2], {"ask": "", "say": "bade"}])
    _rows(root / "asked.jsonl", [{"prompt": "ba"}])
    _rows(root / "long.jsonl", [{"prompt": "ba"}, {"prompt": "ba" * 10}])
    whole = Case.read("llama_lm_b").write(root / "model")
    letters = sorted({letter for word in WORDS for letter in word})
    own = Tokenizer(BPE({token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *letters])}, []))
    own.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    own.add_special_tokens(["<pad>", "<s>", "</s>"])
    own.save(str(whole / "tokenizer.json"))
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (whole / "tokenizer_config.json").write_text(json.dumps(marks))
    known = json.loads((whole / "config.json").read_text())
    heads = {"num_key_value_heads": known["num_attention_heads"] if known["num_key_value_heads"] == 1 else 1}
    changes = {"mamba": {"model_type": "mamba"}, "wide": heads, "short": {"num_hidden_layers": 1}}
    for name, change in changes.items():
        (shutil.copytree(whole, root / name) / "config.json").write_text(json.dumps(known | change))
    unpadded = shutil.copytree(whole, root / "unpadded")
    (unpadded / "tokenizer.json").write_text((whole / "tokenizer.json").read_text().replace("<pad>", "<x>"))
    (unpadded / "tokenizer_config.json").write_text(json.dumps(marks | {"pad_token": None}))
    return root


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, Answer]:
    """What each command came to, all in one process, after completions that none of them may lose."""
    first, *said = answers([(folder, GENERATE), *((folder, [*given, *changes]) for given, changes, _ in BAD.values())])
    assert first.returncode == 0, first.stderr
    return dict(zip(BAD, said, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line_and_exit_code_2(name: str, answered: dict[str, Answer], folder: Path):
    assert re.search(BAD[name][2], answered[name].refusal())
    assert not list(folder.glob("outputs/*/release/params")), "nothing was trained"
    (completion,) = (folder / "said.jsonl").read_text().splitlines()
    assert json.loads(completion)["prompt"] == "ba"
