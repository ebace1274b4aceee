"""Defines `dpx.Ledger`, which records a training loop of the user's own and states what it would guarantee on the user's word.

dpx draws the rows, charges each step before it is seen and composes what was charged. That the loop clips, adds the noise once, divides
by the expected batch size and releases nothing else is the user's word: the guarantee is `dp_by_user_loop`, and epsilon is under
`unsupported`.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from dpx.claim.spent import RunFacts, Spent, ledger_facts
from dpx.declaration import require
from dpx.files.run_folder import RunFolder
from dpx.packages import OWN, USER_LOOP, version_of
from dpx.privacy import events, ledger
from dpx.privacy.declared_privacy import Accountant, Adjacency, Pld, Privacy, Rdp, UnitFacts
from dpx.privacy.lines import NoiseEpoch
from dpx.privacy.origins import Origin, VocabularyFacts
from dpx.privacy.segments import LedgerEntry, Segment, Segments, of_entry
from dpx.randomness import RootSecret
from dpx.sampler.batches import Batch, Batches
from dpx.statement import outside_code, seals
from dpx.statement.statement_records import (
    MechanismFacts,
    NotABound,
    OutsideCode,
    PlannedEpsilon,
    RunStatement,
    SpentEpsilon,
)

ON_THE_USERS_WORD = (
    "the loop reads exactly the rows of each batch, and padding contributes exactly zero",
    "the contribution of each row to the sum is clipped to the clipping norm, rounding included, and nothing else of the row enters it",
    "Gaussian noise of the stated multiplier is added once to the sum of each step, from that step's key, also where no row was drawn",
    "the noisy sum is divided by the expected batch size, and not by the number of rows drawn",
    "nothing that depends on the rows leaves the loop but the parameters: no loss, norm, choice of a step or end of the loop",
    "which rows a step drew, and how many, stays secret: no indices, padded lengths or times of steps leave the loop",
    "one index is one whole unit of protection, and the number of indices is a public constant: the index of a missing unit adds zero",
    "preprocessing, vocabulary, labels and settings do not depend on protected rows",
)
_BEGINNINGS = {"random": (), "public": ("no protected row was used for the weights that the loop begins from",)}


class Ledger:
    """Records the loop of the user in a folder, as a run's: `release/privacy.json` and `private/ledger`.

    Every `record` charges each step durably before its batch is given. Opened again, it continues with a fresh secret, and all steps
    are charged. Only one ledger of a folder is open at a time. Use it as a context manager, or call `close`.

    Args:
        folder: The folder; it is made if it is missing.
        noise_multiplier: Standard deviation of the noise on the sum, relative to the clipping norm.
        clipping_norm: The longest contribution of one row.
        delta: Delta of the statement, below one over the largest number of rows.
        begins_from: "random" for parameters drawn at random, "public" for weights that no protected row was used for, "unknown" for others,
            which have no guarantee.
        adjacency: The neighbouring relation.
        accountant: "pld" or "rdp".
        name: Name of the loop in its statement.

    Raises:
        ConfigError: For numbers out of range, for a folder that is not of such a loop or is open, and for another neighbouring relation
            than its steps were charged under.

    Example:
        >>> import tempfile, dpx
        >>> folder = tempfile.mkdtemp()
        >>> with dpx.Ledger(folder, noise_multiplier=1.0, clipping_norm=1.0, delta=1e-5, begins_from="random") as loop:
        ...     steps = [batch.step for batch in loop.record(dpx.sampler.poisson(1000, 64, steps=3))]
        >>> steps, loop.statement().guarantee
        ([0, 1, 2], 'dp_by_user_loop')
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        noise_multiplier: float,
        clipping_norm: float,
        delta: float,
        begins_from: Literal["random", "public", "unknown"],
        adjacency: Adjacency = "zero_out",
        accountant: Literal["pld", "rdp"] = "pld",
        name: str = "own_loop",
    ):
        for key, value in (("noise_multiplier", noise_multiplier), ("clipping_norm", clipping_norm)):
            require(0 < value < float("inf"), f"{key}={value}", "is not a finite number above 0", "Give a finite number above 0")
        require(accountant in ("pld", "rdp"), f"accountant={accountant}", "is not an accountant of a loop", "Use pld or rdp")
        self._noise_multiplier, self._clipping_norm, self._name = float(noise_multiplier), float(clipping_norm), name
        self._privacy = Privacy(delta=delta, adjacency=adjacency)
        self._accountant: Accountant = Pld() if accountant == "pld" else Rdp()
        self._begins_from = begins_from
        self._folder = RunFolder(Path(folder))
        require(not self._folder.has_begun, folder, "holds a run of dpx", "Give another folder")
        with contextlib.ExitStack() as stack:
            # Two writers of one ledger would overwrite each other's charges.
            stack.enter_context(self._folder.claimed("a loop is open in this folder", "Close its dpx.Ledger first, or give another folder"))
            self._ledger = ledger.Ledger(self._folder.private / "ledger")
            stack.callback(self._ledger.close)
            self._require_fits()
            provenance = "public" if begins_from == "public" else None
            if begins_from != "random":
                weights = Origin(kind="file", name="the weights that the loop begins from", identity=USER_LOOP, provenance=provenance)
                self._ledger.note_origins([weights])
            self._ledger.note_units(_units(self._privacy))
            self._epoch, self._secret = self._open_epoch()
            self._open = stack.pop_all()
        self._is_open = True
        self._batches: Batches | None = None
        # Of a sampler whose draws in one epoch depend on each other: a loop has one of it.
        self._in_epochs: tuple[object, ...] = ()

    def _require_fits(self) -> None:
        """Raises `ConfigError` for a folder whose steps are not of such a loop, or were charged under other declarations."""
        place, own = self._folder.path, self._ledger.own_segments()
        is_own = all(USER_LOOP in (segment.by or "").split(outside_code.AND) for segment in own)
        require(is_own, place, "holds a run of dpx", "Give another folder")
        ours, before = self._privacy.adjacency, {one.adjacency for one in self._ledger.units if one is not None} - {self._privacy.adjacency}
        require(
            not before, f"adjacency={ours}", f"the loop of this folder began under {', '.join(before)}", "Use that one, or another folder"
        )
        self._require_small_delta(max((segment.size or 0 for segment in own), default=0))

    def _require_small_delta(self, size: int) -> None:
        delta = self._privacy.delta
        require(delta * size < 1, f"delta={delta}", f"not below 1/N = {1 / max(size, 1):.3g}", "Use a smaller delta")

    def record(self, batches: Batches) -> Iterator[Batch]:
        """Yields the batches, each once its step is charged.

        Raises `ConfigError` before the first one for a sampler that has no event under the neighbouring relation, and for a delta that is
        not below one over the number of rows; and at any of them once the ledger is closed.
        """
        size = batches.size
        self._require_small_delta(size)
        is_of_dpx = outside_code.package_of(type(batches.sampler)) == OWN
        reason = "is not a sampler of dpx, which draws and charges the rows of this loop"
        require(is_of_dpx, f"sampler={batches.sampler.name}", reason, "Use a function of dpx.sampler")
        batches.sampler.check(self._privacy, self._accountant)
        if batches.has_epochs:
            own = (batches.sampler, size, batches.batch_size)
            reason = "draws in epochs, and this loop has epochs of another length, size or sampler"
            require(
                self._in_epochs in ((), own), f"sampler={batches.sampler.name}", reason, "Open the folder again, which draws a fresh secret"
            )
            self._in_epochs = own
        entry = self._entry(batches)
        # Refused here, if nothing is proved for it, and not after the last step.
        one = Segment(origin=self._ledger.identity, **of_entry(entry), steps=((0, 1),))
        for release, _ in ledger.releases([one]):
            events.event(release, self._privacy.adjacency, self._accountant.name)
        self._batches = batches
        return self._charged(batches)

    def _entry(self, batches: Batches) -> LedgerEntry:
        return LedgerEntry(
            epoch=self._epoch.number,
            epoch_name=self._epoch.name,
            noise_multiplier=self._noise_multiplier,
            clipping_norm=self._clipping_norm,
            expected_batch_size=batches.batch_size,
            size=batches.size,
            # A package may be imported at any time.
            by=outside_code.AND.join(outside_code.joined((USER_LOOP,), outside_code.imported())),
            **batches.event,
        )

    def _charged(self, batches: Batches) -> Iterator[Batch]:
        for step in range(batches.first_step, batches.first_step + batches.steps):
            require(self._is_open, self._folder.path, "this ledger is closed", "Open it again, which draws a fresh secret")
            # Its key may have had another sum.
            fix = "Give first_step the number of steps done, or open the folder again, which draws a fresh secret"
            require(step not in self._ledger.steps(self._epoch.number), f"step {step}", "was drawn before with this secret", fix)
            self._ledger.append(step, self._entry(batches))
            yield batches.at(step, self._secret)

    def statement(self) -> RunStatement:
        """Returns the statement of what was charged so far."""
        facts = RunFacts.of(self._ledger)
        trusted = (USER_LOOP,), outside_code.imported(), outside_code.packages_of_segments(facts.segments)
        packages = outside_code.joined(*trusted)
        spent = Spent(self._accountant, self._privacy, facts.segments)
        # Its origins alone can have reasons: whether its data are known does not count, as all of it is the user's word.
        against = facts.against
        why = "; ".join(against or [f"dpx drew and charged {spent.steps} steps, and the rest is on the user's word: see the assumptions"])
        numbers = tuple(NotABound(name=f"epsilon/{name}", value=spent.epsilon(name), reason=why) for name in spent.accountants)
        sizes = [segment.expected_batch_size for segment in facts.own] or [0]
        drawn_by = list(dict.fromkeys(segment.sampler for segment in facts.own))
        sampler: dict[str, Any] = {"name": " and ".join(drawn_by)} if drawn_by else {}
        if self._batches is not None and drawn_by == [self._batches.sampler.name]:
            sampler = dataclasses.asdict(self._batches.sampler)  # pyright: ignore[reportArgumentType]
        return RunStatement(
            format=seals.FORMAT,
            name=self._name,
            replicate=0,
            steps=spent.steps,
            outside_code=tuple(OutsideCode(package=name, version=version_of(name), parts={}) for name in packages),
            train=None,
            init=facts.beginning,
            vocabulary=VocabularyFacts(),
            tuning=None,
            guarantee=outside_code.guarantee(True, against, packages),
            reasons=tuple(against),
            epsilon={},
            not_covered=("everything under private/", "whatever the loop releases beside its parameters"),
            unit=self._privacy.unit,
            rows_per_unit_max=1,
            unit_mode="group",
            adjacency=self._privacy.adjacency,
            delta=self._privacy.delta,
            declared_size=max((segment.size or 0 for segment in facts.own), default=0),
            sampler=sampler | {"expected_batch_size": {"smallest": min(sizes), "largest": max(sizes)}},
            mechanism=self._mechanism(facts.own, max(sizes)),
            assumptions=(*ON_THE_USERS_WORD, *_BEGINNINGS.get(self._begins_from, ()), *facts.premises),
            audit=None,
            units=tuple(self._ledger.units),
            accountant=self._accountant.name,
            epsilon_is_of="the steps that were charged, if the loop does what the assumptions say",
            epsilon_at=(),
            unsupported=numbers,
            planned=PlannedEpsilon(steps=spent.steps, epsilon={}),
            spent=SpentEpsilon(
                steps=len({step for step, _ in self._ledger.entries()}),
                charged_steps=spent.steps,
                epsilon={},
                valid_only_if="the loop does what the assumptions say, and its end does not depend on the data",
            ),
            ledger=ledger_facts(self._ledger, facts.segments, spent),
        )

    def _mechanism(self, own: Segments, largest: int) -> MechanismFacts:
        # The folder may have been opened with other numbers before.
        noise_multiplier = min((segment.noise_multiplier for segment in own), default=self._noise_multiplier)
        return MechanismFacts(
            name=USER_LOOP,
            clip=USER_LOOP,
            clipping_norm=own[0].clipping_norm if own else self._clipping_norm,
            noise_multiplier=noise_multiplier,
            noise_batch_ratio=noise_multiplier / largest if largest else None,
            rounding_margin=0.0,
            releases=("the parameters of every step",),
            grid_margin=0.0,
            generator="the loop's own; its keys are derived by keyed BLAKE2b from one root secret",
            generator_strength_bits=64,
            noise_reach_in_deviations=None,
        )

    def close(self) -> None:
        """Writes `release/privacy.json` once. No batch is given after it."""
        if self._is_open:
            self._is_open = False
            with self._open:
                seals.write_statement(self._folder, self._ledger, self.statement())

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_epoch(self) -> tuple[NoiseEpoch, RootSecret]:
        """Opens a noise epoch with a fresh secret: nobody knows what the loop did with the keys of an earlier process."""
        number = len(self._ledger.noise_epochs)
        place = self._folder.private / f"root_secret_{number}"
        secret = RootSecret.create(place)
        epoch = NoiseEpoch(
            number=number,
            name=secrets.token_hex(8),
            from_step=0,
            start=None,
            secret_tag=secret.tag,
            secret_place=place.stat().st_ino,
            fingerprint={},
            why="the loop was started",
        )
        self._ledger.open_noise_epoch(epoch)
        return epoch, secret


def _units(privacy: Privacy) -> UnitFacts:
    return UnitFacts(
        unit=privacy.unit,
        unit_mode=privacy.unit_mode,
        rows_per_unit_max=1,
        adjacency=privacy.adjacency,
        definition={"unit": "one index of the loop, by the user's word"},
        vocabulary_source="file",
        vocabulary_sha256=None,
        split_salt="",
        public_fraction=0.0,
        heldout_fraction=0.0,
        test_split=None,
    )
