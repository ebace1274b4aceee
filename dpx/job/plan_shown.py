"""Prints the plans of `job=plan` for people."""

import dataclasses
import json
from collections.abc import Iterable

from rich import table as rich_table

from dpx.console import Console, duration
from dpx.cost.compiled import CompiledStep
from dpx.data import left_out
from dpx.files.records import to_json
from dpx.job import chain_plan
from dpx.job.plan_records import AnalysisPlan, ChainPlan, PlanDocument, RunPlan
from dpx.pages.analysis_tables import Table
from dpx.privacy import origins
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
    for name, text in () if document.compiled is None else _compiled_lines(document.compiled):
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
    """Returns the rows of the table, without those of the compiled step."""
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
    return [*lines, ("guarantee", document.guarantee)]


def _epsilons(epsilons: dict[str, float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.4g} ({name})" for name, value in epsilons.items()) or "none"


def _compiled_lines(compiled: CompiledStep) -> list[tuple[str, str]]:
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
