"""`job=generate`: completions of prompts by the released weights of a run, or by a checkpoint."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dpx import durable
from dpx.config.experiment import Experiment
from dpx.console import answer, figure, stage, wide_console
from dpx.declaration import ConfigError, declaration, require, require_date
from dpx.files.run_folder import RunFolder
from dpx.processes.interruption import Interrupted

# Where completions are written in a run's folder, by the provenance of their prompts.
_FOLDER = "generated"
_MOST_NEW_TOKENS = 64


@declaration
class Generate:
    """Writes one JSON line a prompt: row, prompt, completion, finish_reason, tokens, log_probability. The same command continues.

    The weights are those of the run that `run=` names, or of the folder `checkpoint`. Completions are greedy without a temperature or
    beams.

    Attributes:
        prompts: File of rows, .jsonl, .csv, .tsv or .parquet; each prompt is completed once.
        checkpoint: A causal decoder in the layout of Hugging Face, instead of a run.
        template: How a row becomes a prompt, with its columns in braces and \\n for a line break; null writes it as the run's training rows
            begin, or as {prompt}.
        messages_field: Column of a conversation, written by the checkpoint's chat template; null takes the run's.
        tools_field: Column with the tools of a conversation; null takes the run's.
        documents_field: Column with the documents of a conversation; null takes the run's.
        chat_date: Date (YYYY-MM-DD) that the chat template writes where it asks for today's; null takes the run's.
        prompts_provenance: public vouches that no protected row is a prompt, and writes to release/; protected writes to private/.
        output: File that is written, ending in .jsonl; null means generated/<name of prompts>.jsonl of the run. A .json of that name
            says what it was made from.
        max_new_tokens: Most tokens of a completion, its end included; null takes what the checkpoint's files say, usually 64.
        temperature: Logits are divided by it before a token is drawn; 0 takes the most likely token.
        top_k: Tokens are drawn from this many most likely ones, 0 from all; null takes what the checkpoint's files say.
        top_p: Tokens are drawn from the fewest most likely ones with this probability together; null takes what the files say.
        beams: Beams of a beam search, which returns the completion with the highest mean logarithm of a token's probability; null takes
            what the checkpoint's files say, usually 1.
        batch_size: Prompts that are completed together; the completions do not depend on it, except for rounding.
        limit: Number of prompts that are completed, the first ones; null completes all.
        seed: Fixes what is drawn.
    """

    prompts: str
    checkpoint: str | None = None
    template: str | None = None
    messages_field: str | None = None
    tools_field: str | None = None
    documents_field: str | None = None
    chat_date: str | None = None
    prompts_provenance: Literal["public", "protected"] = "protected"
    output: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    beams: int | None = None
    batch_size: int = 8
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams", "batch_size", "limit"):
            value = getattr(self, name)
            require(value is None or value > 0, f"generate.{name}={value}", "must be at least 1", "Give a positive number")
        require(self.seed >= 0, f"generate.seed={self.seed}", "a seed is not negative", "Use 0 or more")
        temperature = f"generate.temperature={self.temperature}"
        require(0 <= self.temperature < float("inf"), temperature, "is not a temperature", "Use 0 (greedy), or more")
        is_share = self.top_p is None or 0 < self.top_p <= 1
        require(is_share, f"generate.top_p={self.top_p}", "is not a probability above 0", "Use 0 < top_p <= 1")
        require(self.top_k is None or self.top_k >= 0, f"generate.top_k={self.top_k}", "is not a number of tokens", "Use 0 or more")
        value, fix = f"generate.beams={self.beams}, {temperature}", "Use generate.temperature=0 or generate.beams=1"
        require(self.beams in (None, 1) or self.temperature == 0, value, "a beam search draws nothing", fix)
        reason, is_drawn = "at temperature 0 nothing is drawn", self.temperature > 0
        require(self.top_p in (None, 1) or is_drawn, f"generate.top_p={self.top_p}, {temperature}", reason, "Give a temperature")
        require(self.top_k in (None, 0) or is_drawn, f"generate.top_k={self.top_k}, {temperature}", reason, "Give a temperature")
        both = f"generate.template, generate.messages_field={self.messages_field}"
        require(self.template is None or self.messages_field is None, both, "a chat template writes the whole prompt", "Give one of them")
        require_date("generate.chat_date", self.chat_date)
        is_named = self.output is None or self.output.endswith(".jsonl")
        require(is_named, f"generate.output={self.output}", "is not the name of a file of JSON lines", "Let it end in .jsonl")

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        from dpx.data import left_out
        from dpx.generation.completer import MADE_FROM, completed, lines_of, of_checkpoint, of_run
        from dpx.generation.prompts import read, require_rows
        from dpx.init.relation import require_other_text
        from dpx.statement import received
        from dpx.training.opening import keep_compiled_programs

        file = Path(self.prompts).expanduser()
        require_rows(file)
        if self.prompts_provenance == "public" and self.checkpoint is None:
            text = durable.of_file(file)["sha256"]
            read_from = [one for manifest in left_out.manifests(folder.path / "private") for one in manifest.read_from]
            fix = "Remove it: completions of the run's own rows show them"
            require_other_text("generate.prompts_provenance=public", [text], read_from, "the run", fix)
        if self.checkpoint is not None:
            both = f"run={folder.path}, generate.checkpoint={self.checkpoint}"
            require(not folder.has_begun, both, "only one of them can complete the prompts", "Remove one of them")
            require(self.output is not None, "generate.output=null", "a checkpoint is not a run with a folder", "Name a .jsonl file")
            weights = of_checkpoint(self.checkpoint)
        else:
            began = (folder.release / "params").is_dir()
            require(began, "run", "no finished run is named", "Add run=<folder>, or generate.checkpoint=<folder>")
            found = received.read(folder.path)
            weights = of_run(experiment.fitted, folder.release, found)
        style = self._style(weights.style)
        rule = self._rule(weights)
        room = weights.model.positions - (rule.max_new_tokens if rule.max_length is None else 1)
        room = min(room, room if rule.max_length is None else rule.max_length - 1)
        reason = f"leaves no position of the model's {weights.model.positions} for a prompt"
        require(room > 0, f"generate.max_new_tokens={rule.max_new_tokens}", reason, "Lower it")
        prompts = read(file, style, weights.tokenizer, room, self.limit)
        path, covered = self._path(folder, file), self._covered(weights.received)
        # The options that decide what the completions are, as far as they do.
        declared = ("template", "messages_field", "tools_field", "documents_field", "chat_date", "prompts_provenance")
        ruled = ("max_new_tokens", *(["max_length"] if rule.max_length else []), "temperature", "beams")
        made_from = {name: getattr(self, name) for name in declared} | {name: getattr(rule, name) for name in ruled}
        if self.temperature > 0:
            made_from |= {"seed": self.seed, "top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
        made_from |= {"weights": weights.checksum, "prompts": durable.of_file(file)["sha256"]}
        facts = covered | {MADE_FROM: json.loads(json.dumps(made_from | {"settings": weights.of_checkpoint.facts()}))}
        for line in weights.of_checkpoint.lines:
            stage(line)
        keep_compiled_programs()
        began, tokens = time.monotonic(), 0
        with lines_of(path, facts, [one.row for one in prompts]) as lines:
            before = lines.count
            stage(f"{path}: {before} of {len(prompts)} prompts are completed")
            try:
                for batch in completed(weights, style, rule, prompts, self.batch_size, self.seed, before):
                    lines.append(batch)
                    tokens += sum(one["tokens"] for one in batch)
            except Interrupted as interrupted:
                interrupted.how = f"the same command continues after {lines.count} of {len(prompts)} prompts"
                raise
        seconds = time.monotonic() - began
        counts = {"prompts": len(prompts), "completed_before": before, "tokens": tokens, "seconds": round(seconds, 3)}
        answer({"file": str(path)} | counts | covered)
        speed = f", {tokens} tokens in {figure(seconds, 1)} s" if tokens else ""
        told = f"{path}: {len(prompts)} completions{speed}\n{covered['covers']}"
        wide_console().print(told, highlight=False, markup=False, soft_wrap=True)

    def _style(self, of_rows: Any) -> Any:
        """Returns how a record becomes a prompt (`dpx.generation.prompts.Style`): as the training rows begin, but for what is declared."""
        names = ("messages_field", "tools_field", "documents_field", "chat_date")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        style = of_rows if self.template is None else replace(of_rows.of_columns(self.template), separator=of_rows.separator)
        if self.messages_field is not None:
            style = type(of_rows)(**{name: getattr(of_rows, name) for name in names})
        style = replace(style, **given)
        unread = f"generate.{next(iter(given), '')}"
        require(not given or style.messages_field is not None, unread, "only a chat template reads it", "Add generate.messages_field")
        return style

    def _rule(self, weights: Any) -> Any:
        """Returns how the next token is chosen (`dpx.generation.decoding.Rule`): by the options, and by the checkpoint's files where they
        are null. Raises `ConfigError` where the files ask for what dpx does not do."""
        from dpx.generation.decoding import Rule
        from dpx.generation.settings import without_ends

        asked, is_drawn = weights.of_checkpoint, self.temperature > 0
        settings = replace(asked.settings, banned=without_ends(asked.settings.banned, weights.ends))
        beams = 1 if is_drawn else self.beams or asked.beams
        asked.require_done(beams)
        of_draws = dict(asked.of_draws or {}) if is_drawn else {}
        of_draws |= {name: one for name in ("top_k", "top_p") if (one := getattr(self, name)) is not None and is_drawn}
        most, longest = self.max_new_tokens or asked.max_new_tokens or _MOST_NEW_TOKENS, None
        if self.max_new_tokens is None and asked.max_length is not None:
            longest = min(asked.max_length, weights.model.positions)
            most = max(1, longest - 1)
        return Rule(most, weights.ends, self.temperature, beams=beams, settings=settings, max_length=longest, **of_draws)

    def _path(self, folder: RunFolder, prompts: Path) -> Path:
        """Returns the file that is written. Raises `ConfigError` for completions of protected prompts in a folder that may be shared."""
        is_public = self.prompts_provenance == "public"
        if self.output is None:
            tree = folder.made_release() if is_public else folder.made_private()
            return tree / _FOLDER / f"{prompts.name.partition('.')[0]}.jsonl"
        path = Path(self.output).expanduser()
        is_shared = self.checkpoint is None and path.resolve().is_relative_to(folder.release.resolve())
        if is_shared and not is_public:
            reason = "completions of protected prompts show these prompts, and release/ may be shared"
            fix = "Name another place, or vouch with generate.prompts_provenance=public"
            raise ConfigError(f"generate.output={self.output}", reason, fix)
        return path

    def _covered(self, found: Any) -> dict[str, Any]:
        """Returns the guarantee of the weights (`dpx.statement.received.Received`), and a sentence on what it covers of the completions."""
        of_weights = f"the weights' guarantee is {found.in_words()}" if found.statement else "the weights have no statement of dpx"
        if self.prompts_provenance == "public":
            covers = "completions have the same: prompts are declared public, and only weights are read (post-processing)"
        else:
            covers = "it does not cover this file: prompts may be protected, and completions show them"
        return found.facts | {"prompts_provenance": self.prompts_provenance, "covers": f"{of_weights}; {covers}"}
