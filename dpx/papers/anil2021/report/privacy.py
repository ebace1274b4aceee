"""Section (f) of the paper's file: what an honest report must say, for the paper and for each of our results."""

import json
from collections.abc import Sequence

from dpx.report.rows import Run

OF_THE_PAPER = (
    "**Unit.** One packed pair of 128 tokens, add/remove; not a document, an author or a user. The same text can be in several units: "
    "346M examples against 389M sentences.",
    "**Sampler.** The text draws a prespecified number of examples; the published ε is for Poisson draws, which is another mechanism. "
    "For fixed-size draws at the same σ what can be proved here is 5.91 at batch 32,768 and 11.6 at 2,097,152 if a record is emptied; "
    "40 if it is replaced.",
    "**Not charged.** 30 tuning trials, and every choice of ε, batch size and schedule, used the same private data and are not in ε.",
    "**Tokenizer.** The paper's vocabulary was learnt from the corpus; ours from a public split that no claim covers.",
    "**δ** = 1/n, above what is usually asked for. RDP is loose: at the same σ a PLD accountant gives ε from 4.4 to 5.1.",
    "**The corpora are public**, so privacy is demonstrated, not needed. 70 % and 60.5 % are not compute-matched: 1.3 epochs against 121.",
    "**No seeds, no error bars**, no memorisation test and no downstream result are published.",
    "**Pictures.** A value read from a picture would be an estimate, marked as such; without a digitisation it is left blank here.",
)
OF_OURS = (
    "Accuracy, norms and SNR of our runs depend on the training text without noise. They are shown because that text is public; "
    "no ε covers them.",
    "Each laptop run is charged for its own steps alone. All runs here used the same text and were looked at, so a joint claim would "
    "have to charge all of them together.",
    "Laptop learning rates, weight decays and batch sizes were chosen by looking at runs on the same text: not charged.",
)
_NOT_IN_EPSILON = (
    "not in ε: settings chosen by looking at runs on this text; not protected: its public and held-out documents, and the figures here"
)
_ORDER = ("unit", "adjacency", "accountant", "delta", "declared_size")


def statement(runs: Sequence[Run]) -> list[str]:
    """The privacy lines of the runs of one experiment, each kind of run once; empty where none ran."""
    lines = [_line(run) for run in runs if "guarantee" in run.facts]
    return list(dict.fromkeys(lines))


def _line(run: Run) -> str:
    facts = run.facts
    if facts["guarantee"] == "not_private":
        return "**not private**: no clipping and no noise; nothing is guaranteed."
    epsilons = {key.removeprefix("epsilon/"): float(value) for key, value in facts.items() if key.startswith("epsilon/")}
    bound = ", ".join(f"{value:.4g} ({name})" for name, value in epsilons.items()) or "none"
    told = "; ".join(f"{key.replace('_', ' ')} {facts[key]}" for key in _ORDER if key in facts)
    sampler = run.config.get("sampler", "?")
    parts = [
        f"**{facts['guarantee']}**, ε = {bound}",
        told,
        f"sampler assumed Poisson, used {sampler}",
        f"σ {float(facts['noise_multiplier']):.4g}" if "noise_multiplier" in facts else "",
        *[f"no guarantee because {reason}" for reason in json.loads(facts.get("reasons", "[]"))],
        *[f"not a bound: {one['name']} = {_number(one['value'])} ({one['reason']})" for one in json.loads(facts.get("unsupported", "[]"))],
        *_tokenizer(facts),
        _NOT_IN_EPSILON,
    ]
    return "; ".join(part for part in parts if part) + "."


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"


def _tokenizer(facts: dict[str, str]) -> list[str]:
    return [line for line in json.loads(facts.get("assumptions", "[]")) if "vocabulary" in line]
