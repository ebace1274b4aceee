"""What an audit proved, as a ledger keeps it: lower bounds on epsilon beside the claim."""

import dataclasses
from typing import Any

from dpx.records import described, from_json, record


@record
class LowerBound:
    """A lower bound on epsilon beside the claim at the same delta; infinite values are null."""

    score: str = described("What the canaries were scored by.")
    estimator: str = described("How the bound follows from the guesses.")
    guesses: int = described("Number of canaries that were guessed to be in or out.")
    correct: int = described("Number of guesses that were right.")
    delta: float = described("Delta of the bound and of the claim.")
    error: float | None = described("Probability that the bound is wrong; null of an estimate, which proves nothing.")
    epsilon: float | None = described("The lower bound itself.")
    claim: float | None = described("Epsilon that is claimed at this delta.")
    guarantee: bool = described("Whether the bound holds for this number of guesses; if not, it decides nothing.")
    refutes: bool = described("Whether the bound exceeds the claim, so that the claim is false.")


@record
class Verdict:
    """The bounds of an audit that decide; it passes if none refutes the claim."""

    passes: bool = described("Whether no bound exceeds the claim.")
    primary: LowerBound = described("The bound that was declared beforehand.")
    others: tuple[LowerBound, ...] = described("All other bounds, which share one small probability of error.")


def decisive(document: dict[str, Any]) -> Verdict:
    """The bounds that decide, of everything that an audit found (`dpx.audit.in_run`)."""
    return from_json(Verdict, {field.name: document[field.name] for field in dataclasses.fields(Verdict)}, "audit")
