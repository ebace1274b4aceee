"""`job=plan`: what a config would cost and guarantee, before anything runs (`dpx.job.run_plan`).

Nothing is allocated, and jax looks for no devices unless `plan.compile=true` asks for the real step to be compiled on simulated devices of
the declared mesh. Where a unit has several rows, a plan has the noise by `rows_per_unit_max` and `unit_mode` too.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dpx.claim.calibration import calibrate
from dpx.config.experiment import Experiment
from dpx.console import Console, answer
from dpx.data import left_out
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job import chain_plan
from dpx.job.analyse import inputs, require_analysis
from dpx.job.plan_records import AnalysisInput, AnalysisPlan, PlanDocument, RunPlan, UnitNoise, write_plan
from dpx.job.plan_shown import show
from dpx.job.run_plan import plan_of_run, prepared
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.privacy.declared_privacy import Privacy
from dpx.processes.mesh import simulate_devices

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
            from dpx.training.measure import measure

            calibrated, store = calibrate(experiment, document.protected_rows), prepared(experiment.data, experiment.privacy)
            measured = measure(experiment, calibrated, document.vocabulary_size, store, folder.made_private())
            document = dataclasses.replace(document, measured=measured)
        write_plan(folder.made_release(), document)
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
        by_unit = noise_by_unit(experiment, planned.noise_multiplier, planned.protected_rows)
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
        from dpx.training.measure import dry_run

        return dataclasses.replace(planned, compiled=dry_run(experiment, planned.vocabulary_size, planned.microbatch))


def noise_by_unit(experiment: Experiment, planned: float | None, size: int) -> tuple[UnitNoise, ...]:
    """Returns the noise for one row a unit, the declared and twice as many, in each mode, at the declared epsilon, steps, batch and N.

    A step then draws the same share of rows or units everywhere, and nothing is counted that the declared run would not count (`size` is
    its N, `planned` its noise multiplier). Empty for units of one row, and for noise that epsilon does not set. A setting without
    accounting has the noise `None`.
    """
    privacy = experiment.privacy
    if privacy.unit == "row" or not experiment.is_private or not isinstance(experiment.noise, TargetEpsilon):
        return ()
    coarse = dataclasses.replace(experiment, accountant=dataclasses.replace(experiment.accountant, **COARSE))
    solved: dict[tuple[int, bool], float | None] = {_cost(privacy): planned}
    found = []
    for rows in sorted({1, privacy.rows_per_unit_max, 2 * privacy.rows_per_unit_max}):
        for mode in ("group", "sample_units", "one_row"):
            setting = dataclasses.replace(privacy, rows_per_unit_max=rows, unit_mode=mode)
            if _cost(setting) not in solved:
                try:
                    solved[_cost(setting)] = calibrate(dataclasses.replace(coarse, privacy=setting), size).noise_multiplier
                except ConfigError:
                    solved[_cost(setting)] = None
            sigma, parts = solved[_cost(setting)], rows if mode == "group" else 1
            each = None if sigma is None else sigma / parts
            found.append(UnitNoise(rows_per_unit_max=rows, unit_mode=mode, noise_multiplier=sigma, noise_per_part=each))
    return tuple(found)


def _cost(privacy: Privacy) -> tuple[int, bool]:
    """Returns what the noise depends on: how many parts a unit adds to sums at most, and whether rows are drawn one by one."""
    return (privacy.rows_per_unit_max, True) if privacy.unit_mode == "group" else (1, False)
