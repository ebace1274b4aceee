"""Compares 6 M S with the products of traced programs, and measures what clipping and noise add (McKenna et al. 2025, appendix B.3)."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import declaration
from dpx.run_folder import read_json
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table

# An instantiated gradient of d numbers: square and add for its norm, scale and add for the sum.
CLIPPING_OPERATIONS = 4
# Noise scaled and added, the sum divided; draws are not counted.
NOISE_OPERATIONS = 3


@declaration
class MckennaFlopsModel(Positive):
    """Traces programs without running them, and reads measurements.

    Attributes:
        published_parameters: Parameters of Table 4, by model option.
        sequence_lengths: Tokens of a row.
        physical_batch: Examples that a device holds.
        batch_size: Examples of a step.
        vocabulary_size: Rows of the word table.
        evidence: Folder with benchmark.json files, if any.
    """

    published_parameters: Mapping[str, float]
    sequence_lengths: Sequence[int]
    physical_batch: int
    batch_size: int
    vocabulary_size: int
    evidence: str

    def __call__(self) -> list[Table]:
        traced = [self._traced(name, length) for name in self.published_parameters for length in self.sequence_lengths]
        shares = self._shares(traced)
        return [self._products(traced), shares, self._measured(), verdict_table([judged(shares.as_json()["rows"])])]

    def _traced(self, name: str, length: int) -> dict[str, Any]:
        """Returns the products of one example in each program, from traced programs."""
        from dpx.config import recipes
        from dpx_papers.benchmark.traced import Traced

        model = recipes.option("model", name)
        subject = Traced.trace(model, length, self.vocabulary_size, self.physical_batch)
        flops = {variant: subject.flops(variant) for variant in ("plain", "autodiff", "vmap")}
        flops |= {"grams": subject.flops("book_keeping", kept_bytes=0), "kept": subject.flops("book_keeping", kept_bytes=1 << 50)}
        return flops | {"name": name, "length": length, "parameters": subject.parameters}

    def _products(self, traced: Sequence[dict[str, Any]]) -> Table:
        rows = []
        for row in traced:
            published = 6 * self.published_parameters[row["name"]] * row["length"]
            exact = 6 * row["parameters"] * row["length"]
            named = row["name"], row["length"], self.published_parameters[row["name"]], row["parameters"]
            rows.append((*named, published, exact, row["autodiff"], row["autodiff"] / exact))
        columns = ("model", "S", "M_published", "M", "6MS_published", "6MS", "products", "products_over_6MS")
        notes = ("6 M S counts the word table in every token; only masked tokens are decoded, and attention's products are not in it",)
        return Table("flops_of_an_example", columns, tuple(rows), "6 M S beside the products of a plain step", notes)

    def _shares(self, traced: Sequence[dict[str, Any]]) -> Table:
        rows = []
        for row in traced:
            clipping = CLIPPING_OPERATIONS * row["parameters"] / row["vmap"]
            noise = NOISE_OPERATIONS * row["parameters"] / self.batch_size / row["plain"]
            shares = (row[name] / row["plain"] - 1 for name in ("grams", "kept"))
            rows.append((row["name"], row["length"], clipping, *shares, noise))
        columns = ("model", "S", "clip_instantiated", "book_keeping_grams", "book_keeping_kept", "noise")
        notes = (
            "clip_instantiated: entry-wise operations on a per-example gradient over the products of its example; falls with S",
            "book_keeping: further products of the traced step over the plain step's; Grams grow with S, kept gradients do not",
            f"noise: entry-wise operations of one logical batch of {self.batch_size:,}, per example; draws are not counted",
        )
        return Table("clipping_and_noise", columns, tuple(rows), "what privacy adds, as a share of the plain step", notes)

    def _measured(self) -> Table:
        """Returns the fastest private step of every benchmark: its speed, and the share of time of clipping and of the update."""
        rows = []
        for path in sorted(Path(self.evidence).glob("*.json")):
            document = read_json(path)
            # Files of another kind do not contain steps: draws of noise, or the bytes of a restart.
            steps = [] if "kind" in document else document["rows"]
            private = [row for row in steps if row["clipping"] == "book_keeping" and row.get("update_seconds")]
            if not private:
                continue
            best = max(private, key=lambda row: row["examples_per_s"])
            clipping = None if best["ratio_to_plain"] is None else 1 - best["ratio_to_plain"]
            update = best["update_seconds"] / (best["update_seconds"] + self.batch_size / best["examples_per_s"])
            measured = best["examples_per_s"], best["model_flops_per_s"], clipping, update
            rows.append((best["model"], best["sequence_length"], best["physical_batch"], *measured))
        columns = ("model", "S", "physical_batch", "examples_per_s", "model_flops_per_s", "clipping_share", "update_share")
        notes = (
            f"update: reduction, noise and optimiser once per logical batch of {self.batch_size:,}; clipping: 1 - private over plain speed",
            f"from {self.evidence}/*.json; empty where none was written by the command in its README",
        )
        return Table("measured_shares", columns, tuple(rows), "what privacy takes of the measured time", notes)


def judged(rows: Sequence[Mapping[str, Any]]) -> Part:
    """Returns the verdict on gradients that are formed for each example, as the paper forms them; the cost of book-keeping is only
    reported."""
    pairs = [(one, two) for one, two in itertools.permutations(rows, 2) if one["model"] == two["model"] and one["S"] < two["S"]]
    falls = [(two["clip_instantiated"] + two["noise"], one["clip_instantiated"] + one["noise"]) for one, two in pairs]
    part = verdicts.ascending("the share of clipping and noise falls with the sequence length", falls)
    kept, grams = (sum(two[name] < one[name] for one, two in pairs) for name in ("book_keeping_kept", "book_keeping_grams"))
    words = f"Reported, not judged: of book-keeping with kept gradients {kept}, with Grams {grams} of {len(pairs)} fall"
    return Part(part.claim, f"{part.statistic}. {words}", part.state)
