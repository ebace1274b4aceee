"""Prints the plans of `job=plan` for people."""

import json
from collections.abc import Iterable

from rich.table import Table

from dpx.console import Console, duration
from dpx.cost.compiled import CompiledStep, MeasuredRun
from dpx.data import left_out
from dpx.files.records import to_json
from dpx.job import chain_plan, plan_units
from dpx.job.plan_records import AnalysisPlan, ChainPlan, PlanDocument, RunPlan
from dpx.privacy import origins
from dpx.statement.outside_code import heading


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
        _show_analysis(document, console)
        return
    if isinstance(document, ChainPlan):
        chain_plan.show(document, console)
        return
    table = Table(title=f"plan of {document.name}", show_header=False, title_justify="left")
    for name, text in _lines(document):
        table.add_row(name, text)
    for name, text in _compiled_lines(document.compiled):
        table.add_row(name, text)
    console.print(table)
    plan_units.show(document.noise_by_unit, console)
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


def _show_analysis(document: AnalysisPlan, console: Console) -> None:
    console.print(f"plan of {document.name}: the analysis {document.analysis}, nothing is trained")
    for entry in document.inputs:
        console.print(f"  reads {entry.path}: {'there' if entry.exists else 'not there'}", highlight=False)


def _lines(document: RunPlan) -> list[tuple[str, str]]:
    sigma = document.noise_multiplier
    trained = document.trained_parameters
    part = "" if trained == document.parameters else f", {trained:,} trained"
    share = "" if trained == document.parameters else ", by the share of products that what trains needs"
    fits = "" if document.fits else "  (more than the device has)"
    again = "" if document.rematerialize == "none" else ", layers computed again"
    return [
        ("model", f"{document.model}, {document.parameters:,} parameters{part} at vocabulary {document.vocabulary_size:,}"),
        ("steps", f"{document.steps:,}"),
        ("examples", f"{document.examples:,} = {document.epochs:.2f} epochs of {document.protected_rows:,} {document.drawn}s"),
        ("FLOPs", f"{document.flops:.3g} (6 M S per example{share}{again}); {document.flops_of_products:.3g} counting matrix products"),
        ("devices", f"{document.devices} ({document.mesh})"),
        ("time by arithmetic", _by_arithmetic(document)),
        ("time by type of product", _by_type(document)),
        *_measured_lines(document.measured),
        ("memory per device", f"{document.memory_bytes_per_device / 1e9:.2f} GB at microbatch {document.microbatch}{again}{fits}"),
        ("noise multiplier", "none" if sigma is None else f"{sigma:.5g}"),
        ("noise-batch ratio", "none" if document.noise_batch_ratio is None else f"{document.noise_batch_ratio:.4g}"),
        ("delta", "none" if document.delta is None else f"{document.delta:.4g}"),
        ("epsilon", _epsilons(document.epsilon)),
        *_start_lines(document),
        ("guarantee", document.guarantee),
    ]


def _by_arithmetic(document: RunPlan) -> str:
    each = "" if document.devices == 1 else f" on each of {document.devices} devices"
    left_out = "compiling, padding and evaluation are not in it" + ("" if document.measured else "; plan.measure=true measures")
    return f"{duration(document.hours * 3600)}{each} at the declared speed; {left_out}"


def _by_type(document: RunPlan) -> str:
    types = {"bfloat16": "bfloat16", "float32": "float32", "float32_highest": "float32 at full precision"}
    each = ", ".join(f"{flops:.3g} FLOPs in {types[kind]}" for kind, flops in document.flops_by_type.items())
    return f"{duration(document.device_hours_by_type / document.devices * 3600)} for {each}"


def _measured_lines(measured: MeasuredRun | None) -> list[tuple[str, str]]:
    if measured is None:
        return []
    parts = [f"compiling {duration(measured.compile_s)}", f"{measured.evaluations} evaluations of {duration(measured.evaluation_s)}"]
    parts += [f"reading every text once {duration(measured.read_once_s)}"] if measured.read_once_s else []
    parts.append(f"{measured.saves} checkpoints of {duration(measured.save_s)}")
    step = f"{duration(measured.step_s)} a step of {measured.batch_size:,}"
    where = f"{measured.devices} x {measured.device}, {measured.rows} rows"
    return [("time measured here", f"{duration(measured.run_s)}: {', '.join([step, *parts])} ({where})")]


def _epsilons(epsilons: dict[str, float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.4g} ({name})" for name, value in epsilons.items()) or "none"


def _start_lines(document: RunPlan) -> list[tuple[str, str]]:
    """Returns the lines about the run's origins, and epsilon without them."""
    beginning = document.init
    lines = [(origins.OWED[one.kind], origins.in_words(one)) for one in beginning.origins]
    alone = f"{_epsilons(document.epsilon_of_this_run)}, of this run without those; noise.epsilon is the target for this number"
    return [*lines, ("epsilon of this run's steps", alone)] if origins.are_composed(beginning) else lines


def _compiled_lines(compiled: CompiledStep | None) -> list[tuple[str, str]]:
    if compiled is None:
        return []
    programs = compiled.programs.items()
    held = ", ".join(f"{name} {sum(sizes.values()) / 1e9:.2f}" for name, sizes in programs)
    lines = [
        ("compiled, GB per device", f"{compiled.peak_bytes_per_device / 1e9:.2f} at most ({held})"),
        ("compiled FLOPs", f"{compiled.flops_per_device_and_microbatch:.3g} of a microbatch of {compiled.microbatch} on one device"),
    ]
    for name, crossing in compiled.collectives.items():
        kinds = [
            f"{one.number} {one.kind} along {'x'.join(one.axes)}{' in a loop' if one.in_loop else ''} of {one.elements:,} numbers"
            for one in crossing
        ]
        lines.append((f"collectives, {name}", "; ".join(kinds) or "none"))
    return lines
