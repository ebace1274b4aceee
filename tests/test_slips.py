"""Keys, options and values as other libraries write them: each is refused with the line that works here."""

import ast
import json
import re
from pathlib import Path

import pytest

import dpx
import dpx_papers
from dpx import config
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError

from .composed import composed

# What is written, and what the hint must contain.
SLIPS = {
    "learning_rate=1e-3": "Did you mean lr_schedule.learning_rate?",
    "lr=1e-3": "Write lr_schedule.learning_rate=1e-3",
    "optimizer.lr=1e-3": "Write lr_schedule.learning_rate=1e-3",
    "batch_size=64": "Write batch_schedule.size=64",
    "gradient_accumulation_steps=4": "batch_schedule.size=...",
    "precision=bf16": "model.dtype=bfloat16",
    "model.dtype=bf16": "Write +model.dtype=bfloat16",
    "max_grad_norm=1.0": "Write clip.clipping_norm=1.0",
    "clip=1.0": "Write clip.clipping_norm=1.0",
    "epsilon=8": "Write noise.epsilon=8",
    "privacy.epsilon=8": "Write noise.epsilon=8",
    "noise.eps=8": "Write noise.epsilon=8",
    "delta=1e-5": "Write privacy.delta=1e-5",
    "noise.epsilon=inf": "Write mechanism=none",
    "noise=none": "Write mechanism=none",
    "noise.multiplier=1.1": "Write noise=multiplier noise.noise_multiplier=1.1",
    "privacy=none": "Write mechanism=none",
    "privacy.unit=sender": "Write privacy.unit=author data.source.unit_field=sender",
    "mechanism=dp-sgd": "Did you mean mechanism=dp_sgd?",
    "accountant=prv": "Did you mean accountant=pld?",
    "fork.step=3": "Write fork=<run folder>@3",
    "train.rank=4": "write train=lora train.rank=4",
    "lora.rank=4": "Write train=lora train.rank=4",
    "lora=true": "Write train=lora",
    "train=full": "Did you mean train=all?",
    "optimizer=AdamW": "Did you mean optimizer=adamw?",
    "optimizer.momentum=0.9": "optimizer.arguments.momentum (optimizer=adafactor or optimizer=sgd)",
    "num_train_epochs=3": "Write steps=...",
    "max_steps=100": "Write steps=100",
    "warmup_steps=10": "Did you mean lr_schedule.warmup_steps?",
    "model=bert-base-uncased": "Write init=hf init.path=bert-base-uncased init.provenance=public",
    "init=bert-base-uncased": "Write init=hf init.path=bert-base-uncased",
    "init.path=checkpoint": "Write init=hf init.path=checkpoint",
    "model.hidden_size=128": "Write model.width=128",
    "data=rows.csv": "Write data=table data.source.paths=rows.csv data.source.labels=[...]",
    "data=articles.jsonl.gz": "Write data=text data.source.paths=articles.jsonl.gz",
    "data=csv": "Did you mean data=table?",
    "data.paths=a.csv": "Did you mean data.source.paths (data=table or data=text)?",
    "data.source.paths=letters.jsonl": "write data=text data.source.paths=letters.jsonl",
    "data.source.paths=texts/rows.csv": "write data=table data.source.paths=texts/rows.csv",
    "data.text_column=body": "Write data.source.text_field=body",
    "max_length=64": "Write data.sequence_length=64",
    "task.num_labels=3": "Write task.classes=3",
    "task=sequence_classification": "Did you mean task=classification?",
    "eval_every=3": "Write schedule.evaluate_every=3",
    "output_dir=out": "Write hydra.run.dir=out",
    "job=eval": "Did you mean job=evaluate?",
    "experiment=anil_2m": "Did you mean +experiment=anil_2m_batch?",
    "+experiment=laptop_anil_2m_batch": "Did you mean +experiment=laptop/anil_2m_batch?",
    "seed=-1": "Use 0 or more",
    "name=runs/mine": "Use letters",
}


@pytest.mark.parametrize("written", SLIPS)
def test_a_slip_is_refused_with_the_line_that_works(written: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        config.build(recipes.compose([written]))
    line = str(as_refused(raised.value, [written]))
    assert SLIPS[written] in line and "\n" not in line


@pytest.mark.parametrize(
    "written", ["optimizer.epsilon=1e-8", "optimizer.epss=1e-8", "model.path=weights", "clip.r=1", "optimizer.delta=1"]
)
def test_a_word_of_several_meanings_is_not_taken_for_another(written: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        config.build(recipes.compose([written]))
    assert "Write" not in str(as_refused(raised.value, [written]))


def test_several_values_of_a_number_are_a_sweep() -> None:
    from hydra.errors import HydraException

    line = str(as_refused(HydraException("Ambiguous value for argument 'noise.epsilon=1,2'\n1. To use it as a list ...")))
    assert line.endswith("Add -m: python -m dpx -m noise.epsilon=1,2.")


def _jsonl(folder: Path, *records: dict[str, str]) -> str:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return f"data.source.paths={path}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data=text", "data.source.text_field=body"], "a.jsonl:1: has no text under 'body'; its fields are text, who"),
        (["data=text", "data.source.unit_field=user", "privacy.unit=author"], "data.source.unit_field; its fields are text, who"),
        (
            ["data=table", "data.source.labels=[a,b]", "data.source.label_field=who", "data.source.text_field=body"],
            "has no column 'body'; its columns are text, who",
        ),
        (["data=table", "data.source.labels=[a,b]"], "has no column 'label'; its columns are text, who"),
    ],
)
def test_a_wrong_column_is_named_with_those_that_exist(tmp_path: Path, overrides: list[str], line: str) -> None:
    """The vocabulary is fitted first, and a corpus of which nothing could be read is not a corpus of one document."""
    paths = _jsonl(tmp_path, {"text": "one two", "who": "a"}, {"text": "three", "who": "b"})
    task = ["task=classification"] if "data=table" in overrides else []
    experiment = composed(*overrides, *task, paths, f"data.directory={tmp_path / 'data'}")[0]
    with pytest.raises(ConfigError) as raised:
        prepare(experiment.data, experiment.privacy)
    assert line in str(raised.value)


@pytest.mark.parametrize("key", ["text_field", "unit_field"])
def test_a_column_of_plain_text_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    experiment = composed("data=text", f"data.source.paths={tmp_path / 'a.txt'}", f"data.source.{key}=body")[0]
    with pytest.raises(ConfigError, match=f"data.source.{key}=body: .*a.txt is plain text, which has no fields"):
        prepare(experiment.data, experiment.privacy)


def test_no_refusal_shows_a_name_in_braces_where_its_value_belongs():
    """A text of `require` or `ConfigError` with a name in braces lacks the f before it; one that speaks of braces means them."""
    found = []
    for path in (path for one in (dpx, dpx_papers) for path in Path(str(one.__file__)).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("require", "ConfigError"):
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                found += [f"{path.name}:{node.lineno}: {text}" for text in texts if re.search(r"\{[a-z]", text) and "braces" not in text]
    assert found == []
