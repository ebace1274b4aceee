"""`experiments/gpu.sh` at a hundredth of its size on a CPU: every slot ends, its rows are on the pages, and nothing is run twice."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit

from dpx.data.tokenizer import SPECIAL_TOKENS
from tests.interop.cases import Case
from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DPX_DATA", ROOT.parent / "shared" / "data"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of an encoder and of a decoder whose tokens are letters, and a copy of the pages."""
    root = tmp_path_factory.mktemp("gpu")
    encoder = Case.read("bert_body_a").write(root / "encoder")
    (encoder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *LETTERS]) + "\n")
    decoder = Case.read("llama_lm_b").write(root / "decoder")
    shape = json.loads((decoder / "config.json").read_text())
    (decoder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 128}))
    marks = ["<pad>", "<s>", "</s>", "<e>"]
    tokens = Tokenizer(BPE({token: number for number, token in enumerate([*marks, *LETTERS])}, []))
    tokens.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokens.add_special_tokens(marks)
    tokens.save(str(decoder / "tokenizer.json"))
    (decoder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<e>"}))
    shutil.copytree(ROOT / "experiments", root / "experiments")
    return root


def _run(folder: Path, slot: str) -> subprocess.CompletedProcess[str]:
    paths = {"OUTPUTS": "outputs", "EVIDENCE": "experiments", "MINILM": "encoder", "SMOLLM2": "decoder"}
    given = {name: str(folder / path) for name, path in paths.items()}
    given |= {"SCALE": "hundredth", "LIMIT_S": "3000", "PYTHON": sys.executable, "DPX_DATA": str(DATA)}
    command = ["bash", str(ROOT / "experiments" / "gpu.sh"), slot]
    return subprocess.run(command, env=environment(**given), capture_output=True, text=True, timeout=3000)


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize(
    ("slot", "pieces", "paper"),
    [
        ("steps", 1, None),
        ("batches", 3, "mckenna2025"),
        ("sst2", 6, "du2021"),
        ("e2e", 6, None),
        ("speeds", 3, None),
        ("search", 2, "anil2021"),
    ],
)
def test_a_slot_ends_and_its_rows_have_the_device_and_the_commit(folder: Path, slot: str, pieces: int, paper: str | None):
    if slot in ("sst2", "e2e") and not (DATA / slot).is_dir():
        pytest.skip(f"needs {slot} under DPX_DATA")
    # The trials of a search are left out, by name, where the extra `tune` is not installed.
    left_out = int(slot == "search" and importlib.util.find_spec("optuna") is None)
    ended = _run(folder, slot)
    assert ended.returncode == left_out, ended.stdout + ended.stderr
    assert len(list((folder / "outputs" / "gpu" / slot).glob("*.done"))) == pieces - left_out
    if paper is not None:
        rows = (folder / "experiments" / paper / "results.csv").read_text().splitlines()
        smaller = {line.split(",")[1] for line in rows if ",fact/smaller," in line}
        for fact in ("device", "commit"):
            assert smaller <= {line.split(",")[1] for line in rows if f",fact/{fact}," in line}
        assert smaller
    again = _run(folder, slot)
    assert again.returncode == left_out and "at most" not in again.stdout


@pytest.mark.slow
def test_a_slot_without_time_or_data_says_what_it_left_out(folder: Path):
    ended = _run(folder, "tests")
    assert (ended.returncode, ended.stderr) == (2, "error: tests: is no slot. Name steps, batches, sst2, e2e, speeds, search or rows.\n")
