"""`job=generate`: prompts of files, completions that a kill does not change, and what is refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece

from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.generation import completer
from dpx.generation.completer import of_checkpoint, text_of
from dpx.generation.prompts import Style
from dpx.job.generate import Generate
from tests.composed import composed
from tests.interop.cases import Case

ROWS = [{"prompt": prompt, "say": say} for prompt, say in (("ab", "x"), ("hello there", "y"), ("c", "z"), ("ab", "w"), ("dog", "v"))]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generate(folder: Path, checkpoint: str | None, **options: Any) -> list[dict[str, Any]]:
    """The lines that the job wrote to `folder`."""
    given = {"prompts": f"{folder}/prompts.jsonl", "output": f"{folder}/out.jsonl", "max_new_tokens": 4, "checkpoint": checkpoint}
    Generate(**(given | options))(composed()[0], RunFolder(folder / "run"))
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path, checkpoint: Path) -> tuple[Path, str]:
    write(tmp_path / "prompts.jsonl", ROWS)
    return tmp_path, str(checkpoint)


def test_each_prompt_is_completed_once_and_a_kill_changes_no_line(place, monkeypatch, capsys):
    folder, weights = place
    lines = generate(folder, weights, batch_size=2)
    assert "left out 1 of 5 rows, whose prompts repeat those of earlier rows" in capsys.readouterr().err
    assert [(line["row"], line["prompt"]) for line in lines] == [(1, "ab"), (2, "hello there"), (3, "c"), (5, "dog")]
    for line in lines:
        assert set(line) == {"row", "prompt", "completion", "finish_reason", "tokens", "log_probability"}
        assert line["finish_reason"] in ("stop", "length") and 1 <= line["tokens"] <= 4 and line["log_probability"] < 0
        assert line["tokens"] == 4 or line["finish_reason"] == "stop"
    whole = (folder / "out.jsonl").read_bytes()
    told = json.loads((folder / "out.json").read_text())
    assert told["guarantee"] is None and "does not cover this file" in told["covers"] and told["made_from"]["beams"] == 1

    (folder / "out.jsonl").write_bytes(whole[:-20])
    assert generate(folder, weights, batch_size=2) == lines
    (folder / "out.jsonl").unlink()
    append, calls = completer.Lines.append, []

    def killed(self, batch):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        append(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(completer.Lines, "append", killed)
        generate(folder, weights, batch_size=2)
    assert (folder / "out.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    assert generate(folder, weights, batch_size=2, limit=3) == lines[:3], "a limit may be raised later"
    generate(folder, weights, batch_size=2)
    assert (folder / "out.jsonl").read_bytes() == whole
    inode = (folder / "out.jsonl").stat().st_mtime_ns
    generate(folder, weights, batch_size=2)
    assert (folder / "out.jsonl").stat().st_mtime_ns == inode


def test_another_setting_or_file_is_refused_and_changes_nothing(place):
    folder, weights = place
    lines = generate(folder, weights, limit=1, batch_size=2)
    for name, value, words in (("beams", 2, "beams was 1, not 2"), ("max_new_tokens", 3, "max_new_tokens was 4, not 3")):
        with pytest.raises(ConfigError, match=f"out.json: the completions were made from something else: {words}. .*generate.output"):
            generate(folder, weights, **{name: value})
    write(folder / "prompts.jsonl", ROWS[1:])
    with pytest.raises(ConfigError, match="prompts was"):
        generate(folder, weights)
    write(folder / "prompts.jsonl", ROWS)
    (folder / "out.jsonl").write_text(json.dumps(lines[0] | {"row": 2}) + "\n")
    with pytest.raises(ConfigError, match="holds completions of other rows"):
        generate(folder, weights)
    (folder / "out.json").unlink()
    with pytest.raises(ConfigError, match="already exists, without out.json"):
        generate(folder, weights)


def test_prompts_by_template_and_by_conversation(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("jinja2")
    from dpx.generation.prompts import read

    weights = of_checkpoint(str(checkpoint))
    assert weights.ends == (2, 3), "the end of the tokenizer, which ends rows, and that of config.json, where transformers ends texts"
    rows = [{"name": "cat", "kind": "pet", "messages": [{"role": "user", "content": "hi"}]}]
    rows += [{"name": "dog", "kind": "pet", "messages": [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "no"}]}]
    file, ids = write(tmp_path / "rows.jsonl", rows), weights.tokenizer.tokenizer.token_to_id
    by_template = read(file, Style.of_columns("the {kind}: {name}"), weights.tokenizer, 16)
    assert [one.text for one in by_template] == ["the pet: cat", "the pet: dog"]
    assert by_template[0].ids == [*map(ids, "thepet:cat")], "this tokenizer puts no mark before a text"
    by_chat = read(file, Style(messages_field="messages"), weights.tokenizer, 16)
    assert [one.text for one in by_chat] == ["<s>hi<e><s>", "<s>yo<e><s>"] and by_chat[0].ids == [1, ids("h"), ids("i"), 3, 1]


def test_a_template_reads_tools_documents_and_the_declared_date(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("jinja2")
    place = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    template = "{% for t in (tools or []) + (documents or []) %}{{ t.name }}{% endfor %}{{ strftime_now('%d').lstrip('0') | length * 'd' }}"
    (place / "chat_template.jinja").write_text(template + "{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "ab"}], "papers": '[{"name": "c"}]'}
    write(tmp_path / "prompts.jsonl", [row])
    named = {"messages_field": "messages", "tools_field": "tools", "documents_field": "papers"}
    with pytest.raises(ConfigError, match="generate.chat_date=null: the checkpoint's chat template writes the date"):
        generate(tmp_path, str(place), **named)
    assert [line["prompt"] for line in generate(tmp_path, str(place), chat_date="2026-01-31", **named)] == ["abcddx"]
    with pytest.raises(ConfigError, match="generate.tools_field: only a chat template reads it"):
        generate(tmp_path, str(place), tools_field="tools")


def test_a_first_piece_that_continues_a_word_has_no_mark():
    pieces = Tokenizer(WordPiece({"[END]": 0, "##ing": 1, "##s": 2, "go": 3}, unk_token="[END]"))
    pieces.add_special_tokens(["[END]"])
    told = {(1, 2): "ings", (1, 3): "ing go", (3, 1, 2): "goings", (0, 1, 3): "ing go", (): ""}
    assert {ids: text_of(pieces, list(ids)) for ids in told} == told
    assert text_of(Tokenizer(WordLevel({"##ing": 0}, unk_token="##ing")), [0]) == "##ing"


def test_a_completion_has_not_what_training_rows_put_around_it():
    source = composed("data=table", "task=causal_lm", "model=llama_micro", *ASKED)[0].data.source
    style = Style.of_rows(source)
    assert style.text("row", {"question": "Why?", "answer": "So."}, None) == "Q: Why?\nA:"
    assert style.completion(" So.\n{end}") == "So." and style.completion(" So") == "So"


ASKED = ["data.source.paths=rows.csv", "data.source.prompt_field=question", "data.source.completion_field=answer"]
ASKED += ["data.source.template='Q: {prompt}\\nA: {completion}\\n{{end}}'"]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"beams": 2, "temperature": 1.0}, "generate.beams=2, generate.temperature=1.0: a beam search draws nothing"),
    ({"top_p": 0.5}, "generate.top_p=0.5, generate.temperature=0.0: at temperature 0 nothing is drawn"),
    ({"temperature": -1.0}, "generate.temperature=-1.0: is not a temperature"),
    ({"max_new_tokens": 0}, "generate.max_new_tokens=0: must be at least 1"),
    ({"max_new_tokens": 16}, "generate.max_new_tokens=16: leaves no position of the model's 16 for a prompt"),
    ({"max_new_tokens": 9}, r"prompts.jsonl:2: has a prompt of 10 tokens; .* room for 7"),
    ({"template": "About {topic}"}, r"prompts.jsonl:1: has no column 'topic'; its columns are prompt, say"),
    ({"template": "About"}, "generate.template='About': has no field"),
    ({"template": "About {"}, "generate.template='About {': is not a template"),
    ({"template": "{prompt}", "messages_field": "chat"}, "a chat template writes the whole prompt"),
    ({"messages_field": "chat"}, "prompts.jsonl:1: has no column 'chat'"),
    ({"output": "out.csv"}, "generate.output=out.csv: is not the name of a file of JSON lines"),
    ({"output": None}, "generate.output=null: a checkpoint is not a run with a folder"),
    ({"prompts": "none.jsonl"}, "generate.prompts=none.jsonl: no such file"),
    ({"checkpoint": None}, "run: no finished run is named"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_completed_is_refused_in_one_line(place, options: dict[str, Any], words: str):
    folder, weights = place
    with pytest.raises(ConfigError, match=words) as refused:
        generate(folder, **({"checkpoint": weights} | options))
    assert "\n" not in str(refused.value) and [path.name for path in folder.iterdir()] == ["prompts.jsonl"]


def test_a_prompt_behind_the_limit_may_be_too_long(place):
    folder, weights = place
    assert len(generate(folder, weights, max_new_tokens=9, limit=1)) == 1


def test_an_empty_file_another_model_and_a_tokenizer_without_an_end_are_refused(place, checkpoint: Path):
    folder, weights = place
    (folder / "prompts.jsonl").write_text("")
    with pytest.raises(ConfigError, match="prompts.jsonl: contains no row"):
        generate(folder, weights)
    write(folder / "prompts.jsonl", [{"prompt": " "}])
    with pytest.raises(ConfigError, match="prompts.jsonl:1: has an empty text under 'prompt'"):
        generate(folder, weights)
    encoder = Case.read("bert_lm_a").write(folder / "encoder")
    with pytest.raises(ConfigError, match="generate.checkpoint=.*encoder: is bert_2x16.* only a causal decoder"):
        generate(folder, str(encoder))
    shutil.copytree(checkpoint, folder / "endless")
    definition = json.loads((checkpoint / "tokenizer.json").read_text().replace("</s>", "<x>").replace("<e>", "<y>"))
    (folder / "endless" / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "endless" / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    with pytest.raises(ConfigError, match="tokenizer.json: has no sep token. Name it in tokenizer_config.json"):
        generate(folder, f"{folder}/endless")


def test_a_seed_decides_what_is_drawn(place):
    folder, weights = place
    drawn = []
    for seed in (1, 1, 2):
        drawn.append([line["completion"] for line in generate(folder, weights, temperature=1.0, seed=seed)])
        for name in ("out.jsonl", "out.json"):
            (folder / name).unlink()
    assert drawn[0] == drawn[1] != drawn[2] and np.ndim(drawn) == 2
