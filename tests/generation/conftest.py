"""A checkpoint of a small Llama, whose tokens are letters, with a chat template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.interop.cases import Case

LETTERS = "abcdefghijklmnopqrstuvwxyz:"
CHAT = "{% for message in messages %}{{ bos_token + message.content + '<e>' }}{% endfor %}{{ bos_token if add_generation_prompt }}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Case.read("llama_lm_b").write(tmp_path_factory.mktemp("llama") / "checkpoint")
    marks = ["<pad>", "<s>", "</s>", "<e>"]
    own = Tokenizer(BPE({token: number for number, token in enumerate([*marks, *LETTERS])}, []))
    own.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    own.add_special_tokens(marks)
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<e>"}))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder
