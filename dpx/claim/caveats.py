"""Lists the limits of a statement: assumptions, what it does not cover, and the reasons why a run has no guarantee, whatever its noise."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dpx.claim.spent import RunFacts
from dpx.clipping import ClippingMethod
from dpx.config.declared_audit import Audit, Canaries
from dpx.data.declared_data import Data
from dpx.data.labelled import Table
from dpx.data.protected_units import vocabulary_source
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism
from dpx.models.trained import Trained
from dpx.privacy.declared_privacy import Privacy, UnitFacts, unlike
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Verdict
from dpx.sampler import Sampler

NOT_COVERED = (
    "a choice of hyperparameters, checkpoints or repeats that looks at the protected data: only this run's own steps are charged",
    "other runs on the same data: compose their ledgers (job=account with job.ledgers)",
    "documents of the public and held-out splits",
    "everything under private/: exact losses, norms, draws and logs depend on the data without noise",
    "timing, memory use and the number of microbatches, which depend on the draw",
    "a forged ledger, statement or config, or private/ and release/ rolled back together to an earlier state: the ledger's chain and "
    "the checksums of statement and config detect accidents only",
)

MARGIN_COVERS = (
    "floating point: the proof that no example contributes more than the clipping norm assumes the stated depths of accumulation, and "
    "that recomputed activations are rounded as they were the first time (see dpx.clipping.rounding)"
)
TWO_PASSES = (
    "clipping_method=ghost computes every gradient twice, once for its norm and once for the sum: that both are rounded alike within "
    "the margin is measured (see dpx.clipping.rounding), not proved"
)


def not_covered(mechanism: Mechanism, clipping_method: ClippingMethod, data: Data, privacy: Privacy) -> list[str]:
    """Returns the list of things that the guarantee does not cover."""
    rounded = [f"floating point: {mechanism.floating_point}", *([] if isinstance(mechanism, ForwardNoise) else [MARGIN_COVERS])]
    uncovered = [*NOT_COVERED, *mechanism.not_covered, *of_table(data), *rounded]
    if mechanism.clips_gradients and clipping_method.name == "ghost":
        uncovered.append(TWO_PASSES)
    if mechanism.is_private and privacy.adjacency == "add_remove":
        uncovered.append(
            f"a true number of {privacy.drawn}s above the declared {data.declared_size}: delta is checked against the declared number only"
        )
    return uncovered


def real_draws(data: Data, privacy: Privacy, counted: int) -> list[str]:
    """Returns one sentence, or none: how many rows or units the steps really draw, where N is public and declared as another number."""
    declared = data.declared_size or counted
    if privacy.adjacency == "add_remove" or counted == declared:
        return []
    per_step = f"a step draws {counted / declared:.4g} times the batch size on average"
    return [f"data.declared_size={declared}, and the text gives {counted} {privacy.drawn}s: {per_step}"]


# With fewer units, or a larger share of them in a step, noise for a small epsilon usually hides what there is to learn. A delta above
# this share of 1/N is close to publishing one unit. These are rules of thumb for a hint, and decide nothing.
_FEW_UNITS, _LARGE_Q, _LARGE_DELTA = 2000, 0.2, 0.25


def little_data(size: int, drawn: str, batch: int, delta: float) -> list[str]:
    """Returns a hint, one sentence or none, if there is so little data that the run will hardly learn or hardly protect.

    `size` is N, the number of rows or units (`drawn`, as a word) that a step draws from; `batch` is the largest expected batch size.
    """
    found, fixes = [], []
    if size < _FEW_UNITS:
        found.append(f"only {size:,} {drawn}s are protected")
        fixes.append("more text")
    if batch > _LARGE_Q * size:
        found.append(f"a step draws {batch / size:.0%} of the {drawn}s")
        # Neither a smaller batch (at the same steps and epsilon its noise is larger, relative to the batch) nor fewer steps, which a design
        # may have chosen, mends that there is little data.
        fixes.append("more text")
    if delta * size > _LARGE_DELTA:
        found.append(f"delta is {delta * size:.2g} of 1/N")
        fixes.append("a smaller privacy.delta")
    what = "the noise may be larger than the signal in the gradients" if fixes != ["a smaller privacy.delta"] else "the guarantee is weak"
    return [f"{' and '.join(found)}: {what}. Use {' or '.join(dict.fromkeys(fixes))}."] if found else []


def of_table(data: Data) -> list[str]:
    """Returns the limits of labelled data: rows that are read without protection, and text beyond the protected row."""
    source = data.source
    if not isinstance(source, Table):
        return []
    uncovered = [f"text beyond the row that is protected: {source.unit_note}"] if source.unit_note else []
    if data.test_split != "heldout":
        share = f"{data.heldout_fraction:g} of the training files' units"
        chosen = "every step that ran is charged, whichever checkpoint is chosen by them"
        uncovered.append(f"the dev rows ({share}), which are not trained on and not counted in N; {chosen}")
    if source.test_paths is None:
        return uncovered
    test_rows = {
        "dev": "rows of the test set, read once, after the last step (data.source.select=dev)",
        "test": "rows of the test set, which are held out: a choice made by them uses the test set (data.source.select=test)",
    }
    return [*uncovered, f"{test_rows[source.select]}, including its rows of units that also have protected rows"]


def assumptions(data: Data, privacy: Privacy, train: Trained, audit: Audit, manifest: Any, size: int, facts: RunFacts) -> list[str]:
    """Returns the assumptions of the guarantee, one sentence each.

    `manifest` describes the prepared data (`None` before they are prepared), `size` is N, and `facts` are those of the run's ledger.
    """
    counted = size if manifest is None or privacy.adjacency == "add_remove" else privacy.population(manifest)
    premises = _of_public_facts(data, privacy, manifest, size)
    # What one protected unit is.
    rows = {"one labelled text": bool(data.labels), "one pair of segments": data.pairs != "none"}
    rows["one prompt with its completion"] = getattr(data.source, "has_completions", False)
    for row, is_read in rows.items():
        if is_read and privacy.unit == "row":
            premises.append(f"one protected row is {row}: text that appears in several rows is protected in each row separately only")
    if data.copies > 1 and privacy.unit == "row":
        premises.append(
            f"a protected row stands with its copies, {data.copies} rows in all: a sentence that others hold is not protected as a whole"
        )
    if privacy.unit != "row" and privacy.unit_mode == "group" and privacy.adjacency != "add_remove":
        premises.append(
            f"the number of rows of each {privacy.unit} is public too: the neighbour has as many rows, with their content zeroed out"
        )
    if privacy.unit_mode == "one_row":
        premises.append(f"each drawn {privacy.unit} is read as one row, chosen by the {privacy.unit} and the number of the epoch alone")
    if not train.is_all:
        come = (
            "are copied from the weights that the run begins from (init)"
            if facts.beginning.of_weights
            else "were drawn at random, before any protected row was read"
        )
        premises.append(f"train={train.kind}: frozen parameters {come}")
    premises += facts.premises
    if facts.is_joint:
        renamed = (
            "a row is cut from the same text in each version of the data: moved text belongs to another row"
            if privacy.unit == "row"
            else f"each {privacy.unit} has one name: a renamed {privacy.unit} counts as another {privacy.unit}"
        )
        premises.append(f"in all data that charged steps drew from, {renamed}")
    if privacy.rows_per_example > 1:
        most = privacy.rows_per_unit_max
        premises.append(f"each whole {privacy.unit} is drawn and clipped: its gradient is the sum over its rows, at most {most}")
    if isinstance(audit, Canaries):
        places = audit.places(privacy)
        premises.append(f"{places} of the {size} {privacy.drawn}s are canaries, which hold no protected text")
    if counted and privacy.delta >= 1 / counted:
        premises.append(f"privacy.allow_large_delta: delta {privacy.delta} is not below 1/N = {1 / counted:.3g}")
    return premises


def _of_public_facts(data: Data, privacy: Privacy, manifest: Any, size: int) -> list[str]:
    """Returns the assumptions about what is public: the vocabulary, the size, the labels, the choices in the config."""
    sources = {
        "public_split": "the vocabulary is fitted on documents of the public split, which are not protected",
        "file": "the vocabulary file does not depend on the protected text",
        "protected": "the vocabulary was fitted on protected text",
    }
    size_known = {
        "zero_out": f"the number of {privacy.drawn}s ({size}) is public; the neighbour has one unit's content zeroed out",
        "zero_out_text": f"the number of {privacy.drawn}s ({size}) is public; the neighbour has one unit's text blanked, which then "
        "contributes zero wherever it is read, and the same label in the same place",
        "add_remove": f"the declared number of {privacy.drawn}s ({size}) is public and does not depend on the data",
        "replace_one": f"the number of {privacy.drawn}s ({size}) is public; the neighbour has one unit replaced",
    }
    premises = [sources[vocabulary_source(data.vocabulary, manifest)], size_known[privacy.adjacency]]
    if isinstance(data.source, Table) and data.source.target_field is not None:
        premises.append("the mean and the scale of the target were declared without looking at the protected rows")
    elif data.labels and not data.learns_labels:
        premises.append(f"the list of {len(data.labels)} labels was declared without looking at the protected rows")
    if data.heldout_by == "first":
        share = f"the first {data.heldout_fraction:g} of the documents, in the order of the files, are held out"
        premises.append(f"{share} (data.heldout_by=first); their order and their number are public")
    premises.append("every choice made in this config was made without looking at the protected text")
    premises.append("the root secret stays in private/ and is not given away with the model")
    return premises


AuditState = Literal["pending", "passes", "fails"]


def reasons_against(data: Data, privacy: Privacy, sampler: Sampler, seed: int | None, of_mechanism: list[str], manifest: Any) -> list[str]:
    """Returns the reasons why the run has no guarantee, whatever its noise; `of_mechanism` are `Claim.reasons_of_mechanism`."""
    checks: list[tuple[bool, str]] = [
        (seed is not None, "fixed_seed: the noise can be recomputed from the config"),
        (vocabulary_source(data.vocabulary, manifest) == "protected", "vocabulary: fitted on protected text without noise"),
        (data.learns_labels, "labels: the list of labels was learnt from the protected rows (data.source.labels=null)"),
        (
            data.pairs == "cross_document" and privacy.unit != "row",
            f"pairs: data.pairs=cross_document puts text of one {privacy.unit} into rows of another",
        ),
        (
            sampler.depends_on_size and manifest is not None and data.declared_size not in (None, privacy.population(manifest)),
            f"sampler: {sampler.name} is accounted at data.declared_size={data.declared_size}, not the true number of {privacy.drawn}s",
        ),
        (
            bool(privacy.assumed),
            f"assumed: the values of {', '.join(privacy.assumed)} are not known (privacy.assumed)",
        ),
    ]
    return [reason for holds, reason in checks if holds] + of_mechanism


def refuted(verdict: Verdict | None) -> list[str]:
    """Returns the reason against the claim that the run's own audit proved."""
    bounds = [] if verdict is None else [bound for bound in (verdict.primary, *verdict.others) if bound.refutes]
    return [
        f"audit: a lower bound of {bound.epsilon:.3f} at delta {bound.delta:.3g} ({bound.estimator}, {bound.score}) "
        f"exceeds the claim of {bound.claim:.3f}"
        for bound in bounds[:1]
    ]


def state_after(verdict: Verdict | None) -> AuditState:
    """Returns the state of an audit with the verdict `verdict`, or without a verdict yet."""
    return "pending" if verdict is None else "fails" if refuted(verdict) else "passes"


def chosen_late(entered: Ledger | None) -> list[str]:
    """Returns the reasons why a composition is not proved: parts of the plan that were chosen after results had been seen."""
    return late_choices(entered.chosen_after_results if entered is not None else [])


def late_choices(names: list[str]) -> list[str]:
    """Returns the reasons of `chosen_late` for the settings `names`."""
    why = "the composition of releases that are chosen after results is proved only under a budget declared beforehand (Rogers et al. 2016)"
    return [f"plan: {', '.join(names)} changed after results had been seen, by a fork or with the data; {why}"] if names else []


def of_a_trial(charges: Iterable[str]) -> str:
    """Returns the reasons why a run that begins from a trial has no guarantee.

    `charges` are those of the searches that contain the trial.
    """
    named = ", ".join(f"tune.charge={charge}" for charge in dict.fromkeys(charges))
    return f"it is one trial of a search ({named}), and its ledger does not include the choice among the trials"


def unlike_units(units: Sequence[UnitFacts | None], is_charged: bool) -> list[str]:
    """Returns the reason, or none, why the costs of steps under these records of their units do not add up.

    Charged steps without a record protect an unknown unit.
    """
    differing = "; ".join(unlike(units) if units or is_charged else ())
    reason = "units: the costs of steps can be composed for one unit only, and these steps may protect different units"
    return [f"{reason}: {differing}"] if differing else []


def seeded(entered: Ledger | None) -> list[str]:
    """Returns the reason why a run has no guarantee if its ledger shows noise from a seed, whatever its config says now."""
    is_seeded = entered is not None and any(epoch.secret_place is None for epoch in entered.noise_epochs)
    return ["fixed_seed: noise of this run was drawn from a seed of its config"] if is_seeded else []
