"""The privacy of the runs and chains on a page, in one line for each kind."""

import json
from collections.abc import Mapping, Sequence

from dpx.pages.page_document import escaped
from dpx.pages.read_runs import KIND, Run, is_of_chain
from dpx.statement.outside_code import heading

# An epsilon above this bounds no odds that matter.
LARGE = 100.0
_NOT_COVERED = (
    "not in ε: the choice of settings by looking at runs on this text; not protected: public and held-out documents, and the figures on "
    "this page"
)
_ORDER = ("unit", "adjacency", "accountant", "delta", "declared_size")


def lines(runs: Sequence[Run]) -> list[str]:
    """Returns the privacy of the runs of one experiment; empty if none ran."""
    return list(dict.fromkeys(_line(run) for run in runs if "guarantee" in run.facts))


def epsilons(facts: Mapping[str, str], stage: str = "") -> dict[str, float]:
    """Returns the proved bounds by accountant; those of a stage of a chain by its label and a slash."""
    start = f"{stage}epsilon/"
    return {key.removeprefix(start): float(value) for key, value in facts.items() if key.startswith(start)}


def bounds(facts: Mapping[str, str], stage: str = "") -> str:
    """Returns the proved bounds as text, empty without any. A large bound of a chain has a note."""
    note = ", which limits nothing" * (facts.get("kind") == KIND)
    return ", ".join(f"{value:.4g} ({escaped(name)}{note * (value > LARGE)})" for name, value in epsilons(facts, stage).items())


def _line(run: Run) -> str:
    facts, is_chain = run.facts, is_of_chain(run)
    if facts["guarantee"] == "not_private" and not is_chain:
        return "**not private**: no clipping and no noise; nothing is guaranteed."
    bound = bounds(facts) or ("" if is_chain else "none")
    unsupported = [(one["name"], one["value"], one["reason"]) for one in json.loads(facts.get("unsupported", "[]"))]
    parts = [
        f"**{escaped(facts['guarantee'])}**{' for the chain as a whole' * is_chain}" + f", ε = {bound}" * bool(bound),
        *[f"protects {escaped(one)}" for one in json.loads(facts.get("protects", "[]"))],
        *([] if is_chain else _settings(run)),
        *[f"no guarantee because {escaped(reason)}" for reason in json.loads(facts.get("reasons", "[]"))],
        *[
            f"{escaped(heading(name, facts['guarantee']))}: {'infinite' if value is None else f'{value:.4g}'} ({escaped(reason)})"
            for name, value, reason in unsupported
        ],
        *[escaped(line) for line in json.loads(facts.get("assumptions", "[]")) if "vocabulary" in line],
    ]
    if not is_chain:
        parts.append(_NOT_COVERED)
    elif facts.get("sealed") != "yes":
        parts.append("`chain.json` is a copy, whose seal is not here; the statements of its stages are sealed")
    return "; ".join(part for part in parts if part) + "."


def _settings(run: Run) -> list[str]:
    facts, sampler, assumed = run.facts, run.config.get("sampler", "?"), run.config.get("sampler.assumed", "null")
    return [
        "; ".join(f"{key.replace('_', ' ')} {escaped(facts[key])}" for key in _ORDER if key in facts),
        f"sampler assumed {escaped(sampler if assumed == 'null' else assumed)}, used {escaped(sampler)}",
        f"σ {float(facts['noise_multiplier']):.4g}" if "noise_multiplier" in facts else "",
    ]
