"""The privacy of the runs on a page, in one line for each kind of run."""

import json
from collections.abc import Sequence

from dpx.report.rows import Run

_NOT_COVERED = (
    "not in ε: the choice of settings by looking at runs on this text; not protected: public and held-out documents, and the figures on "
    "this page"
)
_ORDER = ("unit", "adjacency", "accountant", "delta", "declared_size")


def lines(runs: Sequence[Run]) -> list[str]:
    """Returns the privacy of the runs of one experiment; empty if none ran."""
    return list(dict.fromkeys(_line(run) for run in runs if "guarantee" in run.facts))


def epsilons(run: Run) -> dict[str, float]:
    """Returns the proved bounds by accountant, as text."""
    return {key.removeprefix("epsilon/"): float(value) for key, value in run.facts.items() if key.startswith("epsilon/")}


def _line(run: Run) -> str:
    facts = run.facts
    if facts["guarantee"] == "not_private":
        return "**not private**: no clipping and no noise; nothing is guaranteed."
    bound = ", ".join(f"{value:.4g} ({name})" for name, value in epsilons(run).items()) or "none"
    sampler, assumed = run.config.get("sampler", "?"), run.config.get("sampler.assumed", "null")
    unsupported = json.loads(facts.get("unsupported", "[]"))
    parts = [
        f"**{facts['guarantee']}**, ε = {bound}",
        "; ".join(f"{key.replace('_', ' ')} {facts[key]}" for key in _ORDER if key in facts),
        f"sampler assumed {sampler if assumed == 'null' else assumed}, used {sampler}",
        f"σ {float(facts['noise_multiplier']):.4g}" if "noise_multiplier" in facts else "",
        *[f"no guarantee because {reason}" for reason in json.loads(facts.get("reasons", "[]"))],
        *[f"not a bound: {one['name']} = {_number(one['value'])} ({one['reason']})" for one in unsupported],
        *[line for line in json.loads(facts.get("assumptions", "[]")) if "vocabulary" in line],
        _NOT_COVERED,
    ]
    return "; ".join(part for part in parts if part) + "."


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
