"""Computes the numbers of a declared experiment: its noise multiplier, and its epsilon at the planned end.

The settings that decide the cost of a step are its plan, which may not change during a run.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dpx.claim.claim_checks import check_claim, event_of_step
from dpx.config.experiment_parts import Claim
from dpx.declaration import ConfigError, at_default
from dpx.mechanism.clip import Clip
from dpx.mechanism.declared_mechanism import Multiplier, NoiseBatchRatio, TargetClt, TargetCopy, TargetEpsilon
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism
from dpx.mechanism.telemetry import Telemetry
from dpx.privacy import accounting, ledger, profile, solve
from dpx.privacy.closed_form import remaining
from dpx.privacy.declared_privacy import Accountant, GdpClt, Privacy
from dpx.privacy.lines import NoiseEpoch, Part, Plan, PlanParts
from dpx.privacy.segments import ALLOCATION, IN_EPOCHS, LedgerEntry, Segment, Segments, StepCost, encode, steps_per_epoch
from dpx.sampler import Sampler, batch_schedule
from dpx.statement import outside_code

# (expected batch size, steps) of each stretch of a schedule.
BatchStages = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Calibrated:
    """Holds the computed numbers of a declaration. `noise_multiplier` is `None` and `epsilon` empty for a run without privacy.

    `size` is the public N; `stages` are `(q, steps)`, `batch_stages` `(expected batch size, steps)`; `epsilon` is at the planned end and
    the declared delta, by accountant.
    """

    noise_multiplier: float | None
    stages: tuple[tuple[float, int], ...]
    batch_stages: BatchStages
    size: int
    epsilon: dict[str, float]


@dataclass(frozen=True)
class Entries:
    """Makes the ledger entries of the steps of one declaration, from what decides their cost.

    `outside` are the packages of its classes that are not dpx's own.
    """

    mechanism: Mechanism
    sampler: Sampler
    clip: Clip
    telemetry: Telemetry
    privacy: Privacy
    outside: tuple[str, ...]

    @classmethod
    def of(cls, claim: Claim) -> "Entries":
        packages = tuple(part.package for part in claim.outside)
        return cls(claim.mechanism, claim.sampler, claim.clip, claim.telemetry, claim.privacy, packages)

    def of_step(
        self, size: int, noise_multiplier: float, batch: int, epoch: int = 0, epoch_name: str = "", job: Any = None, stretch: int = 0
    ) -> LedgerEntry:
        """Returns the entry of one step at expected batch size `batch`, in the noise epoch with number `epoch` and name `epoch_name`.

        `job` is the job that runs it; the field `by` depends on it and on the packages that are imported at the time of the call. `stretch`
        is the first step of the stretch of equal batch sizes that it is in.
        """
        privacy, drawn = self.privacy, self.sampler.ledger_fields(size, batch)
        return LedgerEntry(
            epoch=epoch,
            epoch_name=epoch_name,
            noise_multiplier=noise_multiplier,
            expected_batch_size=batch,
            size=size,
            rows_per_unit=privacy.rows_per_unit_max,
            unit_mode=privacy.unit_mode,
            event=event_of_step(self.mechanism, self.sampler, privacy.adjacency, noise_multiplier, size, batch),
            by=outside_code.AND.join(outside_code.joined(self.outside, outside_code.packages_of((), job))) or None,
            **drawn,
            allocation_from=None if drawn.get("allocation") is None else stretch,
            **self.mechanism.ledger_fields(),
            **self.clip.ledger_fields(),
            **self.telemetry.ledger_fields(),
        )

    def planned(
        self, batch_stages: BatchStages, size: int, noise_multiplier: float, origin: str = "planned", epoch: NoiseEpoch | None = None
    ) -> Segments:
        """Returns the entries of the schedule from the first step of `epoch` on, in the ledger called `origin`.

        It returns the whole schedule if no epoch has begun.
        """
        segments: Segments = []
        begins, number, name = (epoch.from_step, epoch.number, epoch.name) if epoch else (0, 0, "")
        first = 0
        for batch, steps in batch_stages:
            left = first + steps - max(first, begins)
            if left > 0:
                record = encode([(origin, first, self.of_step(size, noise_multiplier, batch, number, name, stretch=first))])[0]
                segments.append(replace(record, steps=((max(first, begins), left),)))
            first += steps
        return segments


def calibrate(claim: Claim, size: int, plan: Plan | None = None) -> Calibrated:
    """Checks the claim and solves for the noise multiplier.

    `size` is the counted number of rows or units (what the sampler draws), or the declared number before anything is counted. Raises
    `ConfigError` for a claim that is not valid.

    A run that began with `plan` keeps the noise multiplier that was solved for then, if nothing else in its plan has changed: another
    version of an accountant may return one that differs in the last digits.
    """
    batch_stages = batch_schedule.stages(claim.batch_schedule, claim.steps)
    if not claim.is_private:
        return Calibrated(None, tuple((batch / size, steps) for batch, steps in batch_stages), batch_stages, size, {})
    size = check_claim(claim, size)
    entries, noise, sampler, privacy = Entries.of(claim), claim.noise, claim.sampler, claim.privacy
    if isinstance(noise, Multiplier):
        sigma = noise.noise_multiplier
    elif isinstance(noise, NoiseBatchRatio):
        sigma = noise.noise_batch_ratio * batch_stages[0][0]
    elif isinstance(noise, TargetClt):
        # At this noise the central limit gives the target, as if the draws of each step were hidden.
        assert isinstance(claim.mechanism, ForwardNoise)
        draws = claim.mechanism.draws_per_step
        of_draws = [(batch / size / draws, steps * draws) for batch, steps in batch_stages]
        sigma = profile.gdp_clt_noise_multiplier(of_draws, epsilon=noise.epsilon, delta=privacy.delta, value="noise.epsilon")
    else:
        assert isinstance(noise, TargetEpsilon | TargetCopy)
        accountant, orders = accountant_of(claim.accountant)
        alone: dict[str, Any] = dict.fromkeys(ledger.AUXILIARY)
        if isinstance(noise, TargetCopy):
            accountant, orders, alone = noise.accountant, None, alone | {"rows_per_unit": 1}
        segments = [replace(segment, **alone) for segment in entries.planned(batch_stages, size, 1.0)]
        adjacency = privacy.adjacency
        if sampler.assumed is not None:
            segments, adjacency = assumed(sampler, segments), ASSUMED_ADJACENCY
        whole = solve.solve(
            accounting.bucketed(ledger.releases(segments)),
            epsilon=noise.epsilon,
            delta=privacy.delta,
            accountant=accountant,
            orders=orders,
            adjacency=adjacency,
            coarse=claim.accountant.value_discretization_interval,
        )
        sigma = remaining(whole, auxiliary(claim.clip, claim.telemetry))
    stages = tuple((batch / size, steps) for batch, steps in batch_stages)
    first = None if plan is None or plan.step is None else plan.step.noise_multiplier
    if plan is not None and first and first != sigma:
        now = plan_of(claim, Calibrated(first, stages, batch_stages, size, {}))
        sigma = sigma if differing(plan, now) else first
    spent = accounting_of(claim.accountant, privacy, entries.planned(batch_stages, size, sigma))
    return Calibrated(sigma, stages, batch_stages, size, spent)


def plan_of(claim: Claim, calibrated: Calibrated) -> Plan:
    """Returns the settings that decide the cost of every step, which are entered in the ledger before the first step.

    All are null for a run without privacy.
    """
    if calibrated.noise_multiplier is None:
        return Plan()
    first = Entries.of(claim).of_step(calibrated.size, calibrated.noise_multiplier, calibrated.batch_stages[0][0])
    groups = {"noise": claim.noise, "privacy": claim.privacy, "accountant": claim.accountant, "audit": claim.audit}
    return Plan(
        step=StepCost(**{field.name: getattr(first, field.name) for field in fields(StepCost)}),
        steps=claim.steps,
        batch_sizes=calibrated.batch_stages,
        declared=PlanParts(
            **{
                name: Part(values=json.loads(json.dumps(asdict(group))), at_default=tuple(at_default(group)))
                for name, group in groups.items()
            }
        ),
    )


def differing(before: Plan | None, plan: Plan) -> list[str]:
    """Returns the settings of `plan` that differ from the earlier plan `before`, which was made before results were seen."""
    if before is None:
        return []
    names = []
    pairs = ((before.step, plan.step), (_whole(before), _whole(plan)), (before.declared, plan.declared))
    for earlier, later in ((_named(one), _named(other)) for one, other in pairs):
        for name, now in later.items():
            was = earlier.get(name)
            if isinstance(now, Part) and isinstance(was, Part):
                # A declared field that did not exist then is the same at its default.
                added = [field for field in now.values if field not in was.values and field in now.at_default]
                was, now = was.values, {field: value for field, value in now.values.items() if field not in added}
            if was != now:
                names.append(name)
    return names


def _named(part: StepCost | PlanParts | dict[str, Any] | None) -> dict[str, Any]:
    if part is None or isinstance(part, dict):
        return part or {}
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _whole(plan: Plan) -> dict[str, Any]:
    """Returns the settings of the whole schedule; empty for a run without privacy."""
    return {} if plan.steps is None else {"steps": plan.steps, "batch_sizes": plan.batch_sizes}


def auxiliary(clip: Clip, telemetry: Telemetry) -> dict[str, float | None]:
    """Returns the noise multipliers of a step's releases beside the gradient sum; `None` for what it does not release
    (`ledger.AUXILIARY`)."""
    released = clip.ledger_fields() | telemetry.ledger_fields()
    return {name: released[name] for name in ledger.AUXILIARY}


# Papers that assume Poisson sampling account for it under add-or-remove-one, which zero_out equals.
ASSUMED_ADJACENCY = "zero_out"


def assumed(sampler: Sampler, segments: Segments) -> Segments:
    """Returns `segments` as if they had been drawn by the sampler in `sampler.assumed`; the result is not a bound for the run."""
    return as_drawn_by(str(sampler.assumed), segments)


def as_drawn_by(name: str, segments: Segments) -> Segments:
    """Returns `segments` as if the sampler `name` had drawn them, which q alone describes."""

    def places(segment: Segment) -> dict[str, Any]:
        if name != "random_allocation":
            return dict.fromkeys(("allocation", "allocation_steps", "allocation_from"))
        # Epochs at one batch size are counted from step 0, also where a noise epoch begins within one.
        first = 0 if segment.sampler in IN_EPOCHS else segment.steps[0][0]
        return {"allocation": ALLOCATION, "allocation_steps": steps_per_epoch(segment.q), "allocation_from": first}

    return [segment if segment.sampler == name else replace(segment, sampler=name, **places(segment)) for segment in segments]


def accountant_of(accountant: Accountant) -> tuple[str, tuple[float, ...] | None]:
    """Returns the accountant that proves the run's epsilon, and its Renyi orders; for an approximation it is pld."""
    if isinstance(accountant, GdpClt):
        return "pld", None
    orders = getattr(accountant, "orders", None)
    return accountant.name, None if orders is None else tuple(orders)


def compositions(accountant: Accountant, privacy: Privacy, charges: accounting.Charges) -> dict[str, accounting.Composition]:
    """Returns `charges` composed by every accountant that has a bound for them, the run's own first.

    Raises `ConfigError` if its own accountant has no bound.
    """
    own, orders = accountant_of(accountant)
    accounting.check_delta(privacy.delta, own)
    coarse = accountant.value_discretization_interval
    composed = {own: accounting.compose(charges, own, privacy.adjacency, orders, coarse=coarse)}
    for other in ("pld", "rdp"):
        if other != own and privacy.delta >= accounting.SMALLEST_DELTA[other]:
            with suppress(ConfigError):
                composed[other] = accounting.compose(charges, other, privacy.adjacency, coarse=coarse)
    return composed


def accounting_of(accountant: Accountant, privacy: Privacy, segments: Segments) -> dict[str, float]:
    """Returns the epsilon of `segments` at the declared delta, by accountant, the run's own first."""
    charges = accounting.bucketed(ledger.releases(segments))
    return {name: composition.epsilon(privacy.delta) for name, composition in compositions(accountant, privacy, charges).items()}
