"""Converts seconds of interleaved rounds to the rows of benchmark.json: rates, spreads, and ratios to the best baselines.

It imports no jax.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from dpx_papers.benchmark.setting import NON_PRIVATE

BASELINES = ("autodiff", "plain")
_GROUP = ("model", "sequence_length", "dtype", "mesh")


def rows(facts: Sequence[dict[str, Any]], seconds: Sequence[Sequence[float]], logical_batch: int) -> list[dict[str, Any]]:
    """Returns a row for every measured sum.

    A ratio is the median of the rounds' ratios, so that a machine slowed for a while slows both.

    Baselines are those of the row's own model, sequence, dtype and mesh, at the physical batch that is best for them; a peer that
    knows no mesh is compared with the single device it runs on.
    """
    timed = list(zip(facts, seconds, strict=True))
    updates = {(fact["mesh"], fact["is_private"]): statistics.median(times) for fact, times in timed if fact["kind"] == "update"}
    collectives = {(fact["mesh"], fact["is_private"]): fact["collectives"] for fact, _ in timed if fact["kind"] == "update"}
    sums = [(fact, times) for fact, times in timed if fact["kind"] == "sum"]
    rates = matrix_rates(facts, seconds)
    return [
        _row(fact, times, sums, updates, collectives, logical_batch) | _share(fact, times, rates, logical_batch) for fact, times in sums
    ]


def matrix_rates(facts: Sequence[dict[str, Any]], seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the FLOP/s of plain products on one device by compute type, the median over rounds."""
    timed = zip(facts, seconds, strict=True)
    return {fact["dtype"]: fact["flops"] / statistics.median(times) for fact, times in timed if fact["kind"] == "rate"}


def _share(fact: dict[str, Any], times: Sequence[float], rates: dict[str, float], logical_batch: int) -> dict[str, Any]:
    """Returns the rate of the model's own products over the rate that all devices' plain products reach together, if that was measured."""
    rate = rates.get(fact["dtype"])
    own = fact["model_flops"] * logical_batch / statistics.median(times)
    return {"share_of_matrix_rate": None if rate is None else own / (rate * fact["devices"])}


def _row(fact: dict[str, Any], times: Sequence[float], sums: Any, updates: Any, collectives: Any, logical_batch: int) -> dict[str, Any]:
    row = {name: value for name, value in fact.items() if name != "kind"}
    step = row["mesh"], row["clipping"] not in NON_PRIVATE
    row["collectives"] = _together(row["collectives"], collectives.get(step))
    rate = logical_batch / statistics.median(times)
    row["examples_per_s"] = rate
    row["examples_per_s_spread"] = [logical_batch / max(times), logical_batch / min(times)]
    row["update_seconds"] = None if fact["collectives"] is None else updates.get(step)
    peers = [(other, measured) for other, measured in sums if all(other[name] == fact[name] for name in _GROUP)]
    for name in BASELINES:
        row |= _ratio(name, times, [measured for other, measured in peers if other["clipping"] == name])
    plain = {other["physical_batch"]: other["matmul_flops"] for other, _ in peers if other["clipping"] == "plain"}
    beside = plain.get(row["physical_batch"])
    row["flops_ratio_to_plain"] = None if not beside or row["matmul_flops"] is None else row["matmul_flops"] / beside
    row["model_flops_per_s"] = row["model_flops"] * rate
    return row


def _ratio(name: str, times: Sequence[float], candidates: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the speed relative to the fastest of `candidates`, round by round."""
    if not candidates:
        return {f"ratio_to_{name}": None, f"ratio_to_{name}_spread": None}
    best = min(candidates, key=statistics.median)
    ratios = [base / own for base, own in zip(best, times, strict=True)]
    return {f"ratio_to_{name}": statistics.median(ratios), f"ratio_to_{name}_spread": [min(ratios), max(ratios)]}


def _together(sums: dict[str, Any] | None, update: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the collectives of a logical batch: those of its sums and those of its update."""
    if sums is None or update is None:
        return sums
    return {name: sums[name] + update[name] for name in ("per_logical_batch", "in_loops", "elements")}
