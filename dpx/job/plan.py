"""`job=plan`: what a config would cost and guarantee, before anything runs. Nothing is allocated, and jax looks for no devices unless
`plan.compile=true` asks for the real step to be compiled on simulated devices of the declared mesh."""

import dataclasses
from pathlib import Path
from typing import Any

from dpx.claim import statement
from dpx.claim.calibration import Calibrated, calibrate, differing, plan_of
from dpx.claim.caveats import assumptions, late_choices, little_data, not_covered, reasons_against
from dpx.claim.run_facts import RunFacts, planned_end
from dpx.claim.spent import Spent, as_if_hidden, under_assumed_sampler
from dpx.config.declared_audit import Canaries
from dpx.config.experiment import Experiment
from dpx.console import Console, answer
from dpx.cost.compiled import CompiledStep, MeasuredRun
from dpx.cost.memory import Memory, Trains, by_type, published_flops, recomputed_matmul_flops, step_memory, training_matmul_flops
from dpx.data import left_out
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.init.start import planned_start, receiver_of
from dpx.job import chain_plan, plan_shown
from dpx.job.analyse import inputs, require_analysis
from dpx.job.plan_records import AnalysisInput, AnalysisPlan, PlanDocument, RunPlan, write_plan
from dpx.job.plan_shown import show
from dpx.mechanism.mechanism_protocol import ForwardNoise, Reparametrisation
from dpx.models.shape import count
from dpx.privacy.origins import Origin
from dpx.processes.mesh import simulate_devices
from dpx.statement import outside_code
from dpx.statement.statement_records import NotABound

# Larger microbatches are not faster: matrix products reach full throughput at much smaller sizes.
LARGEST_MICROBATCH = 1024

# What is traced for a plan, by everything that it depends on: points of a sweep, and stages of a chain, mostly share it, and to trace it is
# most of what a plan costs. Bytes of an optimiser's state (`_optimizer_bytes`), and products of a run that trains a part (`_products`).
_STATE_BYTES: dict[str, int] = {}
_PRODUCTS: dict[str, Any] = {}


@declaration
class Plan:
    """Writes `release/plan.json` and prints it as a table. Of an analysis it says which inputs are read and whether they exist.

    Of a chain it plans every stage.

    Attributes:
        analysis: The analysis that the config names, if any.
        compile: Whether the real step is compiled for the mesh; adds what it holds, sends and multiplies, under compiled.
        measure: Whether steps run on this machine, on public or synthetic rows; adds the time of the run, under measured.
        chain: The chain that the config declares, if any.
    """

    analysis: Any = None
    compile: bool = False
    measure: bool = False
    chain: Any = None

    def __post_init__(self) -> None:
        reason = "steps are compiled for simulated devices by the one, and run on this machine's by the other"
        require(not (self.compile and self.measure), "plan.compile=true, plan.measure=true", reason, "Use one of them at a time")
        require_analysis(self.analysis)

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        console = Console(soft_wrap=True)
        show(self.write(experiment, folder), console)
        for line in left_out.lines(folder.private):
            console.print(f"not in plan.json, since it depends on protected texts: {line}", highlight=False)

    def write(self, experiment: Experiment, folder: RunFolder) -> PlanDocument:
        """Writes plan.json and returns its content; prints nothing.

        What is left out of protected texts is written to `private/left_out.json`.
        """
        document = self.document(experiment, folder.fork, folder.path.parent)
        if self.measure and isinstance(document, RunPlan):
            document = dataclasses.replace(document, measured=_measured(experiment, document, folder.made_private()))
        write_plan(folder.made_release(), document)
        if isinstance(document, RunPlan) and (store := _store(experiment)) is not None:
            left_out.keep(folder.made_private(), store)
        answer(to_json(document))
        return document

    def document(self, experiment: Experiment, fork: str | None = None, outputs: Path = Path("outputs")) -> PlanDocument:
        """Returns the content of plan.json.

        `fork` is the `<run folder>@<step>` that the run would resume from, `outputs` the folder of runs.
        """
        if self.chain is not None:
            fix = "Remove it, or plan the stage by itself"
            for name in ("compile", "measure"):
                require(not getattr(self, name), f"plan.{name}=true", "a chain has several programs, and a plan compiles one", fix)
            return chain_plan.plan_of_chain(self.chain, experiment, plan_of_run, outputs)
        if self.analysis is None:
            planned = plan_of_run(experiment, fork)
            by_unit = plan_shown.by_unit(experiment, planned.noise_multiplier, planned.protected_rows)
            planned = dataclasses.replace(planned, noise_by_unit=by_unit)
            return dataclasses.replace(planned, compiled=_compiled(experiment, planned)) if self.compile else planned
        read = tuple(AnalysisInput(**one) for one in inputs(self.analysis))
        return AnalysisPlan(name=experiment.name, analysis=type(self.analysis).__name__, inputs=read, device_hours=0.0)


def plan_of_run(experiment: Experiment, fork: str | None = None) -> RunPlan:
    """Returns every field of plan.json; `fork` is the `<run folder>@<step>` that the run resumes from.

    Raises `ConfigError` if the claim is not valid or the number of rows is not known.
    """
    store = _store(experiment)
    manifest = store.manifest if store else None
    vocabulary = experiment.vocabulary_size
    size = experiment.data.declared_size or (experiment.privacy.population(manifest) if manifest else 0)
    calibrated = calibrate(experiment, size)
    begins = planned_start(experiment.init, receiver_of(experiment), store, fork)
    late = late_choices(differing(begins.plan, plan_of(experiment, calibrated)))
    parameters = count(experiment.task.parameter_shapes(experiment.model, vocabulary))
    trains = trains_of(experiment, parameters, vocabulary)
    examples = sum(batch * steps for batch, steps in calibrated.batch_stages)
    return RunPlan(
        name=experiment.name,
        model=experiment.model.name,
        parameters=parameters,
        vocabulary_size=vocabulary,
        rematerialize=experiment.model.rematerialize,
        attention=experiment.model.attention,
        public_left_out=left_out.of_public(store, experiment.privacy) if store else None,
        trained_parameters=trains.parameters,
        **work(experiment, parameters, vocabulary, examples, calibrated.size),
        **_memory(experiment, trains, vocabulary),
        **_claim(experiment, manifest, calibrated, begins.origins, late),
    )


def trains_of(experiment: Experiment, parameters: int, vocabulary: int) -> Trains:
    """Returns what a run trains; `parameters` are those of its model."""
    if experiment.train.is_all:
        shapes = experiment.task.parameter_shapes(experiment.model, vocabulary)
        mechanism = experiment.mechanism
        summed = mechanism.summed_shapes(shapes) if isinstance(mechanism, Reparametrisation) else shapes
        return Trains(parameters).differentiated_by(shapes, summed)
    from dpx.training.frozen import trains

    return trains(experiment.trained, _objective(experiment, vocabulary), experiment.mechanism)


def _objective(experiment: Experiment, vocabulary: int) -> Any:
    """Returns the run's objective, of which only shapes are read."""
    from dpx.task.mlm import Special
    from dpx.task.objective import objective

    return objective(experiment.model, experiment.task, vocabulary, Special(0, 1, 2, 3, 4))


def _optimizer_bytes(experiment: Experiment, vocabulary: int) -> int:
    """Returns the bytes of the optimiser's state on one device, from its shapes. This imports jax, and takes no device."""
    from dpx.training.frozen import shapes
    from dpx.training.update import state_bytes

    key = repr((experiment.optimizer, experiment.trained, experiment.model, experiment.task, experiment.mesh, vocabulary))
    if key not in _STATE_BYTES:
        traced = shapes(experiment.trained, _objective(experiment, vocabulary))[0]
        _STATE_BYTES[key] = state_bytes(experiment.optimizer, traced, experiment.mesh)
    return _STATE_BYTES[key]


def _compiled(experiment: Experiment, planned: RunPlan) -> CompiledStep:
    simulate_devices(experiment.mesh, experiment.mesh.devices)
    from dpx.training.measure import dry_run

    return dry_run(experiment, planned.vocabulary_size, planned.microbatch)


def _measured(experiment: Experiment, planned: RunPlan, private: Path) -> MeasuredRun:
    from dpx.training.measure import measure

    calibrated = calibrate(experiment, planned.protected_rows)
    return measure(experiment, calibrated, planned.vocabulary_size, _store(experiment), private)


def _store(experiment: Experiment) -> Any:
    """Returns the prepared data; local sources are prepared for it, a download is not started by a plan."""
    data = experiment.data
    if data.declared_size is not None:
        return None
    if data.is_remote:
        raise ConfigError(
            "data.declared_size", "a plan does not download data, so the number of rows is not known", "Set data.declared_size"
        )
    from dpx.data.prepare import prepare

    return prepare(data, experiment.privacy)


def work(experiment: Experiment, parameters: int, vocabulary: int, examples: int, size: int) -> dict[str, Any]:
    """Returns the fields of a plan that say what `examples` draws of `size` rows or units cost."""
    mesh = experiment.mesh
    # A unit costs as much as the most rows it may have: the rest is padding.
    rows = examples * experiment.privacy.rows_per_example
    whole, exact = _products(experiment, vocabulary, rows, size * experiment.privacy.rows_per_example)
    # The rule assumes that every parameter is trained.
    flops = published_flops(parameters, experiment.data.sequence_length) * rows * (exact / whole)
    hours = flops / mesh.flops_per_s / 3600
    typed = _by_type(experiment, float(exact), float(whole))
    seconds = sum(own / mesh.rate(kind) for kind, own in typed.items())  # pyright: ignore[reportArgumentType]
    return {
        "steps": experiment.steps,
        "examples": examples,
        "drawn": experiment.privacy.drawn,
        "protected_rows": size,
        "epochs": examples / size,
        "flops": float(flops),
        "flops_of_products": float(exact),
        "flops_by_type": typed,
        "mesh": mesh.name,
        "devices": mesh.devices,
        "device_hours": hours,
        "device_hours_by_type": seconds / 3600,
        "hours": hours / mesh.devices,
    }


def _by_type(experiment: Experiment, exact: float, whole: float) -> dict[str, float]:
    """Returns the FLOPs of a run's products by type (`dpx.cost.memory.by_type`); `exact` and `whole` are the results of `_products`."""
    # Forward pass, cotangents and weight gradients take a third each; what is frozen has no weight gradient.
    of_weights = whole / 3 if experiment.train.is_all else max(0.0, exact - 2 / 3 * whole)
    return dict(by_type(exact, of_weights, experiment.model.dtype, is_private=experiment.mechanism.clips_gradients))


def _products(experiment: Experiment, vocabulary: int, drawn: int, protected: int) -> tuple[int, int]:
    """Returns the matrix-product FLOPs of a run of `drawn` rows: if all were trained and nothing computed again, and as it is."""
    model, task, length = experiment.model, experiment.task, experiment.data.sequence_length
    one = training_matmul_flops(model, vocabulary, length, task.masked_positions(length), pooled_outputs=task.pooled_outputs)
    if experiment.train.is_all and not isinstance(experiment.mechanism, Reparametrisation):
        return one * drawn, (one + recomputed_matmul_flops(model, length)) * drawn
    from dpx.training.measure import products

    reads_once = not isinstance(experiment.audit, Canaries)
    key = repr((model, task, experiment.trained, experiment.mechanism, vocabulary, length, reads_once))
    if key not in _PRODUCTS:
        _PRODUCTS[key] = products(model, task, experiment.trained, experiment.mechanism, vocabulary, length, reads_once=reads_once)
    each = _PRODUCTS[key]
    return one * drawn, each.drawn_row * drawn + each.protected_row * protected


def _memory(experiment: Experiment, trains: Trains, vocabulary: int) -> dict[str, Any]:
    limit = experiment.mesh.memory_bytes
    state, microbatch = _optimizer_bytes(experiment, vocabulary), experiment.microbatch
    if not isinstance(microbatch, int):
        microbatch = largest_microbatch(experiment, trains, vocabulary, state)
    peak = _step_memory(experiment, trains, vocabulary, microbatch, state).peak
    return {
        "microbatch": microbatch,
        "memory_bytes_per_device": peak,
        "device_memory_bytes": limit,
        "fits": peak <= limit,
    }


def _step_memory(experiment: Experiment, trains: Trains, vocabulary: int, microbatch: int, optimizer_bytes: int | None) -> Memory:
    return step_memory(
        experiment.model,
        trains,
        vocabulary_size=vocabulary,
        sequence_length=experiment.data.sequence_length,
        masked_positions=experiment.task.masked_positions(experiment.data.sequence_length),
        microbatch=microbatch * experiment.privacy.rows_per_example,
        shards=experiment.mesh.shards,
        method=experiment.clipping_method.name if experiment.mechanism.clips_gradients else "plain",
        mechanism_bytes=experiment.mechanism.extra_memory_bytes(trains.parameters, trains.replaced),
        optimizer_bytes=optimizer_bytes,
    )


def largest_microbatch(experiment: Experiment, trains: Trains, vocabulary: int, optimizer_bytes: int | None = None) -> int:
    """Returns the largest power of two whose estimated peak fits the declared device, with a fifth left to the compiler; at least 1.

    `optimizer_bytes`: the optimiser's state on one device, `None` for two float32 moments (`dpx.cost.memory.step_memory`)."""
    size = LARGEST_MICROBATCH
    while size > 1 and _step_memory(experiment, trains, vocabulary, size, optimizer_bytes).peak > 0.8 * experiment.mesh.memory_bytes:
        size //= 2
    return size


def _claim(
    experiment: Experiment, manifest: Any, calibrated: Calibrated, begins_from: tuple[Origin, ...], against: list[str]
) -> dict[str, Any]:
    """Returns guarantee, noise and epsilon; `against` are reasons, in addition to those of the config, why no guarantee is planned."""
    sigma, facts = calibrated.noise_multiplier, RunFacts.of(None, begins_from)
    reasons = [f"mechanism={experiment.mechanism.name}"]
    if experiment.is_private:
        reasons = reasons_against(experiment, manifest) + facts.against + against
    by = outside_code.joined(outside_code.packages_of(experiment), outside_code.packages_of_segments(facts.segments))
    planned = [] if sigma is None else planned_end(experiment, calibrated, None, begins_from)
    # Without charges of origins it is that of the run's own plan.
    epsilon: dict[str, float | None] = dict(calibrated.epsilon)
    if sigma is not None and facts.before:
        whole = Spent(experiment.accountant, experiment.privacy, planned)
        epsilon = {name: whole.epsilon(name) for name in whole.accountants}
    # As in a statement: a number that is not proved is given with its reason, not as a bound.
    why_not = "; ".join(reasons if experiment.is_private and reasons else outside_code.sentences(by))
    numbers = [NotABound(name=f"epsilon/{name}", value=value, reason=why_not) for name, value in epsilon.items() if why_not]
    if sigma is not None:
        if experiment.sampler.assumed is not None:
            numbers += under_assumed_sampler(experiment.sampler, experiment.accountant, experiment.privacy.delta, planned)
        numbers += as_if_hidden(experiment.accountant, experiment.privacy.delta, planned)
    return {
        "sampler": experiment.sampler.name,
        "adjacency": experiment.privacy.adjacency,
        "unit": experiment.privacy.unit,
        "unit_mode": experiment.privacy.unit_mode,
        "canaries": experiment.audit.places(experiment.privacy),
        "noise_multiplier": sigma,
        "releases": tuple(statement.releases(experiment.clip, experiment.telemetry)) if experiment.is_private else (),
        "noise_batch_ratio": _noise_batch_ratio(experiment, calibrated),
        "delta": experiment.privacy.delta if experiment.is_private else None,
        "epsilon": {} if why_not else epsilon,
        "epsilon_of_this_run": {} if why_not else dict(calibrated.epsilon),
        "init": facts.beginning,
        "unsupported": tuple(numbers),
        "guarantee": outside_code.guarantee(experiment.is_private, reasons, by),
        "reasons": tuple(reasons),
        "assumptions": tuple(assumptions(experiment, manifest, calibrated.size, facts)) if experiment.is_private else (),
        "not_covered": tuple(not_covered(experiment.mechanism, experiment.clipping_method, experiment.data, experiment.privacy)),
        "hints": tuple(_hints(experiment, calibrated)),
    }


def _hints(experiment: Experiment, calibrated: Calibrated) -> list[str]:
    largest = max(batch for batch, _ in calibrated.batch_stages)
    privacy, mesh = experiment.privacy, experiment.mesh
    found = little_data(calibrated.size, privacy.drawn, largest, privacy.delta) if experiment.is_private else []
    if mesh.platform in ("gpu", "tpu") and experiment.model.dtype == "float32":
        hours = f"the hours are those of bfloat16 products, whose speed mesh={mesh.name} states"
        found.append(f"{hours}; float32 products take several times as long on this device. Set ++model.dtype=bfloat16")
    return found


def _noise_batch_ratio(experiment: Experiment, calibrated: Calibrated) -> float | None:
    """Returns the noise on the sum divided by the batch size, or `None` if no noise is added to a sum."""
    if calibrated.noise_multiplier is None or isinstance(experiment.mechanism, ForwardNoise):
        return None
    return calibrated.noise_multiplier / max(batch for batch, _ in calibrated.batch_stages)
