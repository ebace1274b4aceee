"""The example of dpx/docs/chains.md, as printed, on text and rows of a user."""

import json
import random
import re
from pathlib import Path

import pytest

import dpx
from tests.processes import answers


@pytest.mark.slow
def test_the_printed_chain_runs_on_a_users_text(tmp_path):
    page = (Path(dpx.__file__).parent / "docs" / "chains.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    lines = [line.split()[3:] for line in re.findall(r"^python -m dpx --config-dir.*$", page, re.MULTILINE)]
    place = tmp_path / "mine" / "experiment" / "my_chain.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(recipe)
    drawn, words = (
        random.Random(0),
        "the river town letter morning winter house friend paper garden road light never write again soon".split(),
    )
    texts = [" ".join(drawn.choices(words, k=40)) + "." for _ in range(600)]
    (tmp_path / "articles.jsonl.gz").write_bytes(_zipped("\n".join(json.dumps({"text": text}) for text in texts[:400])))
    rows = [f"{text},{'yes' if 'river' in text else 'no'}" for text in texts[400:]]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    quick = ["chain.stages.pretrain.values.steps=4", "chain.stages.classify.values.steps=4"]
    quick += ["+chain.common.values.microbatch=8", "+chain.common.values.lr_schedule.warmup_steps=1", "+chain.common.values.model.layers=1"]
    said = answers([(tmp_path, [word.strip("'") for word in line] + quick) for line in lines], trains_alike=True)
    assert [answer.stderr for answer in said if answer.returncode] == []
    assert "guarantee of the chain: none" in said[0].stdout and "guarantee of the chain: dp" in said[1].stdout
    assert "finished before" in said[1].stderr, "the private stage is the same in both"
    assert len(list((tmp_path / "outputs").glob("my_chain_pretrain-*"))) == 1


def _zipped(text: str) -> bytes:
    import gzip

    return gzip.compress(text.encode(), mtime=0)
