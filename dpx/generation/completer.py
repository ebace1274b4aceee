"""Completes prompts in batches of one size, in order, padded to a few lengths, so that few programs are compiled.

The weights and their tokenizer are those of a run or of a checkpoint, and are read only when asked for. A batch of lines is on disk before
the next batch begins, with what it was made from beside it, so that the same command continues after a kill: a line that the kill cut short
is removed, and its prompt is completed again.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece

from dpx import durable
from dpx.config.experiment_parts import Fitted
from dpx.console import stage
from dpx.data.length_buckets import widths_of
from dpx.data.prepare import require_vocabulary, store_of, vocabulary_folder, vocabulary_place
from dpx.data.tokenizer import TextTokenizer, of_path
from dpx.declaration import ConfigError, require
from dpx.durable import locked, naming, not_following, seal, sync
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import read_json, write_json
from dpx.files.weights import PARAMS, ends_of, facts_beside, nested, weight_files
from dpx.generation.decoding import Decoding, Rule
from dpx.generation.prompts import Prompt, Style
from dpx.generation.settings import OfCheckpoint, of_folder
from dpx.interop.checkpoint import Checkpoint
from dpx.interop.tokenizer_files import ends_of_rows
from dpx.models.lora import merge_adapters
from dpx.models.networks import AnyDecoder
from dpx.models.shape import AnyModel
from dpx.statement import received
from dpx.statement.received import Received
from dpx.task.declared_task import CausalLanguageModel, Task


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


def of_run(fitted: Fitted, release: Path, found: Received) -> Weights:
    """Returns the released weights of a run, `found` in its `release`; adapters are merged when they are loaded.

    Its rows are not read if its vocabulary was given. Raises `ConfigError` for another model or task, and for another vocabulary than that
    of the weights.
    """
    model, place, data = _decoder(fitted.model, fitted.task), release / PARAMS, fitted.data
    if data.vocabulary.path is None:
        tokenizer = store_of(data, fitted.privacy, place).tokenizer()
    else:
        folder = vocabulary_place(data.vocabulary.path)
        tokenizer = of_path(folder, data.vocabulary.size)
        require_vocabulary(place, tokenizer.checksum, folder)
    checksum = seal(facts_beside(place).get("weights"))
    load = lambda: merge_adapters(released(place))  # noqa: E731
    origin = vocabulary_folder(data.vocabulary.path)
    ends, asked = _ends(tokenizer, origin), of_folder(origin)
    return Weights(model, fitted.vocabulary_size, tokenizer, Style.of_rows(data.source), checksum, found, load, ends, asked)


def of_checkpoint(path: str) -> Weights:
    """Returns the weights of a checkpoint's folder or hub id. Raises `ConfigError` if it is not a complete causal decoder."""
    checkpoint, task = Checkpoint(path, "generate.checkpoint"), CausalLanguageModel()
    model = _decoder(checkpoint.model, task, checkpoint.asked)
    size = model.vocabulary_size or 0
    tokenizer, selected = of_path(checkpoint.folder, size), checkpoint.select(task.parameter_shapes(model, size))
    for note in selected.notes:
        stage(note)
    found = received.read(checkpoint.folder)
    checksum = seal({name: durable.of_file(checkpoint.folder / name) for name in weight_files(checkpoint.folder)})
    load = lambda: jax.tree.map(jnp.asarray, nested(checkpoint.leaves(selected)))  # noqa: E731
    ends, asked = _ends(tokenizer, checkpoint.folder), of_folder(checkpoint.folder)
    return Weights(model, size, tokenizer, Style(), checksum, found, load, ends, asked)


def _ends(tokenizer: TextTokenizer, folder: Path | None) -> tuple[int, ...]:
    return tuple(sorted({*ends_of_rows(tokenizer), *(ends_of(folder) if folder is not None else ())}))


def _decoder(model: AnyModel, task: Task, where: str = "run") -> AnyDecoder:
    if not isinstance(model, AnyDecoder) or not isinstance(task, CausalLanguageModel):
        reason = f"is {model.name} of task={task.name}, and only a causal decoder of dpx with task=causal_lm completes texts"
        raise ConfigError(where, reason, "Name GPT-2, Llama, Mistral, SmolLM, Qwen, OLMo 2 or Gemma")
    return model


def completed(
    weights: Weights, style: Style, rule: Rule, prompts: Sequence[Prompt], batch_size: int, seed: int, first: int
) -> Iterator[list[dict[str, Any]]]:
    """Yields the lines of one batch of prompts after another, from prompt `first` on.

    Batches begin at multiples of `batch_size`, wherever the first is, so that a restart computes the same. What is drawn for a prompt
    depends on `seed` and the prompt's row alone.
    """
    if first == len(prompts):
        return
    decoding, params = Decoding(weights.model, weights.vocabulary_size, rule), weights.load()
    tokenizer = weights.tokenizer.tokenizer
    widths, key = np.array(widths_of("auto", weights.model.positions)), jax.random.key(seed)
    keys_of = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
    for start in range(first // batch_size * batch_size, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        # The last batch is filled up with its last prompt.
        filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]
        length_B = np.array([len(one.ids) for one in filled], np.int32)
        tokens_BW = np.full((batch_size, widths[np.searchsorted(widths, length_B.max())]), weights.tokenizer.special.pad_id, np.int32)
        for row, one in zip(tokens_BW, filled, strict=True):
            row[: len(one.ids)] = one.ids
        keys_B = keys_of(key, np.array([one.row for one in filled], np.uint32))
        done = jax.device_get(decoding.complete(params, tokens_BW, length_B, keys_B))
        lines = []
        for prompt, ids, count, score, is_ended in zip(batch, *(one[: len(batch)] for one in done), strict=True):
            text = text_of(tokenizer, ids[: count - is_ended].tolist())
            is_number, fix = bool(np.isfinite(score)), "Use other weights, or train again at a lower learning rate"
            require(is_number, f"row {prompt.row}", "the model's probabilities are not numbers", fix)
            reason = "stop" if is_ended else "length"
            about = {"row": prompt.row, "prompt": prompt.text, "completion": style.completion(text), "finish_reason": reason}
            lines.append(about | {"tokens": int(count), "log_probability": round(float(score), 4)})
        yield lines[max(0, first - start) :]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of tokens that follow a prompt, without special tokens.

    Decoders write a piece inside a word with its mark (`##ing`) where no token is before it. Here the prompt is, so the mark is left out.
    """
    if not isinstance(tokenizer.model, WordPiece):
        return tokenizer.decode(ids, skip_special_tokens=True)
    if tokenizer.decoder is None:
        tokenizer.decoder = decoders.WordPiece(cleanup=False)  # type: ignore[assignment]
    return tokenizer.decode(ids, skip_special_tokens=True).removeprefix(tokenizer.model.continuing_subword_prefix)


# In the file beside the completions: everything that they depend on.
MADE_FROM = "made_from"
_FIX = "Restore it, or name another file with generate.output"


@contextmanager
def lines_of(path: Path, facts: Mapping[str, Any], rows: Sequence[int]) -> Iterator["Lines"]:
    """Yields the file of completions of the prompts in `rows`, locked, with the lines that it has already.

    `facts` are written beside it, as .json. Raises `ConfigError` if another process writes the file, if it holds completions that were made
    from something else, or other rows.
    """
    beside = path.with_suffix(".json")
    # Refused before anything is made: a file that is not known, and completions that were made from something else.
    if beside.exists():
        before, made_from = read_json(beside, _FIX).get(MADE_FROM), facts[MADE_FROM]
        require(isinstance(before, dict), beside, "does not say what the completions were made from", _FIX)
        assert isinstance(before, dict)
        told = [f"{key} was {before.get(key)}, not {value}" for key, value in made_from.items() if before.get(key) != value]
        require(not told, beside, f"the completions were made from something else: {'; '.join(told)}", _FIX)
    else:
        require(not path.exists(), path, f"already exists, without {beside.name} that says what it holds", _FIX)
        write_json(beside, facts)
    try:
        with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield Lines(path, rows)
    except BlockingIOError:
        raise ConfigError(path, "another process is writing this file", "Wait for it, or name another file with generate.output") from None


class Lines:
    """A file of one JSON object a prompt, in the order of `rows`; `count` is the number of prompts that it has."""

    def __init__(self, path: Path, rows: Sequence[int]):
        self._path = path
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(path, len(whole))
        try:
            found = [json.loads(line)["row"] for line in whole.splitlines()]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(path, "was changed by hand", _FIX) from None
        # A lower generate.limit than before asks for fewer prompts than there are.
        is_beginning = all(one == other for one, other in zip(found, rows, strict=False))
        require(is_beginning, path, "holds completions of other rows", _FIX)
        self.count = min(len(found), len(rows))

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; they are on disk when this returns."""
        with naming(self._path), open(self._path, "a", encoding="utf-8", opener=not_following) as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in batch))
            file.flush()
            os.fsync(file.fileno())
        sync(self._path.parent)
        self.count += len(batch)
