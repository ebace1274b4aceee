"""A run of every family of decoders is handed over by `job=export`, whole and as adapters: ids of prompts, completions and conversations
stay those of transformers, and so do completions.

The suite is run by `pytest -m parity tests/interop/test_job_parity.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.data.prepare import prepare
from dpx.files.run_folder import RunFolder
from dpx.job.generate import Generate
from tests.generation.test_generate import write
from tests.processes import COARSE

from ..training.sharing import run_job
from .test_export import export
from .test_text_parity import CALLED, FORMS, NAMES, TOOL, WORDS, checkpoint, read

# PEFT reads a name that transformers will drop.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

NEW = 12
ENDS = [2, 40]
PROMPTS = [f"{one} <b> & é" for one in WORDS.split()]
# One and three turns, a system message, tools that are listed and called, and none.
ASKED: list[dict[str, Any]] = [
    *({"messages": [{"role": role, "content": text} for role, text in turns]} for turns in FORMS.values()),
    {"messages": CALLED, "tools": [TOOL]},
    {"messages": [*CALLED[:1], *CALLED[3:]], "tools": []},
]
CHATS = [
    {**one, "messages": [{**one["messages"][0], "content": one["messages"][0]["content"] + mark}, *one["messages"][1:]]}
    for mark in ("", " x", " y", " z")
    for one in ASKED
]


def trained(root: Path, folder: Path) -> tuple[Any, Path]:
    """Returns the config of a run of adapters on conversations, and its folder."""
    write(root / "chats.jsonl", CHATS)
    given = ["init=hf", f"init.path={folder}", "init.provenance=public", "data=table", "task=causal_lm", "train=lora", "train.rank=2"]
    given += ["train.targets=['*']", f"data.source.paths={root}/chats.jsonl", "data.source.messages_field=messages"]
    given += ["data.source.tools_field=tools", "data.heldout_fraction=0.2", "data.sequence_length=400", f"data.directory={root}/data"]
    given += ["steps=2", "microbatch=4", "batch_schedule.size=8", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp"]
    given += ["seed=1", "privacy.delta=1e-3", "schedule.evaluation_rows=4", "lr_schedule.learning_rate=0.01", COARSE]
    cfg = recipes.compose(given)
    experiment, job = config.build(cfg)
    run_job((experiment, job, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg)))), root / "outputs" / "run", None, None)
    return experiment, root / "outputs" / "run"


def completed(experiment: Any, run: Path, to: Path, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Returns the lines of `job=generate` of a run."""
    to.mkdir()
    given = {"prompts": str(write(to / "prompts.jsonl", rows)), "output": f"{to}/out.jsonl", "max_new_tokens": NEW}
    Generate(**(given | options))(experiment, RunFolder(run))
    return [json.loads(line) for line in (to / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_job_hands_over_is_read_as_it_was_trained(tmp_path: Path, name: str):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    folder = checkpoint(tmp_path / "model", name, True, False)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ENDS, "repetition_penalty": 1.2, "min_new_tokens": 2, "pad_token_id": 0})
    )
    experiment, run = trained(tmp_path, folder)
    whole, adapters = export(run), tmp_path / "adapters"
    export(run, "job.format=peft", f"job.to={adapters}")
    assert (whole / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    tokenizers = [transformers.AutoTokenizer.from_pretrained(place) for place in (folder, whole, adapters)]

    def chat(own: Any, row: dict[str, Any], count: int, **options: Any) -> tuple[int, ...]:
        return tuple(own.apply_chat_template(row["messages"][:count], tools=row.get("tools"), return_dict=False, **options))

    every = []
    for own in tokenizers:
        ids = [own(text)["input_ids"] for text in PROMPTS]
        ids += [own(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
        chats = set()
        for row in CHATS:
            before = chat(own, row, -1, add_generation_prompt=True)
            chats.add((before, chat(own, row, len(row["messages"]))[len(before) :]))
        every.append((ids, chats, own.special_tokens_map))
    assert every[0] == every[1] == every[2]
    assert read(prepare(experiment.data, experiment.privacy)) == every[0][1]

    models = [transformers.AutoModelForCausalLM.from_pretrained(whole).eval()]
    models += [peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), str(adapters)).eval()]
    texts = completed(experiment, run, tmp_path / "texts", [{"prompt": text} for text in PROMPTS], template="{prompt}")
    chats = completed(experiment, run, tmp_path / "chats", ASKED)
    ties = 0
    for model, own in zip(models, tokenizers[1:], strict=True):
        given = [own(text, return_tensors="pt") for text in PROMPTS]
        told = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        given += [own.apply_chat_template(row["messages"][:-1], tools=row.get("tools"), **told) for row in ASKED]
        for line, one in zip([*texts, *chats], given, strict=True):
            told = model.generate(**one, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True)
            found = told.sequences[0, one["input_ids"].shape[1] :].tolist()
            text = own.decode(found[:-1] if found[-1] in ENDS else found, skip_special_tokens=True)
            if (line["tokens"], line["completion"]) != (len(found), text):
                ties += 1
                # Merged adapters and those beside their weights round otherwise: two logits may be nearly equal where the texts part.
                starts = [own.decode(found[: count + 1], skip_special_tokens=True) for count in range(len(found))]
                parted = next((at for at, start in enumerate(starts) if not line["completion"].startswith(start)), len(found) - 1)
                assert float(-np.diff(told.scores[parted][0].topk(2).values.numpy())[0]) < 1e-4
    assert ties <= 1
