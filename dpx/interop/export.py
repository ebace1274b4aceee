"""Exports a run's released weights as a folder that `transformers` or PEFT loads: safetensors, config, tokenizer, statement and model
card.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from safetensors import SafetensorError

from dpx.config.experiment_parts import Fitted
from dpx.console import stage
from dpx.data import learnt_from
from dpx.data.prepare import store_of, vocabulary_folder
from dpx.data.store import Store
from dpx.data.tokenizer import SETTINGS, SpecialIds, require_read_elsewhere
from dpx.declaration import ConfigError, require
from dpx.durable import draft_folder_of, narrow, remove_drafts
from dpx.files import weights
from dpx.files.orbax_checkpoints import on_host
from dpx.files.run_folder import CONFIG, RunFolder, read_json
from dpx.files.weights import PARAMS, Leaves, by_path
from dpx.interop import tokenizer_files
from dpx.interop.card import Model, Published, card, training_command
from dpx.interop.written import Written, adapters, in_units_of_target, with_identity, written
from dpx.models.lora import merge_adapters
from dpx.models.networks import AnyDecoder
from dpx.models.shape import AnyModel, Bert, joined
from dpx.statement import received, seals
from dpx.statement.seals import STATEMENT
from dpx.statement.statement_records import Statement
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import CausalLanguageModel, Classification, Task

Format = Literal["hf", "peft"]


def export(
    fitted: Fitted,
    folder: Path,
    to: Path,
    format: Format = "hf",
    published: Published | None = None,
    changed: Callable[[Statement], Sequence[str]] = lambda statement: (),
) -> Written:
    """Writes the folder `to`, whole or not at all.

    `published` is what the model card says of the base model and the licence, `changed` returns what it says of the change by training.

    Raises `ConfigError` if it exists, if the run's parts do not agree, and for a model that transformers has no class for; with
    `format="peft"` also for a run without adapters of a checkpoint.
    """
    require(not to.exists() and not to.is_symlink(), to, "already exists", "Delete it, or name another folder with job.to")
    found = received.read(folder)
    RunFolder(folder).require_no_links()
    release, published = folder / "release", (published or Published()).with_defaults(fitted.init)
    is_released, fix = (release / PARAMS).is_dir(), "Let it train to its end, or name another run"
    require(is_released, f"run={folder}", "contains no released parameters", fix)
    model, task, tree = fitted.model, fitted.task, on_host(release / PARAMS)
    store = store_of(fitted.data, fitted.privacy, release / PARAMS)
    special = SpecialIds.from_ids(store.manifest)
    if format == "peft":
        leaves = in_units_of_target(task, by_path(tree))
        converted = adapters(fitted.init, fitted.train, model, task, leaves, special.sep_id, published.base)
    else:
        if isinstance(tree.get("layers"), dict) and "lora" in tree["layers"]:
            tree = jax.tree.map(np.asarray, merge_adapters(tree))
        model, leaves = with_identity(model, task, in_units_of_target(task, by_path(tree)))
        leaves, special = _with_padding(model, task, joined(leaves), store)
        converted = written(model, task, leaves, max(fitted.vocabulary_size, special.pad_id + 1), fitted.data.labels, special)
    assert isinstance(model, Bert | AnyDecoder)
    if (statement := found.statement) is None:
        raise ConfigError(release, "contains weights but not their statement", f"Restore its {STATEMENT}")
    mark = received.mark(folder.name, release)
    require_read_elsewhere(store.tokenizer(), converted.config.get("model_type", ""))
    shown = Model(fitted.name, converted.architecture, task, fitted.train.stated(model), converted.base, published)
    with _written_whole(to) as unfinished:
        weights.write(unfinished / converted.weights_file, converted.tensors)
        anew = tokenizer_files.write(unfinished, store, special, model, task, fitted.data.sequence_length)
        config = converted.config
        if converted.base is None and isinstance(task, CausalLanguageModel):
            origin = vocabulary_folder(fitted.data.vocabulary.path)
            config, endings = tokenizer_files.write_endings(unfinished, config, origin, store.tokenizer())
            anew += endings
        # PEFT reads this field itself for a model without a task.
        of_adapters = {received.OF_ADAPTERS: mark} if config.get("task_type") else {}
        config |= mark if converted.base is None else of_adapters
        (unfinished / converted.config_file).write_text(json.dumps(config, indent=2) + "\n")
        learnt_from.write(unfinished, learnt_from.of_store(store.manifest, fitted.name), released=True)
        settings = unfinished / SETTINGS
        settings.write_text(json.dumps(read_json(settings) | mark, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copyfile(release / STATEMENT, unfinished / STATEMENT)
        shutil.copyfile(release / CONFIG, unfinished / "dpx_config.yaml")
        command = f"python -m dpx job=export job.format={format} run=outputs/{folder.name}"
        told = card(statement, shown, training_command(folder / "private"), command, changed(statement), found.checked_by, anew)
        (unfinished / "README.md").write_text(told)
        seals.write(unfinished)
    return converted


@contextlib.contextmanager
def _written_whole(to: Path) -> Iterator[Path]:
    """Yields a folder to write into, which is at `to`, on disk, when the block ends. Raises `ConfigError` if none can be made."""
    try:
        for draft in remove_drafts(to):
            stage(f"{draft}: removed what an export left that was killed")
        with draft_folder_of(to, Path.mkdir) as unfinished:
            yield unfinished
            narrow(unfinished)
    except (OSError, SafetensorError) as error:
        reason = f"cannot be written ({getattr(error, 'strerror', None) or type(error).__name__})"
        raise ConfigError(to, reason, "Free space, or name another folder with job.to") from error


def _with_padding(model: AnyModel, task: Task, leaves: Leaves, store: Store) -> tuple[Leaves, SpecialIds]:
    """Returns the parameters and the ids of the marks, with a separate padding token for a decoder's class for labels.

    That class reads a text's last token that is not padding: if padding is also the mark that ends a text, padding gets a separate token.
    If the table is full, its new row is zeros, which nothing reads.
    """
    special = SpecialIds.from_ids(store.manifest)
    if (
        not isinstance(model, AnyDecoder)
        or not isinstance(task, Classification | Regression | MultiLabel)
        or special.pad_id != special.sep_id
    ):
        return leaves, special
    special, table_VH = dataclasses.replace(special, pad_id=len(store.vocabulary())), leaves["embeddings/word"]
    is_full = special.pad_id == len(table_VH)
    padded_VH = np.concatenate([table_VH, np.zeros_like(table_VH[:1])]) if is_full else table_VH
    return leaves | {"embeddings/word": padded_VH}, special
