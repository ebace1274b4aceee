"""`job=plan`: what a config would cost and guarantee, before anything runs (`dpx.job.run_plan`), written and printed.

Nothing is allocated, and jax looks for no devices unless `plan.compile=true` asks for the real step to be compiled on simulated devices of
the declared mesh. Where a unit has several rows, a plan has the noise by `rows_per_unit_max` and `unit_mode` too.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import table as rich_table

from dpx.claim.calibration import calibrate
from dpx.config.experiment import Experiment
from dpx.console import Console, answer, duration
from dpx.data import left_out
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder, write_json
from dpx.job import chain_plan
from dpx.job.report import inputs, require_analysis
from dpx.job.run_plan import PLAN, AnalysisInput, AnalysisPlan, ChainPlan, PlanDocument, RunPlan, UnitNoise, plan_of_run, prepared
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.pages.analysis_tables import Table
from dpx.privacy import origins
from dpx.privacy.declared_privacy import Privacy
from dpx.processes.mesh import simulate_devices
from dpx.statement.outside_code import heading

NOTE = (
    "group clips each row, so a unit with all its rows adds that many parts to a sum; the other modes add one part: sample_units from all "
    "rows of a unit, one_row from a single row. noise_per_part is the noise multiplier divided by the parts: where units have that many "
    "rows, less is better. Settings other than the declared one are solved on a coarse grid and may be a percent too high"
)


def show_points(plans: Iterable[tuple[str, PlanDocument]], console: Console) -> None:
    """Prints the plans of a sweep, equal ones once, with the points that they hold for. `plans`: each point, as text, and its plan."""
    points: dict[str, tuple[PlanDocument, list[str]]] = {}
    for point, document in plans:
        points.setdefault(json.dumps(to_json(document), sort_keys=True), (document, []))[1].append(point)
    for document, equal in points.values():
        show(document, console)
        count = "one point" if len(equal) == 1 else f"{len(equal)} points"
        console.print(f"This plan holds for {count}: {'; '.join(equal)}\n", highlight=False, markup=False)


def show(document: PlanDocument, console: Console) -> None:
    """Prints the plan for people."""
    if isinstance(document, AnalysisPlan):
        console.print(f"plan of {document.name}: the analysis {document.analysis}, nothing is trained")
        for entry in document.inputs:
            console.print(f"  reads {entry.path}: {'there' if entry.exists else 'not there'}", highlight=False)
        return
    if isinstance(document, ChainPlan):
        chain_plan.show(document, console)
        return
    table = rich_table.Table(title=f"plan of {document.name}", show_header=False, title_justify="left")
    for name, text in _lines(document):
        table.add_row(name, text)
    console.print(table)
    if document.noise_by_unit:
        rows = [{field.name: getattr(one, field.name) for field in dataclasses.fields(one)} for one in document.noise_by_unit]
        console.print(Table.from_rows("noise_by_unit", rows, "noise by rows of a unit, at this epsilon, batch, steps and N").shown())
        console.print(f"  {NOTE}", highlight=False)
    for one in document.unsupported:
        value = "infinite" if one.value is None else f"{one.value:.4g}"
        console.print(f"{heading(one.name, document.guarantee)}: {value} ({one.reason})", highlight=False)
    if document.public_left_out is not None:
        for line in left_out.in_words(document.public_left_out, "public", "would be"):
            console.print(line, highlight=False)
    for line in document.hints:
        console.print(f"hint: {line}", highlight=False)
    for name, sentences in (("reasons", document.reasons), ("assumptions", document.assumptions), ("not covered", document.not_covered)):
        if sentences:
            console.print(f"{name}:")
            for line in sentences:
                console.print(f"  - {line}", highlight=False)


def _lines(document: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows of the table."""
    sigma, trained, measured, beginning = document.noise_multiplier, document.trained_parameters, document.measured, document.init
    part = "" if trained == document.parameters else f", {trained:,} trained"
    share = "" if trained == document.parameters else ", by the share of products that what trains needs"
    fits = "" if document.fits else "  (more than the device has)"
    again = "" if document.rematerialize == "none" else ", layers computed again"
    each = "" if document.devices == 1 else f" on each of {document.devices} devices"
    untimed = "compiling, padding and evaluation are not in it" + ("" if measured else "; plan.measure=true measures")
    types = {"bfloat16": "bfloat16", "float32": "float32", "float32_highest": "float32 at full precision"}
    typed = ", ".join(f"{flops:.3g} FLOPs in {types[kind]}" for kind, flops in document.flops_by_type.items())
    lines = [
        ("model", f"{document.model}, {document.parameters:,} parameters{part} at vocabulary {document.vocabulary_size:,}"),
        ("steps", f"{document.steps:,}"),
        ("examples", f"{document.examples:,} = {document.epochs:.2f} epochs of {document.protected_rows:,} {document.drawn}s"),
        ("FLOPs", f"{document.flops:.3g} (6 M S per example{share}{again}); {document.flops_of_products:.3g} counting matrix products"),
        ("devices", f"{document.devices} ({document.mesh})"),
        ("time by arithmetic", f"{duration(document.hours * 3600)}{each} at the declared speed; {untimed}"),
        ("time by type of product", f"{duration(document.device_hours_by_type / document.devices * 3600)} for {typed}"),
    ]
    if measured is not None:
        parts = [f"{duration(measured.step_s)} a step of {measured.batch_size:,}", f"compiling {duration(measured.compile_s)}"]
        parts.append(f"{measured.evaluations} evaluations of {duration(measured.evaluation_s)}")
        parts += [f"reading every text once {duration(measured.read_once_s)}"] if measured.read_once_s else []
        parts.append(f"{measured.saves} checkpoints of {duration(measured.save_s)}")
        where = f"{measured.devices} x {measured.device}, {measured.rows} rows"
        lines.append(("time measured here", f"{duration(measured.run_s)}: {', '.join(parts)} ({where})"))
    lines += [
        ("memory per device", f"{document.memory_bytes_per_device / 1e9:.2f} GB at microbatch {document.microbatch}{again}{fits}"),
        ("noise multiplier", "none" if sigma is None else f"{sigma:.5g}"),
        ("noise-batch ratio", "none" if document.noise_batch_ratio is None else f"{document.noise_batch_ratio:.4g}"),
        ("delta", "none" if document.delta is None else f"{document.delta:.4g}"),
        ("epsilon", _epsilons(document.epsilon)),
        *((origins.OWED[one.kind], origins.in_words(one)) for one in beginning.origins),
    ]
    if any(one.is_composed for one in beginning.origins):
        alone = f"{_epsilons(document.epsilon_of_this_run)}, of this run without those; noise.epsilon is the target for this number"
        lines.append(("epsilon of this run's steps", alone))
    lines.append(("guarantee", document.guarantee))
    if (compiled := document.compiled) is None:
        return lines
    held = ", ".join(f"{name} {sum(sizes.values()) / 1e9:.2f}" for name, sizes in compiled.programs.items())
    of_microbatch = f"of a microbatch of {compiled.microbatch} on one device"
    lines += [
        ("compiled, GB per device", f"{compiled.peak_bytes_per_device / 1e9:.2f} at most ({held})"),
        ("compiled FLOPs", f"{compiled.flops_per_device_and_microbatch:.3g} {of_microbatch}"),
    ]
    for name, crossing in compiled.collectives.items():
        kinds = [
            f"{one.number} {one.kind} along {'x'.join(one.axes)}{' in a loop' if one.in_loop else ''} of {one.elements:,} numbers"
            for one in crossing
        ]
        lines.append((f"collectives, {name}", "; ".join(kinds) or "none"))
    return lines


def _epsilons(epsilons: dict[str, float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.4g} ({name})" for name, value in epsilons.items()) or "none"


# Of the loss grid: minutes become seconds, and the noise is up to about one percent more.
COARSE = {"value_discretization_interval": 2e-2}


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
            from dpx.job.measure import measure

            calibrated, store = calibrate(experiment.claim, document.protected_rows), prepared(experiment.data, experiment.privacy)
            measured = measure(experiment, calibrated, document.vocabulary_size, store, folder.made_private())
            document = dataclasses.replace(document, measured=measured)
        write_json(folder.made_release() / PLAN, to_json(document))
        if isinstance(document, RunPlan) and (store := prepared(experiment.data, experiment.privacy)) is not None:
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
            return chain_plan.plan_of_chain(self.chain, experiment.name, experiment.replicate, outputs)
        if self.analysis is not None:
            read = tuple(AnalysisInput(**one) for one in inputs(self.analysis))
            return AnalysisPlan(name=experiment.name, analysis=type(self.analysis).__name__, inputs=read, device_hours=0.0)
        planned = plan_of_run(experiment, fork)
        if experiment.is_private and isinstance(experiment.noise, TargetEpsilon):
            coarse = dataclasses.replace(experiment.claim, accountant=dataclasses.replace(experiment.accountant, **COARSE))

            def solved(privacy: Privacy) -> float | None:
                return calibrate(dataclasses.replace(coarse, privacy=privacy), planned.protected_rows).noise_multiplier

            by_unit = noise_by_unit(experiment.privacy, planned.noise_multiplier, solved)
            planned = dataclasses.replace(planned, noise_by_unit=by_unit)
        if not self.compile:
            return planned
        simulate_devices(experiment.mesh, experiment.mesh.devices)
        require(
            experiment.mechanism.is_independent_gaussian or not experiment.is_private,
            f"plan.compile=true, mechanism={experiment.mechanism.name}",
            "dpx can compile a step without data only if its noise is independent",
            "Use mechanism=dp_sgd, or use plan.compile=false",
        )
        from dpx.job.measure import dry_run
        from dpx.task.mlm import Special
        from dpx.task.objective import objective
        from dpx.training.microbatch import synthetic_rows
        from dpx.training.step import make_step

        size, task, mesh = planned.vocabulary_size, experiment.task, experiment.mesh
        subject = objective(experiment.model, task, size, Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4))
        step = make_step(experiment.one_step, subject, mesh.make(), planned.microbatch)
        row = synthetic_rows(task, 1, experiment.data.sequence_length, size)
        read = experiment.mechanism, experiment.clip.clipping_norm, experiment.privacy.rows_per_example
        return dataclasses.replace(planned, compiled=dry_run(step, row, *read, mesh, planned.microbatch))


def noise_by_unit(privacy: Privacy, planned: float | None, solved: Callable[[Privacy], float | None]) -> tuple[UnitNoise, ...]:
    """Returns the noise for one row a unit, the declared and twice as many, in each mode, at the declared epsilon, steps, batch and N.

    A step then draws the same share of rows or units everywhere, and nothing is counted that the declared run would not count. `planned` is
    its noise multiplier, and `solved` returns that of another setting; where it raises `ConfigError`, the setting has no accounting, and
    the noise is `None`. Empty for units of one row.
    """
    if privacy.unit == "row":
        return ()
    known: dict[tuple[int, bool], float | None] = {_cost(privacy): planned}
    found = []
    for rows in sorted({1, privacy.rows_per_unit_max, 2 * privacy.rows_per_unit_max}):
        for mode in ("group", "sample_units", "one_row"):
            setting = dataclasses.replace(privacy, rows_per_unit_max=rows, unit_mode=mode)
            if _cost(setting) not in known:
                known[_cost(setting)] = None
                with suppress(ConfigError):
                    known[_cost(setting)] = solved(setting)
            sigma, parts = known[_cost(setting)], rows if mode == "group" else 1
            each = None if sigma is None else sigma / parts
            found.append(UnitNoise(rows_per_unit_max=rows, unit_mode=mode, noise_multiplier=sigma, noise_per_part=each))
    return tuple(found)


def _cost(privacy: Privacy) -> tuple[int, bool]:
    """Returns what the noise depends on: how many parts a unit adds to sums at most, and whether rows are drawn one by one."""
    return (privacy.rows_per_unit_max, True) if privacy.unit_mode == "group" else (1, False)
