"""Compares 6 M S with the products of traced programs, and measures what clipping and noise add (McKenna et al. 2025, appendix B.3)."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx_papers.analysis import Made
from dpx_papers.benchmark.tables import measurements
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import of_positive
from dpx_papers.report.shape import Part

# An instantiated gradient of d numbers: square and add for its norm, scale and add for the sum.
CLIPPING_OPERATIONS = 4
# Noise scaled and added, the sum divided; draws are not counted.
NOISE_OPERATIONS = 3


@of_positive
def mckenna_flops_model(
    published_parameters: Mapping[str, float],
    sequence_lengths: Sequence[int],
    physical_batch: int,
    batch_size: int,
    vocabulary_size: int,
    evidence: str,
) -> Made:
    """Traces programs without running them, and reads measurements.

    Attributes:
        published_parameters: Parameters of Table 4, by model option.
        sequence_lengths: Tokens of a row.
        physical_batch: Examples that a device holds.
        batch_size: Examples of a step.
        vocabulary_size: Rows of the word table.
        evidence: Folder with benchmark.json files, if any.
    """
    from dpx.config import recipes
    from dpx_papers.benchmark.traced import Traced

    products, shares = [], []
    for (name, published), length in itertools.product(published_parameters.items(), sequence_lengths):
        subject = Traced.trace(recipes.option("model", name), length, vocabulary_size, physical_batch)
        plain, instantiated, per_example = (subject.flops(variant) for variant in ("plain", "autodiff", "vmap"))
        exact = 6 * subject.parameters * length
        row = {"model": name, "S": length, "M_published": published, "M": subject.parameters, "6MS_published": 6 * published * length}
        products.append(row | {"6MS": exact, "products": instantiated, "products_over_6MS": instantiated / exact})
        row = {"model": name, "S": length, "clip_instantiated": CLIPPING_OPERATIONS * subject.parameters / per_example}
        for kind, kept in (("grams", 0), ("kept", 1 << 50)):
            row[f"book_keeping_{kind}"] = subject.flops("book_keeping", kept_bytes=kept) / plain - 1
        shares.append(row | {"noise": NOISE_OPERATIONS * subject.parameters / batch_size / plain})
    tables = {"flops_of_an_example": products, "clipping_and_noise": shares, "measured_shares": measured_shares(Path(evidence), batch_size)}
    return tables | {"verdicts": [judged(shares)]}


def measured_shares(evidence: Path, batch_size: int) -> list[dict[str, Any]]:
    """Returns the fastest private step of every benchmark: its speed, and the share of time of clipping and of the update."""
    rows = []
    for _, document in measurements(evidence):
        steps = [] if "kind" in document else document["rows"]
        private = [row for row in steps if row["clipping"] == "book_keeping" and row.get("update_seconds")]
        if not private:
            continue
        best = max(private, key=lambda row: row["examples_per_s"])
        named = {"S": best["sequence_length"]} | {name: best[name] for name in ("physical_batch", "examples_per_s", "model_flops_per_s")}
        clipping = None if best["ratio_to_plain"] is None else 1 - best["ratio_to_plain"]
        update = best["update_seconds"] / (best["update_seconds"] + batch_size / best["examples_per_s"])
        rows.append({"model": best["model"]} | named | {"clipping_share": clipping, "update_share": update})
    return rows


def judged(rows: Sequence[Mapping[str, Any]]) -> Part:
    """Returns the verdict on gradients that are formed for each example, as the paper forms them; the cost of book-keeping is only
    reported."""
    pairs = [(one, two) for one, two in itertools.permutations(rows, 2) if one["model"] == two["model"] and one["S"] < two["S"]]
    falls = [(two["clip_instantiated"] + two["noise"], one["clip_instantiated"] + one["noise"]) for one, two in pairs]
    part = verdicts.ascending("the share of clipping and noise falls with the sequence length", falls)
    kept, grams = (sum(two[name] < one[name] for one, two in pairs) for name in ("book_keeping_kept", "book_keeping_grams"))
    words = f"Reported, not judged: of book-keeping with kept gradients {kept}, with Grams {grams} of {len(pairs)} fall"
    return Part(part.claim, f"{part.statistic}. {words}", part.state)
