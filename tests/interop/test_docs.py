"""`dpx/docs/fine_tuning.md` and `decoders.md`: every command runs, in order, on files and a checkpoint like those it speaks of."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit

import dpx
from dpx.data.tokenizer import SPECIAL_TOKENS
from tests.interop.cases import Case
from tests.interop.conftest import WORDS
from tests.processes import Answer, answers

DOCS = Path(dpx.__file__).parent / "docs"
# What makes the page's commands quick, and fits its checkpoint of 16 positions.
QUICK = ("steps=2", "microbatch=8", "batch_schedule.size=8", "data.sequence_length=12", "privacy.delta=1e-3")
QUICK += ("schedule.evaluation_rows=16", "data.heldout_fraction=0.2", "noise=multiplier", "noise.noise_multiplier=2.0")


def _write(path: Path, rows: int, seed: int) -> None:
    drawn = np.random.RandomState(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "author"])
        for number in range(rows):
            table.writerow([" ".join(drawn.choice(WORDS, 6)), ("no", "yes")[number % 2], f"a{number // 4}"])


def _answers_of(page: str, folder: Path) -> list[Answer]:
    """What each command of the page said, run in `folder`; none failed."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert all(line[:3] == ["python", "-m", "dpx"] for line in lines)
    given = [line[3:] + list(QUICK if any(word.startswith(("name=", "+experiment=fine_tune")) for word in line) else ()) for line in lines]
    # QUICK states the noise, from which a design cannot take its epsilon.
    given = [line + ["design.epsilon=8"] * ("job=design" in line) for line in given]
    said = answers([(folder, line) for line in given], trains_alike=True)
    assert [answer.stderr for answer in said if answer.returncode] == []
    return said


@pytest.mark.slow
def test_fine_tuning_from_a_file_to_weights_for_others(tmp_path: Path):
    folder = Case.read("bert_body_a").write(tmp_path / "checkpoint")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    _write(tmp_path / "reviews.csv", 160, 1)
    _write(tmp_path / "new.csv", 10, 2)
    texts = [row["text"] for row in csv.DictReader((tmp_path / "reviews.csv").read_text().splitlines())]
    (tmp_path / "scores.csv").write_text("text,score\n" + "".join(f"{text},{number % 6}\n" for number, text in enumerate(texts)))
    both = "".join(f"{text},{number % 2},{number % 3 % 2}\n" for number, text in enumerate(texts))
    (tmp_path / "tickets.csv").write_text("text,urgent,complaint\n" + both)
    said = _answers_of("fine_tuning.md", tmp_path)
    assert len(said) == 14
    assert "protected" in said[0].stdout + said[1].stdout and "dp" in said[6].stdout
    assert "pearson" in said[2].stdout and "subset accuracy" in said[3].stdout
    assert "measured.csv" in said[4].stdout and "epsilon (pld)" in said[5].stdout
    assert sorted(path.name for path in (tmp_path / "for_others").iterdir()) >= ["README.md", "config.json", "dpx_config.yaml"]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    own, others = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("predictions", "again")
    )
    assert [line["label"] for line in own] == [line["label"] for line in others] and len(own) == 10


def _lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The lines of the one file of a run that was trained."""
    (file,) = folder.glob(f"outputs/*/{pattern}")
    return [json.loads(line) for line in file.read_text().splitlines()]


CHAT = "{% for message in messages %}{{ bos_token + message.content + eos_token }}{% endfor %}{{ bos_token if add_generation_prompt }}"


@pytest.mark.slow
def test_prompts_and_answers_to_adapters_for_others(tmp_path: Path):
    pytest.importorskip("jinja2")
    folder, letters = Case.read("llama_lm_b").write(tmp_path / "checkpoint"), sorted({letter for word in WORDS for letter in word})
    own = Tokenizer(BPE({token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *letters])}, []))
    own.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    own.add_special_tokens(["<pad>", "<s>", "</s>"])
    own.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    (folder / "chat_template.jinja").write_text(CHAT)
    drawn = np.random.RandomState(1)
    pairs = [(" ".join(drawn.choice(WORDS, 3)), " ".join(drawn.choice(WORDS, 2))) for _ in range(160)]
    with (tmp_path / "answers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), *pairs])
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number, (asked, said) in enumerate(pairs):
            # Shorter than the prompts: a conversation that is longer than a row has none.
            messages = [{"role": "user", "content": asked.split()[0]}, {"role": "assistant", "content": said.split()[0]}]
            file.write(json.dumps({"messages": messages, "person": f"p{number // 2}"}) + "\n")
    own.add_tokens([f"<{number}>" for number in range(64 - own.get_vocab_size())])
    assert own.add_tokens(["<call>", "</call>"]) == 2
    (tmp_path / "grown").mkdir()
    own.save(str(tmp_path / "grown" / "tokenizer.json"))
    (tmp_path / "grown" / "tokenizer_config.json").write_text(json.dumps(marks))
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": asked}) + "\n" for asked in ("ba", "mi de")))
    said = _answers_of("decoders.md", tmp_path)
    lines = {tree: _lines(tmp_path, f"{tree}/generated/{name}.jsonl") for tree, name in (("release", "asked"), ("private", "answers"))}
    assert [line["prompt"] for line in lines["release"]] == ["ba\n", "mi de\n"] and len(lines["private"]) == 8
    assert len(said) == 12 and "epsilon (pld)" in said[5].stdout and "one prompt with its completion" in " ".join(said[6].stdout.split())
    for name, file in (("adapters", "adapter_model.safetensors"), ("for_others", "model.safetensors")):
        assert {file, "tokenizer.json", "chat_template.jinja", "privacy.json"} <= {path.name for path in (tmp_path / name).iterdir()}
    exported = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert exported["task_type"] == "CAUSAL_LM" and exported["r"] == 4
