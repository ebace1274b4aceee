"""Gives, in one table, the dp-accounting event of a noisy release for each neighbouring relation and accountant.

Every number that this module returns is relative to the sensitivity that the accountant assumes. The clipped sum has sensitivity C under
`zero_out` and `add_remove`, and 2C under `replace_one`; dp-accounting's PLD doubles by itself, its RDP does not.

An event is written as JSON, so that epsilon can be composed again from a ledger or a statement alone.

A run does the same whatever relation is declared: the relation only changes which other data its outputs are compared with. So steps that
ran under one relation have a bound under another if their proof does not use the first, and the table of events has a cell for the second.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, Literal

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event
from scipy.stats import binom

from dpx.declaration import ConfigError, declaration, require
from dpx.privacy import allocation
from dpx.privacy.allocation import RandomAllocationGaussianDpEvent
from dpx.privacy.gaussian_losses import RevealedGaussianDpEvent
from dpx.privacy.segments import Segment, Segments, is_forward, rows_clipped_apart

# Events that dp-accounting does not have.
_OWN = {kind.__name__: kind for kind in (RevealedGaussianDpEvent, RandomAllocationGaussianDpEvent)}


def describe(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns a dp-accounting event as plain data: its class under `class`, its arguments by name."""
    named = event.to_named_tuple()
    described: dict[str, Any] = {"class": named.class_name}
    for name in named._fields:
        if name not in ("module_name", "class_name"):
            described[name] = _described(getattr(event, name))
    return described


def restore(described: dict[str, Any]) -> dp_accounting.DpEvent:
    """Returns the event that `describe` was given. Raises `ConfigError` for a class that is not an event of dp-accounting or of dpx."""
    named = str(described.get("class"))
    kind = _OWN.get(named) or getattr(dp_event, named, None)
    if not isinstance(kind, type) or not issubclass(kind, dp_accounting.DpEvent):
        raise ConfigError(
            f"event={described.get('class')}", "is not an event of dp-accounting", "Restore the file, or use the version that wrote it"
        )
    return kind(**{name: _restored(value) for name, value in described.items() if name != "class"})


def as_text(event: dp_accounting.DpEvent, adjacency: str) -> str:
    """Returns `event` and its neighbouring relation `adjacency` as text, in the form that a ledger holds."""
    return json.dumps({"adjacency": adjacency, "event": describe(event)}, sort_keys=True)


def from_text(text: str, adjacency: str) -> dp_accounting.DpEvent:
    """Returns the event that `as_text` was given. Raises `ConfigError` if it was stored with another neighbouring relation."""
    held = json.loads(text)
    if held["adjacency"] != adjacency:
        reason = f"the package defines the event in the ledger for {held['adjacency']} only"
        raise ConfigError(f"adjacency={adjacency}", reason, f"Use {held['adjacency']}")
    return restore(held["event"])


def _described(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return describe(value)
    return [_described(item) for item in value] if isinstance(value, (list, tuple)) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return restore(value)
    # dp-accounting's events are cached by their values, so the values must be hashable.
    return tuple(_restored(item) for item in value) if isinstance(value, list) else value


_LARGEST_NOISE = 3.4028234e38

Kind = Literal[
    "poisson",
    "gaussian",
    "truncated_poisson",
    "fixed_size",
    "group",
    "shuffled",
    "deterministic",
    "balls_in_bins",
    "random_allocation",
    "slot_revealed",
    "package",
]
ACCOUNTANTS = ("pld", "rdp", "deterministic")

RELATION = {
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    # The text of a unit is blanked, and contributes zero wherever it is read; its label and its presence stay, and are not protected.
    "zero_out_text": NeighboringRelation.REPLACE_SPECIAL,
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


@declaration
class Release:
    """One noisy release, in the form that an accountant needs.

    `noise_multiplier` is the noise's standard deviation over the clipping norm C of one row. In `kind` "gaussian" every unit takes part
    with certainty; "shuffled", "deterministic" and "balls_in_bins" are one whole epoch, and so is "random_allocation", of
    1 / `sampling_probability` steps, in exactly one of which a unit takes part (`dpx.privacy.allocation`). "group" is Poisson over rows of
    which one unit owns at most `rows_per_unit`; "slot_revealed" one draw of rows whose noisy vectors are released one by one, so everyone
    sees who takes part (`dpx.privacy.gaussian_losses`). `size`, `cap` and `sample_size` count rows, for the kinds that depend on them.
    `is_discrete`: sum and noise lie on a grid of integers. "package": `event` is the whole release, sampling included, as an external
    package defined it (`dpx.privacy.events`); the noise multiplier then only sets how fine the grid of the composition is.
    """

    noise_multiplier: float
    sampling_probability: float = 1.0
    kind: Kind = "poisson"
    size: int | None = None
    cap: int | None = None
    sample_size: int | None = None
    rows_per_unit: int = 1
    is_discrete: bool = False
    # The noise of such an event is never solved for; left out of the repr, so that stored solutions keep their names.
    event: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        require(
            0 < self.noise_multiplier < float("inf"),
            f"noise_multiplier={self.noise_multiplier}",
            "private training needs a positive, finite noise multiplier",
            "Give a value above 0",
        )
        require(
            self.noise_multiplier <= _LARGEST_NOISE,
            f"noise_multiplier={self.noise_multiplier:g}",
            "is larger than the largest number of float32, in which noise is drawn",
            f"Give {_LARGEST_NOISE:g} or less",
        )
        require(
            0 < self.sampling_probability <= 1,
            f"q={self.sampling_probability}",
            "a sampling probability lies in (0, 1]",
            "Use a batch size of at most N",
        )


Event = dp_accounting.DpEvent
Build = Callable[[Release], Event]


def _gaussian(release: Release) -> Event:
    return dp_accounting.GaussianDpEvent(float(release.noise_multiplier))


def _gaussian_twice(release: Release) -> Event:
    return dp_accounting.GaussianDpEvent(release.noise_multiplier / 2)


def _group_gaussian(factor: float) -> Build:
    return lambda release: dp_accounting.GaussianDpEvent(release.noise_multiplier / (factor * release.rows_per_unit))


def _poisson(release: Release) -> Event:
    if release.sampling_probability == 1:
        return _gaussian(release)
    return dp_accounting.PoissonSampledDpEvent(release.sampling_probability, _gaussian(release))


def _truncated(release: Release) -> Event:
    if release.size is None or release.cap is None:
        raise ConfigError("truncated_poisson", "the event of this sampler needs N and the cap", "Give both")
    return dp_accounting.TruncatedSubsampledGaussianDpEvent(
        dataset_size=release.size,
        sampling_probability=release.sampling_probability,
        truncated_batch_size=release.cap,
        noise_multiplier=release.noise_multiplier,
    )


def _without_replacement(release: Release) -> Event:
    if release.size is None or release.sample_size is None:
        raise ConfigError("fixed_size", "the event of this sampler needs N and the batch size", "Give both")
    return dp_accounting.SampledWithoutReplacementDpEvent(release.size, release.sample_size, _gaussian_twice(release))


def _allocated(release: Release) -> Event:
    steps = round(1 / release.sampling_probability)
    require(
        math.isclose(steps * release.sampling_probability, 1, rel_tol=1e-9),
        f"sampler=random_allocation, q={release.sampling_probability:g}",
        "1/q is not a whole number of steps",
        "Give one over the number of steps of an epoch",
    )
    # Of noise whose losses are not computed as an allocation: as if the unit's place were told, which never lowers epsilon.
    is_told = steps == 1 or not allocation.SMALLEST <= release.noise_multiplier <= allocation.LARGEST
    return _gaussian(release) if is_told else RandomAllocationGaussianDpEvent(steps, float(release.noise_multiplier))


def _revealed(release: Release) -> Event:
    if release.sampling_probability == 1:
        return _gaussian(release)
    return RevealedGaussianDpEvent(float(release.sampling_probability), float(release.noise_multiplier))


def _mixture(release: Release) -> Event:
    """Returns the event of a unit of k rows, which adds Binomial(k, q) clipped rows; in the worst case all are equal (arXiv 2310.15526)."""
    k, q = release.rows_per_unit, release.sampling_probability
    if q == 1:
        return dp_accounting.GaussianDpEvent(release.noise_multiplier / k)
    weights = binom.pmf(range(k), k, q)
    likely = [j for j in range(k) if weights[j] > 1e-30]
    # Counts of negligible probability are charged as if the whole unit were drawn, which never lowers epsilon.
    rest = max(1 - math.fsum(weights[likely]), float(binom.pmf(k, k, q)))
    counts, chances = [*likely, k], [*weights[likely], rest]
    total = math.fsum(chances)
    return dp_event.MixtureOfGaussiansDpEvent(
        release.noise_multiplier, tuple(float(j) for j in counts), tuple(float(w / total) for w in chances)
    )


_USE_PLD = "Use accountant=pld"
_USE_ZERO_OUT = "Use privacy.adjacency=zero_out"

# A cell holds the function that builds the event, or (reason, fix) if no event is known.
Cell = Build | tuple[str, str]
_HIDES_SIZE = ("the event of truncated Poisson sampling depends on N, which this relation protects", _USE_ZERO_OUT)
_ONLY_ZERO_OUT = ("the event of truncated Poisson sampling is proved under zero_out only", _USE_ZERO_OUT)
_ONLY_REPLACED = ("fixed-size batches have privacy amplification under replace_one only", "Use privacy.adjacency=replace_one")
_NO_LOSSES = ("dpx knows no privacy loss distribution for fixed-size batches", "Use accountant=rdp")
_SHOWS_SIZE = ("a fixed batch size reveals N", "Use privacy.adjacency=replace_one")
_NO_MIXTURE = ("Renyi accounting has no mixture event for units of several rows", _USE_PLD)
_NOT_ALLOCATED = (
    "random allocation is proved for units whose gradient is in one neighbour only",
    "Use accountant=deterministic, which claims no amplification, or privacy.adjacency=zero_out",
)
_NOT_REPLACED = ("the mixture event is not proved for replaced units", _USE_ZERO_OUT)
# By sampling and relation: the cells of pld and of rdp.
_SAMPLED: dict[tuple[str, str], tuple[Cell, Cell]] = {
    ("poisson", "zero_out"): (_poisson, _poisson),
    ("poisson", "add_remove"): (_poisson, _poisson),
    ("poisson", "replace_one"): (_poisson, ("Renyi accounting has no Poisson bound for replaced units", _USE_PLD)),
    ("truncated_poisson", "zero_out"): (_truncated, ("Renyi accounting has no event for truncated Poisson sampling", _USE_PLD)),
    ("truncated_poisson", "add_remove"): (_HIDES_SIZE, _HIDES_SIZE),
    ("truncated_poisson", "replace_one"): (_ONLY_ZERO_OUT, _ONLY_ZERO_OUT),
    ("fixed_size", "zero_out"): (_ONLY_REPLACED, _ONLY_REPLACED),
    ("fixed_size", "add_remove"): (_SHOWS_SIZE, _SHOWS_SIZE),
    ("fixed_size", "replace_one"): (_NO_LOSSES, _without_replacement),
    ("random_allocation", "zero_out"): (_allocated, _allocated),
    ("random_allocation", "add_remove"): (_allocated, _allocated),
    ("random_allocation", "replace_one"): (_NOT_ALLOCATED, _NOT_ALLOCATED),
    ("group", "zero_out"): (_mixture, _NO_MIXTURE),
    ("group", "add_remove"): (_mixture, _NO_MIXTURE),
    ("group", "replace_one"): (_NOT_REPLACED, _NOT_REPLACED),
}
TABLE: dict[tuple[str, str, str], Cell] = {
    (kind, adjacency, accountant): cell
    for (kind, adjacency), cells in _SAMPLED.items()
    for accountant, cell in zip(("pld", "rdp"), cells, strict=True)
}

# Here every unit takes part once, with certainty.
for _kind in ("gaussian", "shuffled", "deterministic", "balls_in_bins"):
    for _accountant in ACCOUNTANTS:
        TABLE[(_kind, "zero_out", _accountant)] = TABLE[(_kind, "add_remove", _accountant)] = _gaussian
        # RDP's event and the closed form do not know that a replaced unit moves the sum by 2C; PLD's does.
        TABLE[(_kind, "replace_one", _accountant)] = _gaussian if _accountant == "pld" else _gaussian_twice
        if _kind in ("shuffled", "deterministic"):
            TABLE[(_kind, "add_remove", _accountant)] = ("one more row moves other rows to another step", _USE_ZERO_OUT)
        if _kind == "balls_in_bins":
            # With truly independent bins the others' places would not depend on N; a permutation of N rows only looks like that.
            TABLE[(_kind, "add_remove", _accountant)] = ("one permutation of all N rows decides the steps of the other rows", _USE_ZERO_OUT)
# Without amplification a sampled release is bounded by the same release with everyone in it. The drawn positions do not depend
# on contents, so zeroing one row moves the sum by C and replacing it by 2C.
for _kind in ("poisson", "truncated_poisson", "fixed_size", "random_allocation"):
    TABLE[(_kind, "zero_out", "deterministic")] = TABLE[(_kind, "add_remove", "deterministic")] = _gaussian
    TABLE[(_kind, "replace_one", "deterministic")] = _gaussian_twice
for _kind in ("truncated_poisson", "fixed_size"):
    TABLE[(_kind, "add_remove", "deterministic")] = TABLE[(_kind, "add_remove", "pld")]
for _adjacency in ("zero_out", "add_remove", "replace_one"):
    TABLE[("group", _adjacency, "deterministic")] = _group_gaussian(2.0 if _adjacency == "replace_one" else 1.0)
# A unit whose text is blanked contributes zero to a sum, as one that is zeroed out does, so each event that is known under zero_out is
# true.
for (_kind, _adjacency, _accountant), _cell in list(TABLE.items()):
    if _adjacency == "zero_out":
        TABLE[(_kind, "zero_out_text", _accountant)] = _cell
# Rows are released one by one, each in its own place and with its label: only their texts are protected.
for _accountant in ACCOUNTANTS:
    for _adjacency in RELATION:
        TABLE[("slot_revealed", _adjacency, _accountant)] = (
            "each row's label and place are released beside its noisy vector",
            "Use privacy.adjacency=zero_out_text",
        )
TABLE[("slot_revealed", "zero_out_text", "pld")] = _revealed
TABLE[("slot_revealed", "zero_out_text", "rdp")] = ("no Renyi bound is built in for rows released one by one", _USE_PLD)
# As if every draw took every row.
TABLE[("slot_revealed", "zero_out_text", "deterministic")] = _gaussian


def event(release: Release, adjacency: str, accountant: str) -> Event:
    """Returns the event that `accountant` composes for `release`; raises `ConfigError` if no bound is known."""
    require(accountant in ACCOUNTANTS, f"accountant={accountant}", "is not an accountant that proves a bound", "Use pld or rdp")
    require_relation(f"adjacency={adjacency}", adjacency)
    # A shift of the discrete Gaussian by whole steps has the Gaussian's moments of the density ratio at integer orders (Canonne,
    # Kamath, Steinke 2020, proposition 5 and its proof), and so the same Poisson-sampled divergences there; nothing else is proved.
    require(
        not release.is_discrete or (accountant == "rdp" and release.kind not in ("fixed_size", "random_allocation")),
        f"mechanism=discrete_gaussian, sampler={release.kind}, accountant={accountant}",
        "integer noise has a bound only by Renyi divergences of integer order",
        "Use accountant=rdp, sampler=poisson",
    )
    if release.event is not None:
        known = "dpx knows no closed form for an event that a package defines"
        require(accountant != "deterministic", "accountant=deterministic", known, "Use accountant=pld")
        return from_text(release.event, adjacency)
    cell = TABLE[(release.kind, adjacency, accountant)]
    if isinstance(cell, tuple):
        raise ConfigError(f"sampler={release.kind}, adjacency={adjacency}, accountant={accountant}", *cell)
    return cell(release)


def composed(charges: list[tuple[Release, int]], adjacency: str, accountant: str) -> Event:
    """Returns all charges as one event, in which equal releases are self-composed."""
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event(release, adjacency, accountant), count) for release, count in merge(charges)]
    )


def merge(charges: list[tuple[Release, int]]) -> list[tuple[Release, int]]:
    """Returns equal releases once, with their counts added; the order does not change a composition."""
    counts: dict[Release, int] = {}
    for release, count in charges:
        if count:
            counts[release] = counts.get(release, 0) + count
    return sorted(counts.items(), key=lambda item: (item[0].noise_multiplier, item[0].sampling_probability))


# By kind of step and stated relation: the other relations under which it is also proved. Every draw of dpx depends on N and on positions in
# the data, never on contents. A unit that is blanked or replaced moves no other unit, and moves the sum by C or 2C, which the cells of the
# table of events know. So each of the two proofs uses the draw alone.
ALSO_UNDER: dict[tuple[str, str], tuple[str, ...]] = {}
_OF_DRAWS = (
    "poisson",
    "truncated_poisson",
    "fixed_size",
    "cyclic_poisson",
    "shuffled",
    "deterministic",
    "balls_in_bins",
    "random_allocation",
)
for _kind in _OF_DRAWS:
    ALSO_UNDER[(_kind, "zero_out")] = ("zero_out_text", "replace_one")
    ALSO_UNDER[(_kind, "zero_out_text")] = ("zero_out", "replace_one")
    ALSO_UNDER[(_kind, "replace_one")] = ("zero_out", "zero_out_text")
# N was declared, so a blanked or replaced unit leaves q as it is.
ALSO_UNDER[("poisson", "add_remove")] = ALSO_UNDER[("random_allocation", "add_remove")] = ("zero_out", "zero_out_text", "replace_one")
# A replaced unit may have more or fewer rows than the one before, and no event covers that.
ALSO_UNDER[("group", "add_remove")] = ("zero_out", "zero_out_text")
# Blanking a unit's text leaves as many rows as zeroing out the unit does, and moves the sum by no more.
ALSO_UNDER[("group", "zero_out")] = ("zero_out_text",)
ALSO_UNDER[("group", "zero_out_text")] = ("zero_out",)

_WHY_NOT = {
    "add_remove": "their sampling probability was computed from the counted number of units, and add_remove protects that number",
    "replace_one": "the replacement of a unit of several rows may have more or fewer rows",
}


_OF_KIND = {
    "package": "a package defines their event for that relation only",
    "slot_revealed": "each row's label and place are released beside its noisy vector",
}


def kind_of(segment: Segment) -> str:
    """Returns the kind of a charged step, which decides under which relations it is proved.

    It is the step's sampler, "group" if a unit can be in several clipped gradients, "slot_revealed" if its rows were released one by one,
    or "package" if a package defined its event.
    """
    if segment.event is not None:
        return "package"
    if is_forward(segment):
        return "slot_revealed"
    return "group" if rows_clipped_apart(segment) > 1 else segment.sampler


def require_relation(value: str, adjacency: str) -> None:
    """Raises `ConfigError` for an unknown relation; `value` is the text that the user wrote."""
    require(adjacency in RELATION, value, "is not a neighbouring relation", f"Use one of {', '.join(RELATION)}")


def require_proved(segments: Segments, stated: str, adjacency: str, source: Any, value: str = "") -> None:
    """Raises `ConfigError` if some of `segments`, which `source` states under `stated`, have no proof under `adjacency`; `value` is what
    the user wrote, `job.adjacency` unless given."""
    value = value or f"job.adjacency={adjacency}"
    if stated == adjacency:
        return
    for segment in segments:
        kind = kind_of(segment)
        why = _OF_KIND.get(kind) or _WHY_NOT.get(adjacency, "dpx knows no proof")
        require(
            adjacency in ALSO_UNDER.get((kind, stated), ()),
            value,
            f"{source} charges steps ({kind}) under {stated} that are not proved under {adjacency}: {why}",
            f"Use {value.partition('=')[0]}={stated}",
        )
