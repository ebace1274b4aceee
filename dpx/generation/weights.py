"""Finds the weights that complete prompts, those of a run or of a checkpoint, with their tokenizer; reads them only when asked to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dpx import file_checksums
from dpx.checkpoint_folder import ends_of, weight_files
from dpx.claim import received
from dpx.claim.received import Received
from dpx.claim.seals import seal
from dpx.console import stage
from dpx.data.declarations import Data
from dpx.data.prepare import vocabulary_folder, vocabulary_place
from dpx.data.tokenizer import TextTokenizer, of_path
from dpx.declaration import ConfigError
from dpx.generation.prompts import Style
from dpx.generation.settings import OfCheckpoint, of_folder
from dpx.init.weights import PARAMS, facts_beside, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.tokenizer_files import ends_of_rows
from dpx.models.decoder import AnyDecoder
from dpx.models.lora import merge_adapters
from dpx.models.shape import AnyModel
from dpx.privacy.declarations import Privacy
from dpx.task.declarations import CausalLanguageModel, Task
from dpx.training.checkpoint import released
from dpx.training.evaluation import require_vocabulary, store_of


@dataclass(frozen=True)
class Weights:
    """A causal decoder that is not loaded yet.

    `style` says how its training rows begin, `checksum` identifies its weights, `received` is what is stated beside them, if anything.
    `ends` has the tokens at which a text ends, for its rows or for the checkpoint that its tokenizer is from, and `of_checkpoint` what the
    files of that checkpoint say of completions.
    """

    model: AnyDecoder
    vocabulary_size: int
    tokenizer: TextTokenizer
    style: Style
    checksum: str
    received: Received
    load: Callable[[], Any]
    ends: tuple[int, ...]
    of_checkpoint: OfCheckpoint = OfCheckpoint()


def of_run(model: AnyModel, task: Task, data: Data, privacy: Privacy, vocabulary_size: int, release: Path, found: Received) -> Weights:
    """Returns the released weights of a run, `found` in its `release`; adapters are merged when they are loaded.

    Its rows are not read if its vocabulary was given. Raises `ConfigError` for another model or task, and for another vocabulary than that
    of the weights.
    """
    model, place = _decoder(model, task), release / PARAMS
    if data.vocabulary.path is None:
        tokenizer = store_of(data, privacy, place).tokenizer()
    else:
        folder = vocabulary_place(data.vocabulary.path)
        tokenizer = of_path(folder, data.vocabulary.size)
        require_vocabulary(place, tokenizer.checksum, folder)
    checksum = seal(facts_beside(place).get("weights"))
    load = lambda: merge_adapters(released(place))  # noqa: E731
    origin = vocabulary_folder(data.vocabulary.path)
    ends, asked = _ends(tokenizer, origin), of_folder(origin)
    return Weights(model, vocabulary_size, tokenizer, Style.of_rows(data.source), checksum, found, load, ends, asked)


def of_checkpoint(path: str) -> Weights:
    """Returns the weights of a checkpoint's folder or hub id. Raises `ConfigError` if it is not a complete causal decoder."""
    checkpoint, task = Checkpoint(path, "generate.checkpoint"), CausalLanguageModel()
    model = _decoder(checkpoint.model, task, checkpoint.asked)
    size = model.vocabulary_size or 0
    tokenizer, selected = of_path(checkpoint.folder, size), checkpoint.select(task.parameter_shapes(model, size))
    for note in selected.notes:
        stage(note)
    found = received.read(checkpoint.folder)
    checksum = seal({name: file_checksums.of_file(checkpoint.folder / name) for name in weight_files(checkpoint.folder)})
    load = lambda: jax.tree.map(jnp.asarray, nested(checkpoint.leaves(selected)))  # noqa: E731
    ends, asked = _ends(tokenizer, checkpoint.folder), of_folder(checkpoint.folder)
    return Weights(model, size, tokenizer, Style(), checksum, found, load, ends, asked)


def _ends(tokenizer: TextTokenizer, folder: Path | None) -> tuple[int, ...]:
    return tuple(sorted({*ends_of_rows(tokenizer), *(ends_of(folder) if folder is not None else ())}))


def _decoder(model: AnyModel, task: Task, where: str = "run") -> AnyDecoder:
    if not isinstance(model, AnyDecoder) or not isinstance(task, CausalLanguageModel):
        reason = f"is {model.name} of task={task.name}, and only a causal decoder of dpx with task=causal_lm completes texts"
        raise ConfigError(where, reason, "Name GPT-2, Llama, Mistral, Qwen or Gemma")
    return model
