"""What a checkpoint's `generation_config.json` says of the next token is done as transformers does it, or named."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx.data.tokenizer import of_path
from dpx.declaration import ConfigError
from dpx.generation.decoding import Rule
from dpx.generation.settings import Settings, of_folder, without_ends
from dpx.interop.tokenizer_files import write_endings
from tests.clipping.batches import VOCABULARY

from .test_decoding import END, NEW, TEXTS, Model
from .test_generate import generate, write

INF = math.inf
BIASED = (((9,), 2.0), ((6, 7), -INF))
SETTINGS = [
    Settings(repetition_penalty=1.7, bias=BIASED, banned=(((8,), -INF), ((9, 9), -INF))),
    Settings(repetition_penalty=0.5, no_repeat_ngram_size=2, min_new_tokens=4),
    Settings(suppress_tokens=(5, 9), begin_suppress_tokens=(6, 8), forced_eos_token_id=(END,)),
    Settings(forced_bos_token_id=(7,), begin_suppress_tokens=(7, 8, 9), min_length=12, bias=(((END,), 9.0),)),
]
ALONE = [
    Settings(repetition_penalty=1.7),
    Settings(repetition_penalty=0.5),
    Settings(no_repeat_ngram_size=1),
    Settings(no_repeat_ngram_size=2, min_new_tokens=4),
    Settings(bias=BIASED, banned=(((8,), -INF), ((9, 9), -INF))),
    Settings(min_length=12, bias=(((END,), 9.0),)),
    Settings(forced_bos_token_id=(7,), begin_suppress_tokens=(7, 8, 9)),
]
# A setting is a program: several at once in the default suite.
EACH = [*SETTINGS, *(pytest.param(one, marks=pytest.mark.slow) for one in ALONE)]


def _changed(settings: Settings, logits: np.ndarray, text: list[int], count: int) -> np.ndarray:
    """One text at a time, without arrays of texts: what each setting means."""
    scores = np.array(logits, np.float64)

    def add(sequences: Any) -> None:
        for ids, bias in sequences:
            if len(ids) == 1 or text[-len(ids) + 1 :] == list(ids[:-1]):
                scores[ids[-1]] += bias

    add(settings.bias)
    for token in set(text):
        scores[token] *= settings.repetition_penalty if scores[token] < 0 else 1 / settings.repetition_penalty
    if size := settings.no_repeat_ngram_size:
        had = {tuple(text[place : place + size]) for place in range(len(text) - size + 1)}
        scores[[token for token in range(VOCABULARY) if (*text[len(text) - size + 1 :], token) in had]] = -INF
    add(settings.banned)
    if len(text) < settings.min_length or count < settings.min_new_tokens:
        scores[END] = -INF
    if settings.forced_bos_token_id and len(text) == 1:
        scores[:] = -INF
        scores[list(settings.forced_bos_token_id)] = 0
    if settings.forced_eos_token_id and count == NEW - 1:
        scores[:] = -INF
        scores[END] = 0
    scores[list(settings.suppress_tokens)] = -INF
    begins = count == (len(text) - count == 1) if settings.forced_bos_token_id else count == 0
    scores[list(settings.begin_suppress_tokens) if begins else []] = -INF
    return scores


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model("llama")


@pytest.mark.parametrize("settings", EACH, ids=range(len(EACH)))
def test_each_token_is_the_most_likely_one_that_the_settings_leave(llama: Model, settings: Settings):
    differs = 0
    plain = llama.complete(Rule(NEW, (END,)))
    for text, found, before in zip(TEXTS, llama.complete(Rule(NEW, (END,), settings=settings)), plain, strict=True):
        wanted: list[int] = []
        while len(wanted) < NEW and END not in wanted:
            wanted.append(int(_changed(settings, llama.after(text + wanted), text + wanted, len(wanted)).argmax()))
        assert found.tokens == wanted
        differs += wanted != before.tokens
    assert differs > 0


# What `top_p` leaves is in test_decoding.py.
@pytest.mark.parametrize("left", [{"top_k": 1}, {"min_p": 1.0}, pytest.param({"top_p": 1e-6}, marks=pytest.mark.slow)], ids=str)
def test_draws_are_of_the_most_likely_tokens(llama: Model, left: dict[str, Any]):
    drawn = llama.complete(Rule(NEW, (END,), 2.0, **left))
    assert [one.tokens for one in drawn] == [one.tokens for one in llama.complete(Rule(NEW, (END,)))]


def test_beams_end_no_sooner_than_the_settings_let_them(llama: Model):
    later = llama.complete(Rule(NEW, (END,), beams=3, settings=Settings(bias=(((END,), 99.0),), min_new_tokens=3)))
    assert all(len(one.tokens) == 4 and one.tokens.index(END) == 3 for one in later)


def test_the_files_are_read_as_transformers_reads_them_and_what_is_not_applied_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"repetition_penalty": 1.5, "model_type": "llama", "vocab_size": 9}))
    assert of_folder(tmp_path).settings == Settings(repetition_penalty=1.5) and of_folder(None).settings == Settings()
    told = {"no_repeat_ngram_size": 3, "bad_words_ids": [[4], [2], [4, 5]], "suppress_tokens": None, "num_beams": 2, "length_penalty": 2.0}
    told |= {"do_sample": True, "temperature": 0.6, "top_k": 7, "guidance_scale": 1.5, "use_cache": True, "forced_eos_token_id": 2}
    told |= {"min_new_tokens": 0, "min_length": 4, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    found = of_folder(tmp_path)
    banned = (((4,), -INF), ((2,), -INF), ((4, 5), -INF))
    assert found.settings == Settings(no_repeat_ngram_size=3, banned=banned, forced_eos_token_id=(2,)) and found.beams == 2
    assert without_ends(banned, (2,)) == (banned[0], banned[2]) and dict(found.of_draws or {})["top_k"] == 7
    assert found.lines == (
        "generation_config.json: applied no_repeat_ngram_size, bad_words_ids, forced_eos_token_id, num_beams, max_new_tokens",
        "generation_config.json: says how to draw (do_sample, temperature, top_k); dpx draws if generate.temperature is above 0, then by "
        "its top_k, top_p and min_p",
    )
    assert found.max_new_tokens == 9
    for beams, names in ((1, "guidance_scale"), (2, "guidance_scale, length_penalty")):
        with pytest.raises(ConfigError, match=rf"generation_config.json: asks for {names}, which dpx does not do"):
            found.require_done(beams)


@pytest.mark.parametrize(
    "told",
    [{"repetition_penalty": 0}, {"repetition_penalty": "1"}, {"no_repeat_ngram_size": 1.5}, {"suppress_tokens": [-1]}, {"num_beams": True}]
    + [{"bad_words_ids": [3]}, {"sequence_bias": [[[], 1.0]]}, {"sequence_bias": {"1": 2}}],
)
def test_a_setting_without_meaning_is_refused_in_one_line(tmp_path: Path, told: dict[str, Any]):
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=f"generation_config.json: has {next(iter(told))}") as refused:
        of_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_completions_follow_the_files_and_say_what_they_were_made_with(tmp_path: Path, checkpoint: Path, capsys):
    write(tmp_path / "prompts.jsonl", [{"prompt": "abab"}, {"prompt": "hello"}])
    place = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    plain = generate(tmp_path, str(place))
    for name in ("out.jsonl", "out.json"):
        (tmp_path / name).unlink()
    (place / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(range(4, 20)), "min_new_tokens": 4}))
    found = generate(tmp_path, str(place))
    assert [one["completion"] for one in found] != [one["completion"] for one in plain] and all(one["tokens"] == 4 for one in found)
    assert not set("abcdefghijklmnop") & set("".join(one["completion"] for one in found))
    assert json.loads((tmp_path / "out.json").read_text())["made_from"]["settings"]["min_new_tokens"] == 4
    assert "applied min_new_tokens, suppress_tokens" in capsys.readouterr().err
    (place / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="the completions were made from something else"):
        generate(tmp_path, str(place))


ALSO: dict[str, Any] = {"eos_token_id": [3, 9], "max_new_tokens": 7}
# Several keys at once, and those of lengths alone.
FILES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "suppress_tokens": [5, 9, 20], "do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.3}
    | {"max_length": 9},
    {"bad_words_ids": [[8], [9, 9], [3]], "min_length": 6, "sequence_bias": [[[9], 2.0], [[6, 7], -5.0]], "forced_eos_token_id": 5}
    | {"max_new_tokens": None, "max_length": 12},
    {"forced_bos_token_id": 7, "begin_suppress_tokens": [6, 8, 21], "no_repeat_ngram_size": 2, "min_new_tokens": 4, "min_length": 30},
    {"num_beams": 3, "repetition_penalty": 1.3, "min_new_tokens": 2, "max_new_tokens": None, "max_length": 13},
]
LENGTHS_ALONE: list[dict[str, Any]] = [
    {"max_new_tokens": None, "max_length": 12, "forced_eos_token_id": 5, "suppress_tokens": [3, 9]},
    {"max_new_tokens": None, "max_length": 13, "num_beams": 3},
    {"max_length": 9},
]


# How files are read, and what each setting does to one token at a time and to beams, is above.
@pytest.mark.slow
@pytest.mark.parametrize("told", [*FILES, *LENGTHS_ALONE], ids=range(7))
def test_completions_are_those_of_transformers_with_the_same_files(tmp_path: Path, checkpoint: Path, told: dict[str, Any]):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    rows = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("ab", "hello dog", "d", "abab ab", "dog")])
    place = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (place / "generation_config.json").write_text(json.dumps(ALSO | told))
    found = generate(tmp_path, str(place), max_new_tokens=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    for line, row in zip(found, map(json.loads, rows.read_text().splitlines()), strict=True):
        given = tokenizer(row["prompt"], return_tensors="pt")
        whole = model.generate(**given, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
        # A completion has no token that ends it, special or not.
        text = tokenizer.decode(whole[:-1] if whole[-1] in ALSO["eos_token_id"] else whole, skip_special_tokens=True)
        assert (line["tokens"], line["completion"]) == (len(whole), text)


def test_settings_of_an_old_config_go_out_with_an_export(tmp_path: Path, checkpoint: Path):
    place = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (place / "config.json").write_text(json.dumps(json.loads((place / "config.json").read_text()) | {"repetition_penalty": 1.5}))
    told, _ = write_endings(tmp_path, {"width": 4}, place, of_path(place, 64))
    assert told["repetition_penalty"] == 1.5 and "hidden_size" not in told
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert of_folder(tmp_path).settings == of_folder(place).settings == Settings(repetition_penalty=1.5)
