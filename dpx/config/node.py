"""Checks one node of a config against the declaration that it names, with errors in the user's terms: keys, required values and types.

What was probably meant by a key, an option or a value that does not exist is found among other libraries' names and keys of other options.
Such a hint is the fix of an error message, computed only after an error, from the YAML files of the options.
"""

import collections.abc
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any

import yaml

from dpx import packages
from dpx.declaration import ConfigError

# Keys that other libraries use, or that stand elsewhere here, by the last part or the whole. The hint replaces `{}` by the written value.
_KEYS = {
    "lr": "lr_schedule.learning_rate={}",
    "batch_size": "batch_schedule.size={}",
    "batch": "batch_schedule.size={}",
    "train_batch_size": "batch_schedule.size={}",
    "per_device_train_batch_size": "batch_schedule.size={} (the expected logical batch; microbatch is what a device holds)",
    "gradient_accumulation_steps": "batch_schedule.size=... (the logical batch; microbatch=... is what a device holds)",
    "precision": "model.dtype=bfloat16 with model=hf, +model.dtype=bfloat16 with other models",
    "fp16": "model.dtype=bfloat16 with model=hf, +model.dtype=bfloat16 with other models",
    "bf16": "model.dtype=bfloat16 with model=hf, +model.dtype=bfloat16 with other models",
    "gradient_checkpointing": "model.rematerialize=layers",
    "remat": "model.rematerialize=layers",
    "attn_implementation": "model.attention=xla, or model.attention=cudnn on a GPU",
    "max_grad_norm": "clip.clipping_norm={}",
    "clip_norm": "clip.clipping_norm={}",
    "max_norm": "clip.clipping_norm={}",
    "l2_norm_clip": "clip.clipping_norm={}",
    "target_epsilon": "noise.epsilon={}",
    "target_delta": "privacy.delta={}",
    "epochs": "steps=... (rows / batch size x epochs; job=plan shows the epochs)",
    "num_epochs": "steps=... (rows / batch size x epochs; job=plan shows the epochs)",
    "num_train_epochs": "steps=... (rows / batch size x epochs; job=plan shows the epochs)",
    "max_steps": "steps={}",
    "iterations": "steps={}",
    "warmup": "lr_schedule.warmup_steps={}",
    "warmup_ratio": "lr_schedule.warmup_steps={} (below 1 it is a fraction of the steps)",
    "max_length": "data.sequence_length={}",
    "max_seq_length": "data.sequence_length={}",
    "seq_len": "data.sequence_length={}",
    "num_labels": "task.classes={}",
    "num_classes": "task.classes={}",
    "text_column": "data.source.text_field={}",
    "label_column": "data.source.label_field={}",
    "user_column": "data.source.unit_field={}",
    "path": "data.source.paths={}",
    "train_file": "data.source.paths={}",
    "test_file": "data.source.test_paths={}",
    "output_dir": "hydra.run.dir={}",
    "eval_every": "schedule.evaluate_every={}",
    "eval_steps": "schedule.evaluate_every={}",
    "save_steps": "schedule.checkpoint_every={}",
    "save_every": "schedule.checkpoint_every={}",
    "lora": "train=lora",
    "lora.rank": "train=lora train.rank={}",
    "lora_r": "train=lora train.rank={}",
    "lora_rank": "train=lora train.rank={}",
    "r": "train=lora train.rank={}",
    "hidden_size": "model.width={}",
    "num_layers": "model.layers={}",
    "vocab_size": "data.vocabulary.size={}",
    "pretrained": "init=hf init.path={}",
    "checkpoint": "init=hf init.path={}",
    "device": "mesh=single (the first device that JAX finds, an accelerator if there is one)",
    "devices": "mesh=h200_8 or another mesh, whose shape multiplies to the number of devices",
    "epsilon": "noise.epsilon={}",
    "eps": "noise.epsilon={}",
    "delta": "privacy.delta={}",
    "noise_multiplier": "noise=multiplier noise.noise_multiplier={}",
    "multiplier": "noise=multiplier noise.noise_multiplier={}",
    "sigma": "noise=multiplier noise.noise_multiplier={}",
    "model.dtype": "+model.dtype=bfloat16 or +model.dtype=float32",
    "fork.step": "fork=<run folder>@{}",
    "fork.run": "fork={}@<step>",
    "init.path": "init=hf init.path={}",
    "init.run": "init=run init.run={}",
    "init.checkpoint": "init=hf init.path={}",
}
# Last parts that mean this only at the root, which is "", or under these keys: an optimiser has another epsilon, a model another path.
_ONLY_UNDER = {
    "batch": ("", "train", "sampler"),
    "checkpoint": ("", "model", "train"),
    "delta": ("", "noise", "mechanism", "accountant"),
    "device": ("", "train", "mesh"),
    "devices": ("", "train", "mesh"),
    "epsilon": ("", "privacy", "mechanism", "accountant"),
    "eps": ("", "noise", "privacy", "mechanism", "accountant"),
    "iterations": ("", "train", "schedule"),
    "multiplier": ("", "noise", "privacy", "mechanism"),
    "path": ("", "data", "data.source"),
    "precision": ("", "model", "train"),
    "pretrained": ("", "model", "train"),
    "r": ("", "train", "lora"),
    "sigma": ("", "noise", "privacy", "mechanism"),
    "warmup": ("", "lr_schedule", "schedule", "optimizer", "train"),
}
# Options of other names. A value with `=` or a space is the whole command, any other one an option of the group.
_OPTIONS = {
    "accountant": {"prv": "pld", "moments": "rdp", "renyi": "rdp"},
    "data": {"csv": "table", "tsv": "table", "jsonl": "text", "parquet": "table", "txt": "text", "wikipedia": "hub"},
    "init": {"checkpoint": "hf", "pretrained": "hf", "huggingface": "hf", "scratch": "random"},
    "job": {"eval": "evaluate", "test": "evaluate", "finetune": "train", "fine_tune": "train", "fit": "train", "recipes": "list"},
    "lr_schedule": {"none": "constant", "warmup": "linear"},
    "mechanism": {"dpsgd": "dp_sgd", "gaussian": "dp_sgd", "nonprivate": "none", "off": "none"},
    "mesh": {"gpu": "single", "cpu": "single", "cuda": "single"},
    "noise": {"none": "mechanism=none", "sigma": "multiplier", "epsilon": "target_epsilon"},
    "privacy": {"none": "mechanism=none", "off": "mechanism=none"},
    "sampler": {"uniform": "fixed_size", "random": "poisson", "shuffle": "shuffled"},
    "task": {"clm": "causal_lm", "lm": "causal_lm", "sequence_classification": "classification", "finetune": "classification"}
    | {"multilabel": "multi_label", "multi_label_classification": "multi_label"},
    "train": {"full": "all", "head": "last_layer", "bitfit": "bias", "classifier": "last_layer"},
}
_ENDINGS = {"text": r"\.(txt|jsonl)(\.gz)?$", "table": r"\.(csv|tsv|parquet)(\.gz)?$"}
_OF_A_CHECKPOINT = re.compile(r"bert|roberta|electra|gpt|minilm|distil|llama|/|-", re.IGNORECASE)
# The C loader takes a tenth of the time, where PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Groups whose options are whole experiments, or nodes at the root.
_NOT_PARTS = ("experiment", "base", "debug", "hydra", "job", "analysis")


def nearest(key: str, known: Iterable[str]) -> str:
    """Returns `, such as x` if a known name is close to `key`; else the empty string."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f", such as {close[0]}" if close else ""


def unknown_key(path: str, known: Iterable[str], value: str = "...") -> ConfigError:
    """Returns the error for an unknown key with `value`, with what was probably meant (`of_key`), or the nearest known key."""
    parent, _, key = path.rpartition(".")
    known = sorted(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    meant = of_key(path, known, value)
    if meant is not None:
        return ConfigError(path, "unknown key", meant)
    if close:
        return ConfigError(path, "unknown key", f"Did you mean {parent}.{close[0]}?".replace(" .", " "))
    if not known:
        return ConfigError(path, "unknown key", f"{parent} has no keys here; python -m dpx --cfg job shows the existing ones")
    return ConfigError(path, "unknown key", f"The keys here are {', '.join(known)}")


def of_key(path: str, known: Collection[str], value: str = "...") -> str | None:
    """Returns what was probably meant by the unknown key `path` beside the keys `known`, as a phrase that ends a sentence.

    Returns `None` if nothing is known.
    """
    parent, _, leaf = path.rpartition(".")
    for name in (path, leaf):
        if name in _KEYS and (name == path or parent in _ONLY_UNDER.get(leaf, (parent,))):
            return f"Write {_KEYS[name].format(value)}"
    # A key that is nearly the same is a slip of the finger; what follows explains a key that stands elsewhere.
    if nearly := difflib.get_close_matches(leaf, known, n=1, cutoff=0.8):
        return f"Did you mean {f'{parent}.' if parent else ''}{nearly[0]}?"
    places, group = _places().get(leaf, {}), path.partition(".")[0]
    if path in places:
        named = sorted({f"{group}={option}" for option in _of_users(group, places[path], value)})
        return f"It is a key of {_some(named)}: write {named[0]} {path}={value}"
    inside = {full: options for full, options in places.items() if full.startswith(f"{group}.")} or places
    of_every_option = {full: options for full, options in inside.items() if not _is_optional(full, options)} or inside
    named = []
    for full, options in of_every_option.items():
        its_group = full.partition(".")[0]
        its_options = _some([f"{its_group}={option}" for option in _of_users(its_group, options)])
        named.append(f"{full} ({its_options})" if _is_optional(full, options) else full)
    return f"Did you mean {' or '.join(named)}?" if 0 < len(named) <= 2 else None


def of_option(group: str, option: str, options: list[str]) -> str | None:
    """Returns what was probably meant by `group=option`, as a phrase that ends a sentence; `None` if nothing is known."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in options}
    known = _OPTIONS.get(group, {}).get(option.lower()) or plain.get(re.sub(r"[^a-z0-9]", "", option.lower()))
    if known is not None:
        return f"Write {known}" if "=" in known else f"Did you mean {group}={known}?"
    if group == "model" and _OF_A_CHECKPOINT.search(option):
        return f"Write init=hf init.path={option} init.provenance=public, where the path is a folder or an id on the hub"
    if group == "init" and _OF_A_CHECKPOINT.search(option):
        return f"Write init=hf init.path={option} init.provenance=public"
    if group == "data" and re.search(_ENDINGS["text"], option):
        return f"Write data=text data.source.paths={option}, or data=table for labelled rows"
    if group == "data" and ("/" in option or re.search(_ENDINGS["table"], option)):
        return f"Write data=table data.source.paths={option} data.source.labels=[...]"
    return None


def of_group_value(group: str, value: str) -> str:
    """Returns what was probably meant by a number or `null` in the place of an option of `group`."""
    if value in ("0", "0.0", "null", "false") and group in ("noise", "mechanism", "privacy"):
        return "Write mechanism=none to train without privacy"
    keys = {
        "clip": "clip.clipping_norm",
        "noise": "noise.epsilon",
        "batch_schedule": "batch_schedule.size",
        "lr_schedule": "lr_schedule.learning_rate",
    }
    if group in keys and re.fullmatch(r"[\d.e+-]+", value):
        return f"Write {keys[group]}={value}"
    return f"Name an option of {group}: {', '.join(packages.names_in(group))}"


def of_value(key: str, value: Any) -> str | None:
    """Returns what was probably meant by a value of the wrong type under `key`; `None` if nothing is known."""
    if key == "privacy.unit" and isinstance(value, str):
        return f"Write privacy.unit=author data.source.unit_field={value}, where {value} is the column that names the owner of a row"
    if key.endswith(".dtype"):
        return f"Write {key}=bfloat16 or {key}=float32"
    return None


@functools.cache
def _places() -> dict[str, dict[str, list[str]]]:
    """Returns, by the last part of a key, its full paths, and for each the options of its group that have it."""
    places: dict[str, dict[str, list[str]]] = {}
    for _, conf in packages.folders():
        for file in sorted(conf.rglob("*.yaml")):
            group = file.relative_to(conf).parts[0]
            if file.parent != conf and group not in _NOT_PARTS:
                for full in _keys_of(yaml.load(file.read_text(), _LOADER), group):
                    places.setdefault(full.rpartition(".")[2], {}).setdefault(full, []).append(file.stem)
    return places


def _keys_of(node: Any, path: str) -> list[str]:
    if not isinstance(node, dict):
        return []
    keys = [key for key in node if isinstance(key, str) and not key.startswith("_") and key not in ("defaults", "kind")]
    return [full for key in keys for full in (f"{path}.{key}", *_keys_of(node[key], f"{path}.{key}"))]


def _is_optional(full: str, options: list[str]) -> bool:
    """Returns whether some options of the group lack the key; `tune` and `audit` are not in the default config at all."""
    group = full.partition(".")[0]
    return group in ("tune", "audit") or len(options) < len(packages.names_in(group))


def _of_users(group: str, options: list[str], value: str = "") -> list[str]:
    """Returns the options that read the user's files, if there are any in `options`, and of these the one that reads the file `value`."""
    # The presets of published data also have the keys of these options.
    of_users = [option for option in options if group == "data" and option in ("text", "table")]
    read = [option for option in of_users if re.search(_ENDINGS[option], value)]
    return read or of_users or options


def _some(named: list[str]) -> str:
    return " or ".join(named) if len(named) <= 3 else f"{', '.join(named[:2])} and {len(named) - 2} more"


_INFINITY = re.compile(r"[+-]?\.?inf", re.IGNORECASE)


def checked_arguments(declared: type, arguments: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns `arguments` after a check that every key exists, every required key is present and every value has its type.

    If a float is expected, `1` becomes 1.0, and the texts `inf` and `.inf` become infinity.
    """
    fields = {field.name: field for field in dataclasses.fields(declared) if field.init}
    types_of = typing.get_type_hints(declared)
    checked = {}
    for key, value in arguments.items():
        full = f"{path}.{key}".lstrip(".")
        if key not in fields:
            raise unknown_key(full, fields)
        value = _with_infinities(value, types_of[key])
        if not _fits(value, types_of[key]):
            has_bool = isinstance(value, list | tuple) and any(isinstance(one, bool) for one in value)
            words = "If true or false (in a file also yes, no, on, off) is meant as a word, put it in quotation marks"
            mend = of_value(full, value) or (words if has_bool else "Correct the value")
            is_number = isinstance(value, str) and re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", value) is not None
            if is_number and {int, float} & set(_parts(types_of[key])):
                reason = f"expected {type_in_words(types_of[key])}, and this is text, as from quotes or an environment variable"
                fix = f"Write {full}={value} without quotes, or {full}=$NAME, which the shell fills in"
                raise ConfigError(f"{full}='{value}'", reason, fix)
            shown = type(value).__name__ if dataclasses.is_dataclass(value) else str(value)
            raise ConfigError(f"{full}={shown}", f"expected {type_in_words(types_of[key])}", mend)
        parts = _parts(types_of[key])
        checked[key] = float(value) if type(value) is int and float in parts and int not in parts else value
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            raise ConfigError(f"{path}.{name}".lstrip("."), "this key has no value", f"Add {path}.{name}=...".replace(" .", " "))
    return checked


def _with_infinities(value: Any, hint: Any) -> Any:
    """Returns `value` with every infinity that was read as text converted to a number.

    YAML reads only `.inf` as a number, the command line only `inf`.
    """
    if isinstance(value, list):
        lists = (collections.abc.Sequence, list, tuple)
        of_items = next((typing.get_args(part)[0] for part in _parts(hint) if typing.get_origin(part) in lists), type(None))
        return [_with_infinities(item, of_items) for item in value]
    is_number = isinstance(value, str) and _INFINITY.fullmatch(value) and not {str, value} & set(_parts(hint))
    return float(value.replace(".", "")) if is_number and float in _parts(hint) else value


def _fits(value: Any, hint: Any) -> bool:
    # Imported here: a hint for a command line needs neither.
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    # In Python True is the integer 1; in a config it is a mistake.
    if isinstance(value, bool) and bool not in _parts(hint):
        return any(isinstance(part, bool) for part in _parts(hint))
    # In Python a text is a sequence of texts; in a config it is a list with missing brackets.
    is_forgotten_bracket = isinstance(value, str) and "Sequence" in str(hint) and not {str, value} & set(_parts(hint))
    if is_forgotten_bracket or not is_bearable(value, hint, conf=BeartypeConf(is_pep484_tower=True)):
        return False
    # beartype itself checks only one item of a long list, another one each time.
    of_items = [typing.get_args(part)[0] for part in _parts(hint) if typing.get_origin(part) is collections.abc.Sequence]
    if not isinstance(value, list | tuple) or not of_items:
        return True
    return any(all(_fits(one, item) for one in value) for item in of_items)


def _parts(hint: Any) -> list[Any]:
    """Returns the alternatives of a union, the values of a Literal, or the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return [part for argument in typing.get_args(hint) for part in _parts(argument)]
    return [hint]


def type_in_words(hint: Any) -> str:
    """Returns a type as a user reads it: `a number or null`."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    described = []
    for part in _parts(hint):
        if typing.get_origin(part) is not None:
            is_list = typing.get_origin(part) in (collections.abc.Sequence, list, tuple)
            described.append(f"a list (each {type_in_words(typing.get_args(part)[0])})" if is_list else "a mapping")
        else:
            described.append(names.get(part) or (part.__name__ if isinstance(part, type) else str(part)))
    described = list(dict.fromkeys(described))
    if {names[int], names[float]} <= set(described):
        # `int | float` and `float | int` are equal, so that either may be what was declared.
        described.remove(names[int])
        described.insert(described.index(names[float]) + 1, names[int])
    return " or ".join(described)
