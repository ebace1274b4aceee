"""Writes the tokenizer of an export, and how its texts end: every file as it came, except for what would mark texts unlike the rows."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from dpx.data.rows import separators
from dpx.data.store import Store
from dpx.data.tokenizer import AS_IT_CAME, DEFINITION, SETTINGS, Around, SpecialIds, TextTokenizer, marks_around
from dpx.data.tokenizer_class import AS_DEFINED, class_of
from dpx.declaration import require
from dpx.files.run_folder import read_json
from dpx.files.weights import CONFIG, GENERATION, OF_GENERATION, ends_of
from dpx.models.networks import AnyDecoder
from dpx.models.shape import Bert
from dpx.task.declared_task import CausalLanguageModel, Task
from dpx.task.task_protocol import Pooled

_MARKS = {"pad_token": "pad_id", "unk_token": "unk_id", "cls_token": "cls_id", "sep_token": "sep_id", "mask_token": "mask_id"}
_OF_DECODERS = {"bos_token": "cls_id", "eos_token": "sep_id"}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PADDING = "<|pad|>"


def write(to: Path, store: Store, special: SpecialIds, model: Bert | AnyDecoder, task: Task, length: int) -> list[str]:
    """Writes the tokenizer's files into the folder `to`; returns what differs from the files of the checkpoint, for its card.

    Prompts have the marks before them that the checkpoint's tokenizer gives them, and none after. Texts with labels have those of their
    tokenizer, and running text has those of the rows; both are cut at the trained `length`. If padding needs a separate token (`special`),
    it is added.
    """
    given, is_prompted = store.folder / AS_IT_CAME, isinstance(task, CausalLanguageModel)
    if given.is_dir():
        shutil.copytree(given, to, dirs_exist_ok=True)
    tokenizer, vocabulary, anew = store.tokenizer(), store.vocabulary(), []
    own, is_own_to_dpx = tokenizer.tokenizer, tokenizer.definition is None
    if is_own_to_dpx:
        own.add_special_tokens([vocabulary[getattr(store.manifest, role)] for role in _MARKS.values()])
    elif not (to / DEFINITION).is_file():
        anew.append(f"{DEFINITION}: made of the checkpoint's list of tokens")
    if special.pad_id == len(vocabulary):
        own.add_special_tokens([_PADDING])
        reason = "has no free id for padding"
        fix = f"Name a tokenizer without unused ids and {_PADDING}"
        require(own.token_to_id(_PADDING) == special.pad_id, store.folder / DEFINITION, reason, fix)
        vocabulary = [*vocabulary, _PADDING]
        anew.append(f"{DEFINITION}, {SETTINGS}: the padding token {_PADDING}")
    segments = model.segments if isinstance(model, Bert) else 0
    # A text with a label has the marks of its own tokenizer.
    is_marked_anew = is_own_to_dpx or not isinstance(task, Pooled)
    if is_marked_anew and _mark_as_rows(tokenizer, vocabulary, is_prompted, segments, store.manifest):
        anew.append(f"{DEFINITION}: the marks around a text, which are those of the rows that were trained on")
    if anew or is_own_to_dpx or not (to / DEFINITION).is_file():
        own.save(str(to / DEFINITION))
    marks = {name: vocabulary[getattr(special, role)] for name, role in _MARKS.items()}
    if isinstance(model, AnyDecoder):
        marks |= {name: vocabulary[getattr(special, role)] for name, role in _OF_DECODERS.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if segments == 2 else ["input_ids", "attention_mask"]
    fresh: dict[str, Any] = marks | {"model_max_length": length, "model_input_names": inputs}
    came = read_json(to / SETTINGS) if (to / SETTINGS).is_file() else {}
    known = came | (read_json(to / "special_tokens_map.json") if (to / "special_tokens_map.json").is_file() else {})
    settings = {"tokenizer_class": AS_DEFINED} | came
    if class_of(settings, {}, tokenizer.definition or "") != tokenizer.built_as:
        settings["tokenizer_class"] = tokenizer.built_as
    if not came:
        settings |= {name: value for name, value in fresh.items() if name not in known}
    elif not is_prompted:
        needed = marks if isinstance(model, Bert) else {"pad_token": marks["pad_token"]}
        settings |= {name: mark for name, mark in needed.items() if name not in known} | {"model_max_length": length}
    if special.pad_id != store.manifest.pad_id:
        settings["pad_token"] = marks["pad_token"]
    (to / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    differ = sorted(name for name in {*settings, *came} if settings.get(name) != came.get(name))
    return anew if is_own_to_dpx or not differ else [*anew, f"{SETTINGS}: {', '.join(differ)}"]


def _mark_as_rows(tokenizer: TextTokenizer, vocabulary: Sequence[str], is_prompted: bool, segments: int, rows: Any) -> bool:
    """Gives the tokenizer the marks around a text that the rows have, and returns whether it had others."""
    own = tokenizer.tokenizer
    before, after = (tokenizer.begins, ()) if is_prompted else ((rows.cls_id,), (rows.sep_id,))
    if is_prompted and tokenizer.definition is not None and marks_around(own, vocabulary) == Around(before, after=after):
        return False
    # The second text has segment 1 if the model has two segments; most RoBERTa models have one.
    second = 1 if segments == 2 else 0
    first, last = ([vocabulary[number] for number in ids] for ids in (before, after))
    single = [*(f"{mark}:0" for mark in first), "$A:0", *(f"{mark}:0" for mark in last)]
    between = [f"{vocabulary[rows.sep_id]}:0"] * (separators(tokenizer) - 1)
    pair = [*single, *([] if is_prompted else between), f"$B:{second}", *(f"{mark}:{second}" for mark in last)]
    had = _read(own)
    known = sorted({(vocabulary[number], number) for number in (*before, *after, rows.sep_id)})
    came = own.post_processor
    own.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=known)  # type: ignore[assignment]
    has = _read(own)
    is_alike = all(one.ids == other.ids and (segments < 2 or one.type_ids == other.type_ids) for one, other in zip(had, has, strict=True))
    if is_alike and tokenizer.definition is not None:
        own.post_processor = came  # type: ignore[assignment]
    return tokenizer.definition is not None and not is_alike


def _read(own: Tokenizer) -> list[Any]:
    return [own.encode("a", pair, add_special_tokens=True) for pair in (None, "b")]


def write_endings(to: Path, config: Mapping[str, Any], folder: Path | None, tokenizer: TextTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Writes the `generation_config.json` of the checkpoint in `folder`, whose tokenizer a causal decoder has, into the folder `to`.

    Returns the decoder's `config` with the checkpoint's own ids of marks, and what differs from its files. Both end a text where `folder`
    ends it, and at every token that `job=generate` ends it at.
    """
    if folder is None or not (folder / CONFIG).is_file():
        return dict(config), []
    came = read_json(folder / CONFIG)
    told = {name: value for name, value in config.items() if name not in _IDS} | {name: came[name] for name in _IDS if name in came}
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else None
    if generation is None:
        told |= {name: came[name] for name in OF_GENERATION if name in came}
    ends = ends_of(folder)
    added = [number for number in ends_of_rows(tokenizer) if number not in ends]
    if generation is not None and not added:
        shutil.copyfile(folder / GENERATION, to / GENERATION)
    if not added:
        return told, []
    ids = {"eos_token_id": [*ends, *added] if ends else added[0] if len(added) == 1 else added}
    if generation is None:
        return told | ids, [f"{CONFIG}: eos_token_id also has {added}, where rows end"]
    (to / GENERATION).write_text(json.dumps(generation | ids, indent=2) + "\n")
    return told, [f"{GENERATION}: eos_token_id also has {added}, where rows end"]


def ends_of_rows(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a text: the mark that rows of a template have, and the end that the tokenizer names for chats."""
    named = tokenizer.tokenizer.token_to_id(tokenizer.marks.get("eos_token", ""))
    return tuple(sorted({tokenizer.special.sep_id} | ({named} if named is not None else set())))
