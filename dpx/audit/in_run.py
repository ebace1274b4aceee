"""Audits canaries that were trained with a run: from its final state to a verdict.

The epsilon tested at a delta is the smallest one that the run's ledger proves there. `gaussian_dp` is left out if sampling makes
the privacy curve differ from a Gaussian one.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dpx.audit import scores
from dpx.audit.canaries import Planted, WithCanaries, plant
from dpx.audit.declarations import Canaries
from dpx.audit.verdict import judge
from dpx.claim.spent import Spent
from dpx.data.store import Store
from dpx.privacy import events, ledger
from dpx.privacy.declarations import Accountant, Privacy
from dpx.privacy.ledger import Ledger, NoiseEpoch
from dpx.randomness import RootSecret
from dpx.run_folder import write_json

VERDICT = "audit.json"
# Mean exposure of canaries that the run has not learnt: 1 / ln 2.
BY_CHANCE = 1.4427


class Audited(NamedTuple):
    """A run with canaries: the model's objective, the rows with the canaries `planted` among them, and the run's secret."""

    objective: Any
    store: WithCanaries
    planted: Planted
    secret: RootSecret


def begun(
    private: Path,
    audit: Canaries,
    accountant: Accountant,
    privacy: Privacy,
    entered: Ledger,
    objective: Any,
    store: Store,
    secret: RootSecret,
    noise_epoch: NoiseEpoch,
    is_fork: bool,
) -> tuple[WithCanaries, Callable[[Any], dict[str, Any]]]:
    """Returns the rows with the canaries of a run among them, and the function that makes its verdict from the final parameters."""
    # With another secret the coins would differ from the coins that past steps used.
    is_first = noise_epoch == entered.noise_epochs[0] or next(entered.entries(), None) is None
    planted = plant(private, audit, store.manifest, secret if is_first and not is_fork else None)
    rows = WithCanaries(store, planted, audit, privacy)
    return rows, partial(conclude, private, audit, accountant, privacy, entered, Audited(objective, rows, planted, secret))


def conclude(
    private: Path,
    audit: Canaries,
    accountant: Accountant,
    privacy: Privacy,
    entered: Ledger,
    audited: Audited,
    params: Any,
) -> dict[str, Any]:
    """Scores the canaries of a finished run, judges, and writes `private/audit.json`; `params` are the final ones, canaries included."""
    scored: dict[str, Any] = {}
    is_in_M = audited.planted.is_in_M
    if audit.gradients:
        scored["gradient"] = (scores.of_gradients(params, audit.gradients), is_in_M[: audit.gradients])
    if audit.sequences:
        found_S = scores.of_sequences(audited.objective, params, *audited[1:], audit.masks)
        scored["loss"] = (found_S, is_in_M[audit.gradients :])
    # A fork keeps its parent's canaries; a run that starts from the weights of another run has its own canaries.
    segments = entered.segments_of_state()
    spent = Spent(accountant, privacy, segments)

    def claim(delta: float) -> float:
        known = [value for name in spent.accountants if (value := spent.epsilon(name, delta)) is not None]
        return min(known, default=math.inf)

    kinds = {type(events.event(release, privacy.adjacency, spent.accountants[0])).__name__ for release, _ in ledger.releases(segments)}
    verdict = judge(scored, claim, audit.primary, is_gaussian=kinds == {"GaussianDpEvent"})
    document = verdict.as_json() | {"canaries": {"gradients": audit.gradients, "sequences": audit.sequences}}
    document["in"] = {name: int(is_in_M.sum()) for name, (_, is_in_M) in scored.items()}
    if "loss" in scored:
        document["sequences_without_guarantee"] = power(*scored["loss"])
    document = finite(document)
    write_json(private / VERDICT, document)
    return document


def power(scores_M: Any, is_in_M: Any) -> dict[str, float] | None:
    """Measures how well scores separate the sequences; the numbers are estimates, which decide nothing. `None` if all coins are equal."""
    if is_in_M.all() or not is_in_M.any():
        return None
    exposure = scores.exposures(scores_M, is_in_M)
    metrics = {"auc": scores.area_under_curve(scores_M, is_in_M), "exposure_mean": float(exposure.mean())}
    return metrics | {"exposure_max": float(exposure.max()), "exposure_mean_by_chance": BY_CHANCE}


def finite(document: Any) -> Any:
    """Returns the value, or `None` if it is not finite, since JSON has no infinity."""
    if isinstance(document, dict):
        return {name: finite(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
