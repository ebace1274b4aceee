"""Audits canaries that were trained with a run: from its final state to a verdict.

The epsilon tested at a delta is the smallest one that the run's ledger proves there. `gaussian_dp` is left out if sampling makes
the privacy curve differ from a Gaussian one.

Canaries are scored by what was released alone: noisy gradients, and the final parameters. A sequence's score is minus its mean loss under
the final parameters; its exposure is log2 of the number of canaries that are out less log2 of its rank among them (Carlini et al. 2019), an
estimate without a finite-sample guarantee.

Shape legend: G gradient canaries, S sequences, M canaries of one kind, B rows of a batch.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from dpx.audit.canaries import CANARIES, Planted, WithCanaries, plant
from dpx.audit.verdict import judge
from dpx.claim.spent import Spent
from dpx.config.declared_audit import Canaries
from dpx.data.store import Store
from dpx.declaration import require
from dpx.files.records import to_json
from dpx.files.run_folder import write_json
from dpx.privacy import events, ledger
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.randomness import RootSecret

BATCH_ROWS = 64


def of_gradients(params: Any, gradients: int) -> Float[np.ndarray, " G"]:
    """Returns each gradient canary's inner product with the sum of all released gradients.

    It is minus the parameter that these gradients updated.
    """
    return -np.asarray(params[CANARIES]["table"], np.float64).ravel()[:gradients]


def of_sequences(objective: Any, params: Any, store: WithCanaries, planted: Planted, secret: RootSecret, masks: int) -> np.ndarray:
    """Returns minus each sequence's mean loss under `params` (the model's alone), over `masks` draws of what is masked, [S]."""
    losses = jax.jit(lambda params, rows, key: objective.losses(params, objective.batch(key, rows))[0])
    count = len(planted.tokens_ST)
    total_S = np.zeros(count)
    for start in range(0, count, BATCH_ROWS):
        # The last batch is filled up with sequences already scored, so that one shape is compiled.
        numbers = np.arange(start, start + BATCH_ROWS) % count
        rows = store.canary_rows(planted.gradients + numbers) | {"record": numbers.astype(np.int32)}
        rows.pop("canary")
        kept = min(BATCH_ROWS, count - start)
        for draw in range(masks):
            losses_B = np.asarray(losses(params, rows, secret.key("audit_mask", draw)))
            total_S[start : start + kept] -= losses_B[:kept]
    return total_S / masks


def exposures(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " n"]:
    """Returns the exposure of each canary that is in, against the canaries that are out: log2(n_out + 1) - log2(rank).

    Ties get the worse rank.
    """
    out = np.sort(scores_M[~is_in_M])
    require(len(out) > 0, "canaries", "every canary is in, so the other group is empty", "Use more canaries")
    rank = 1 + len(out) - np.searchsorted(out, scores_M[is_in_M], side="left")
    return np.log2(len(out) + 1) - np.log2(rank)


def area_under_curve(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> float:
    """Returns the probability that a canary that is in scores above one that is out; ties count half."""
    inside, out = scores_M[is_in_M], np.sort(scores_M[~is_in_M])
    below = (np.searchsorted(out, inside, side="left") + np.searchsorted(out, inside, side="right")) / 2
    return float(below.mean() / len(out))


VERDICT = "audit.json"
# Mean exposure of canaries that the run has not learnt: 1 / ln 2.
BY_CHANCE = 1.4427


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
    rows, is_in_M = WithCanaries(store, planted, audit, privacy), planted.is_in_M

    def conclude(params: Any) -> dict[str, Any]:
        """Scores the canaries by the final `params`, theirs included, judges, and writes `private/audit.json`."""
        scored: dict[str, Any] = {}
        if audit.gradients:
            scored["gradient"] = (of_gradients(params, audit.gradients), is_in_M[: audit.gradients])
        if audit.sequences:
            found_S = of_sequences(objective, params, rows, planted, secret, audit.masks)
            scored["loss"] = (found_S, is_in_M[audit.gradients :])
        # A fork keeps its parent's canaries; a run that starts from the weights of another run has its own canaries.
        segments = entered.segments_of_state()
        spent = Spent(accountant, privacy, segments)

        def claim(delta: float) -> float:
            known = [value for name in spent.accountants if (value := spent.epsilon(name, delta)) is not None]
            return min(known, default=math.inf)

        kinds = {type(events.event(release, privacy.adjacency, spent.accountants[0])).__name__ for release, _ in ledger.releases(segments)}
        verdict = judge(scored, claim, audit.primary, is_gaussian=kinds == {"GaussianDpEvent"})
        document = to_json(verdict) | {"canaries": {"gradients": audit.gradients, "sequences": audit.sequences}}
        document["in"] = {name: int(is_in_M.sum()) for name, (_, is_in_M) in scored.items()}
        if "loss" in scored:
            document["sequences_without_guarantee"] = power(*scored["loss"])
        document = finite(document)
        write_json(private / VERDICT, document)
        return document

    return rows, conclude


def power(scores_M: Any, is_in_M: Any) -> dict[str, float] | None:
    """Measures how well scores separate the sequences; the numbers are estimates, which decide nothing. `None` if all coins are equal."""
    if is_in_M.all() or not is_in_M.any():
        return None
    exposure = exposures(scores_M, is_in_M)
    metrics = {"auc": area_under_curve(scores_M, is_in_M), "exposure_mean": float(exposure.mean())}
    return metrics | {"exposure_max": float(exposure.max()), "exposure_mean_by_chance": BY_CHANCE}


def finite(document: Any) -> Any:
    """Returns the value, or `None` if it is not finite, since JSON has no infinity."""
    if isinstance(document, dict):
        return {name: finite(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
