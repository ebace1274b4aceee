"""The plan of one run: what it would cost and guarantee, for `job=plan`, a stage of a chain and a design. `RunPlan` is its `plan.json`.

Nothing is allocated, and jax, where it is needed, traces shapes alone.
"""

import dataclasses
from typing import Any, Literal

from dpx.claim import statement
from dpx.claim.calibration import Entries, calibrate, differing, plan_of
from dpx.claim.caveats import assumptions, late_choices, little_data, not_covered, reasons_against
from dpx.claim.spent import RunFacts, Spent, as_if_hidden, of_one_copy, planned_end, under_assumed_sampler
from dpx.clipping import ClippingMethod
from dpx.config.declared_audit import Audit, Canaries
from dpx.config.experiment import Experiment
from dpx.config.experiment_parts import Fitted
from dpx.cost.compiled import CompiledStep, MeasuredRun
from dpx.cost.memory import Trains, by_type, published_flops, recomputed_matmul_flops, step_memory, training_matmul_flops
from dpx.data import left_out
from dpx.data.declared_data import Data
from dpx.data.left_out import LeftOut
from dpx.declaration import ConfigError
from dpx.files.records import described, record
from dpx.init.start import planned_start
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism, Reparametrisation
from dpx.models.model_protocol import count
from dpx.models.trained import Trained
from dpx.optimizer import Optimizer
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.origins import Beginning, given_protected
from dpx.privacy.segments import Segments
from dpx.processes.mesh import Mesh
from dpx.sampler import Sampler
from dpx.statement import outside_code
from dpx.statement.chain_seal import ChainClaim, FedStage
from dpx.statement.statement_records import Epsilons, NotABound

PLAN = "plan.json"


@record
class UnitNoise:
    """The noise that one bound on the rows of a unit and one `unit_mode` would need."""

    rows_per_unit_max: int = described("The most rows of a unit.")
    unit_mode: str = described("What is drawn and clipped.")
    noise_multiplier: float | None = described("The noise multiplier; null where dpx has no accounting for the setting.")
    noise_per_part: float | None = described("The same divided by the clipped gradients of a unit that has all its rows.")


@record
class RunPlan:
    """What a run would cost and guarantee."""

    kind: Literal["run"] = "run"
    name: str = described("Name of the experiment.")
    model: str = described("Name of the model.")
    parameters: int = described("Number of parameters.")
    vocabulary_size: int = described("Number of word pieces, one row of the word table each.")
    rematerialize: str = described("What the backward pass computes again: none, or layers.")
    attention: str = described("How attention is computed: explicit, or by xla or cudnn.")
    trained_parameters: int = described("Number of parameters that are trained.")
    steps: int = described("The planned number of steps.")
    examples: int = described("Expected number of rows or units that all steps draw.")
    drawn: str = described("What a step draws: rows or units of a kind.")
    protected_rows: int = described("The public number N of rows or units to draw from.")
    epochs: float = described("`examples` divided by `protected_rows`.")
    flops: float = described("Floating-point operations of the whole run, 6 M S per example.")
    flops_of_products: float = described("Floating-point operations of its matrix products.")
    flops_by_type: dict[str, float] = described(
        "The same by the type of a product's factors, where a product in two parts counts twice: bfloat16, float32, and float32_highest "
        "(float32 at full precision)."
    )
    mesh: str = described("Name of the mesh.")
    devices: int = described("Number of devices.")
    device_hours: float = described("Hours of all devices together, at the declared speed: products alone, no compiling, no evaluation.")
    device_hours_by_type: float = described("Hours of all devices together, if each type of product runs at its own rate of the mesh.")
    hours: float = described("`device_hours` divided by the devices.")
    microbatch: int = described("Rows or units that are computed at once.")
    memory_bytes_per_device: int = described("Estimated peak of memory on a device.")
    device_memory_bytes: int = described("Memory of a device.")
    fits: bool = described("Whether the peak fits the device.")
    sampler: str = described("Name of the sampler.")
    adjacency: str = described("The neighbouring relation.")
    unit: str = described("What one protected unit is.")
    unit_mode: str = described(
        'Whether steps draw rows ("group"), whole units ("sample_units") or units of which one row is read ("one_row").'
    )
    canaries: int = described("Number of places of canaries among what is drawn.")
    noise_multiplier: float | None = described("Standard deviation of the noise relative to the clipping norm; null without privacy.")
    releases: tuple[str, ...] = described("What the run releases under the claim.")
    noise_batch_ratio: float | None = described("The noise multiplier divided by the largest expected batch size; null without privacy.")
    delta: float | None = described("The delta of the claim; null without privacy.")
    epsilon: Epsilons = described("Epsilon at the planned end, by accountant, runs that it starts from included; empty without a proof.")
    epsilon_of_this_run: Epsilons = described("Epsilon of the run's own steps alone, by accountant; empty without a proof.")
    init: Beginning = described("Where the starting parameters come from.")
    unsupported: tuple[NotABound, ...] = described("Numbers that are not bounds, each with its reason.")
    guarantee: str = described("As the statement of the run would have it.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a run with one.")
    assumptions: tuple[str, ...] = described("What must be true for the guarantee to hold, in sentences.")
    not_covered: tuple[str, ...] = described("What the guarantee does not cover, in sentences.")
    hints: tuple[str, ...] = described("What a reader of the plan should look at, in sentences.")
    noise_by_unit: tuple[UnitNoise, ...] = described(
        "The noise by rows of a unit and `unit_mode`; empty for units of one row and in a chain.", default=()
    )
    public_left_out: LeftOut | None = described(
        "What rows of the public split leave out of its texts; null without public rows, or where the data is not prepared.", default=None
    )
    measured: MeasuredRun | None = described("The time of the run on this machine; null unless asked for.", default=None)
    compiled: CompiledStep | None = described("What the compiled step holds, sends and multiplies; null unless asked for.", default=None)


@record
class AnalysisInput:
    """What an analysis reads."""

    path: str = described("Where it is.")
    exists: bool = described("Whether it is there.")


@record
class AnalysisPlan:
    """What an analysis would read; nothing is trained."""

    kind: Literal["analysis"] = "analysis"
    name: str = described("Name of the experiment.")
    analysis: str = described("Class of the analysis.")
    inputs: tuple[AnalysisInput, ...] = described("What it reads.")
    device_hours: float = described("Hours of all devices: none.")


@record
class StagePlan(FedStage):
    """What one run of a stage would cost and guarantee by itself."""

    state: Literal["finished", "to_run"] = described("Whether it has run to its end; what has is not run again.")
    stale: tuple[str, ...] = described("Folders of the stage that were fed by a stage before it as that was then; they are not used.")
    plan: RunPlan | None = described("Its plan, from random parameters before the stage that feeds it has run; null without training.")


@record
class ChainPlan:
    """What a chain would cost and guarantee."""

    kind: Literal["chain"] = "chain"
    name: str = described("Name of the chain.")
    device_hours: float = described("Hours of all devices, of the stages that have still to run.")
    claim: ChainClaim = described("What all stages together would protect.")
    stages: tuple[StagePlan, ...] = described("Every run of every stage, in the order in which they run.")


PlanDocument = RunPlan | AnalysisPlan | ChainPlan


# Larger microbatches are not faster: matrix products reach full throughput at much smaller sizes.
LARGEST_MICROBATCH = 1024

# What is traced for a plan, by everything that it depends on: points of a sweep, and stages of a chain, mostly share it, and to trace it is
# most of what a plan costs. Bytes of an optimiser's state, and products of a run that trains a part.
_STATE_BYTES: dict[str, int] = {}
_PRODUCTS: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run computes of one drawn row or unit, and on which devices; of parameters and rows, shapes alone are read."""

    fitted: Fitted
    trained: Trained
    mechanism: Mechanism
    clipping_method: ClippingMethod
    audit: Audit
    mesh: Mesh

    @property
    def parameters(self) -> int:
        return count(self._shapes())

    def trains(self) -> Trains:
        """Returns how many parameters are trained and frozen, and what is summed."""
        if self.trained.is_all:
            shapes = self._shapes()
            summed = self.mechanism.summed_shapes(shapes) if isinstance(self.mechanism, Reparametrisation) else shapes
            return Trains(self.parameters).differentiated_by(shapes, summed)
        from dpx.training.frozen import trains

        return trains(self.trained, self._objective(), self.mechanism)

    def costs(self, examples: int, size: int) -> dict[str, Any]:
        """Returns the fields of a plan that say what `examples` draws of `size` rows or units cost."""
        # A unit costs as much as the most rows it may have: the rest is padding.
        rows, model, length = self.fitted.privacy.rows_per_example, self.fitted.model, self.fitted.data.sequence_length
        drawn, protected = examples * rows, size * rows
        whole, exact = self._products(drawn, protected)
        # The rule assumes that every parameter is trained.
        flops = published_flops(self.parameters, length) * drawn * (exact / whole)
        # Forward pass, cotangents and weight gradients take a third each; what is frozen has no weight gradient.
        of_weights = whole / 3 if self.trained.is_all else max(0.0, exact - 2 / 3 * whole)
        typed = dict(by_type(float(exact), of_weights, model.dtype, is_private=self.mechanism.clips_gradients))
        seconds = sum(own / self.mesh.rate(kind) for kind, own in typed.items())  # pyright: ignore[reportArgumentType]
        hours = flops / self.mesh.flops_per_s / 3600
        return {
            "flops": float(flops),
            "flops_of_products": float(exact),
            "flops_by_type": typed,
            "device_hours": hours,
            "device_hours_by_type": seconds / 3600,
            "hours": hours / self.mesh.devices,
        }

    def _products(self, drawn: int, protected: int) -> tuple[int, int]:
        """Returns the matrix-product FLOPs of a run of `drawn` rows: if all were trained and nothing computed again, and as it is."""
        fitted, length = self.fitted, self.fitted.data.sequence_length
        model, task, vocabulary = fitted.model, fitted.task, fitted.vocabulary_size
        one = training_matmul_flops(model, vocabulary, length, task.masked_positions(length), pooled_outputs=task.pooled_outputs)
        if self.trained.is_all and not isinstance(self.mechanism, Reparametrisation):
            return one * drawn, (one + recomputed_matmul_flops(model, length)) * drawn
        from dpx.job.measure import products

        traced = (model, task, self.trained, self.mechanism, vocabulary, length)
        # An encoder which is not trained reads each protected text once, before the first step; with canaries it reads all of them.
        reads_once = not isinstance(self.audit, Canaries)
        key = repr((*traced, reads_once))
        if key not in _PRODUCTS:
            _PRODUCTS[key] = products(*traced, reads_once=reads_once)
        each = _PRODUCTS[key]
        return one * drawn, each.drawn_row * drawn + each.protected_row * protected

    def optimizer_bytes(self, optimizer: Optimizer) -> int:
        """Returns the bytes of the optimiser's state on one device, from its shapes. This imports jax, and takes no device."""
        from dpx.training.frozen import shapes
        from dpx.training.update import state_bytes

        fitted = self.fitted
        key = repr((optimizer, self.trained, fitted.model, fitted.task, self.mesh, fitted.vocabulary_size))
        if key not in _STATE_BYTES:
            _STATE_BYTES[key] = state_bytes(optimizer, shapes(self.trained, self._objective())[0], self.mesh)
        return _STATE_BYTES[key]

    def peak_bytes(self, trains: Trains, microbatch: int, optimizer_bytes: int) -> int:
        """Returns the most memory of a device with `microbatch` rows or units at a time."""
        length = self.fitted.data.sequence_length
        return step_memory(
            self.fitted.model,
            trains,
            vocabulary_size=self.fitted.vocabulary_size,
            sequence_length=length,
            masked_positions=self.fitted.task.masked_positions(length),
            microbatch=microbatch * self.fitted.privacy.rows_per_example,
            shards=self.mesh.shards,
            method=self.clipping_method.name if self.mechanism.clips_gradients else "plain",
            mechanism_bytes=self.mechanism.extra_memory_bytes(trains.parameters, trains.replaced),
            optimizer_bytes=optimizer_bytes,
        ).peak

    def largest_microbatch(self, trains: Trains, optimizer_bytes: int) -> int:
        """Returns the largest power of two whose estimated peak fits the declared device, with a fifth left to the compiler; at least 1."""
        size = LARGEST_MICROBATCH
        while size > 1 and self.peak_bytes(trains, size, optimizer_bytes) > 0.8 * self.mesh.memory_bytes:
            size //= 2
        return size

    def _objective(self) -> Any:
        from dpx.task.mlm import Special
        from dpx.task.objective import objective

        return objective(self.fitted.model, self.fitted.task, self.fitted.vocabulary_size, Special(0, 1, 2, 3, 4))

    def _shapes(self) -> Any:
        return self.fitted.task.parameter_shapes(self.fitted.model, self.fitted.vocabulary_size)


def prepared(data: Data, privacy: Privacy, asked_by: str = "a plan") -> Any:
    """Returns the prepared data, or `None` where its size is declared. Local sources are prepared for it; a download is not started."""
    if data.declared_size is not None:
        return None
    reason = f"{asked_by} does not download data, so the number of rows is not known"
    if data.is_remote:
        raise ConfigError("data.declared_size", reason, "Set data.declared_size")
    from dpx.data.prepare import prepare

    return prepare(data, privacy)


def plan_of_run(experiment: Experiment, fork: str | None = None) -> RunPlan:
    """Returns every field of plan.json; `fork` is the `<run folder>@<step>` that the run resumes from.

    Raises `ConfigError` if the claim is not valid or the number of rows is not known.
    """
    data, privacy, model, mesh, mechanism = experiment.data, experiment.privacy, experiment.model, experiment.mesh, experiment.mechanism
    is_private = experiment.is_private
    store = prepared(data, privacy)
    manifest = store.manifest if store else None
    claim = experiment.claim
    calibrated = calibrate(claim, data.declared_size or (privacy.population(manifest) if manifest else 0))
    begins = planned_start(experiment.init, experiment.receiver, store, fork)
    facts = RunFacts.of(None, begins.origins)
    # Reasons why no guarantee is planned, and the packages that the claim would trust.
    late = late_choices(differing(begins.plan, plan_of(claim, calibrated)))
    own = reasons_against(data, privacy, experiment.sampler, experiment.seed, claim.reasons_of_mechanism, manifest)
    reasons = [*own, *facts.against, *late] if is_private else [f"mechanism={mechanism.name}"]
    by = outside_code.joined(outside_code.packages_of(claim.outside), outside_code.packages_of_segments(facts.segments))
    planned = planned_end(Entries.of(claim), calibrated, None, begins.origins) if is_private else []
    sigma, size = calibrated.noise_multiplier, calibrated.size
    examples, largest = sum(batch * steps for batch, steps in calibrated.batch_stages), max(batch for batch, _ in calibrated.batch_stages)

    program = Program(experiment.fitted, experiment.trained, mechanism, experiment.clipping_method, experiment.audit, mesh)
    trains, state = program.trains(), program.optimizer_bytes(experiment.optimizer)
    given = experiment.microbatch
    microbatch = given if isinstance(given, int) else program.largest_microbatch(trains, state)
    peak = program.peak_bytes(trains, microbatch, state)

    hints = little_data(size, privacy.drawn, largest, privacy.delta) if is_private else []
    if mesh.platform in ("gpu", "tpu") and model.dtype == "float32":
        hours = f"the hours are those of bfloat16 products, whose speed mesh={mesh.name} states"
        hints.append(f"{hours}; float32 products take several times as long on this device. Set ++model.dtype=bfloat16")
    return RunPlan(
        name=experiment.name,
        model=model.name,
        parameters=program.parameters,
        vocabulary_size=experiment.vocabulary_size,
        rematerialize=model.rematerialize,
        attention=model.attention,
        public_left_out=left_out.of_public(store, privacy) if store else None,
        trained_parameters=trains.parameters,
        steps=experiment.steps,
        examples=examples,
        drawn=privacy.drawn,
        protected_rows=size,
        epochs=examples / size,
        mesh=mesh.name,
        devices=mesh.devices,
        **program.costs(examples, size),
        microbatch=microbatch,
        memory_bytes_per_device=peak,
        device_memory_bytes=mesh.memory_bytes,
        fits=peak <= mesh.memory_bytes,
        sampler=experiment.sampler.name,
        adjacency=privacy.adjacency,
        unit=privacy.unit,
        unit_mode=privacy.unit_mode,
        canaries=experiment.audit.places(privacy),
        noise_multiplier=sigma,
        releases=tuple(statement.releases(experiment.clip, experiment.telemetry)) if is_private else (),
        # Of noise that is added to no sum there is no ratio.
        noise_batch_ratio=None if sigma is None or isinstance(mechanism, ForwardNoise) else sigma / largest,
        delta=privacy.delta if is_private else None,
        **_claim(experiment.sampler, experiment.accountant, data, privacy, planned, calibrated.epsilon, facts, reasons, by),
        init=facts.beginning,
        assumptions=tuple(assumptions(data, privacy, experiment.train, experiment.audit, manifest, size, facts)) if is_private else (),
        not_covered=(
            *not_covered(mechanism, experiment.clipping_method, data, privacy),
            *given_protected(experiment.given_protected, facts.begins_from),
        ),
        hints=tuple(hints),
    )


def _claim(
    sampler: Sampler,
    accountant: Accountant,
    data: Data,
    privacy: Privacy,
    planned: Segments,
    alone: dict[str, float],
    facts: RunFacts,
    reasons: list[str],
    by: tuple[str, ...],
) -> dict[str, Any]:
    """Returns guarantee and epsilon of the charges at the `planned` end, empty without privacy; `alone` is that of the run's own steps."""
    is_private = bool(planned)
    # Without charges of origins it is that of the run's own plan.
    epsilon: dict[str, float | None] = dict(alone)
    if is_private and facts.before:
        whole = Spent(accountant, privacy, planned)
        epsilon = {name: whole.epsilon(name) for name in whole.accountants}
    # As in a statement: a number that is not proved is given with its reason, not as a bound.
    why_not = "; ".join(reasons if is_private and reasons else outside_code.sentences(by))
    numbers = [NotABound(name=f"epsilon/{name}", value=value, reason=why_not) for name, value in epsilon.items() if why_not]
    if is_private:
        if sampler.assumed is not None:
            numbers += under_assumed_sampler(sampler, accountant, privacy.delta, planned)
        numbers += as_if_hidden(accountant, privacy.delta, planned)
        numbers += of_one_copy(data, privacy, accountant, planned)
    return {
        "epsilon": {} if why_not else epsilon,
        "epsilon_of_this_run": {} if why_not else dict(alone),
        "unsupported": tuple(numbers),
        "guarantee": outside_code.guarantee(is_private, reasons, by),
        "reasons": tuple(reasons),
    }
