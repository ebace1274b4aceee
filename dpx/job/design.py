"""`job=design`: which model, batch, steps and noise for a given epsilon, number of records and compute, from measured losses.

A classification task is designed from measured runs of fine-tuning (`dpx.job.design_fine_tuning`).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dpx.config.declared_init import chosen_by
from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.data.declared_data import Data
from dpx.declaration import ConfigError, declaration, require
from dpx.durable import write_durably
from dpx.files.run_folder import RunFolder, write_json
from dpx.job.explain import public_size
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.packages import supplied
from dpx.pages.analysis_tables import Lines, Picture, Table
from dpx.privacy.declared_privacy import Privacy
from dpx.task.declared_task import Classification
from dpx.task.task_protocol import Pooled

PRIVATE = "this design uses measured losses, which depend on the text they were measured on, and no claim of the designed run covers that"
SHIPPED = (
    "the losses come with dpx: laptop/mckenna_grid, English Wikipedia in rows of 32 tokens of 1,024 word pieces, a seed or two; "
    "other text, tokens or models have other losses"
)
BATCHES = "losses were measured at a physical batch of {:,.0f}; that a batch of equal noise-batch ratio reaches the same is an assumption"


@declaration
class Design:
    """Writes tables, a picture and `release/experiment/design.yaml`, an experiment that runs as it is, for the best configuration.

    delta is `privacy.delta`; the noise of a design is solved on the grid of `accountant.value_discretization_interval`. Of a classification
    task, the experiment of the command is designed, from measured runs of fine-tuning. Raises `ConfigError` for a number that is not
    positive, where nothing inside the measured grid fits, and for other tasks that read a classifier's values.

    Attributes:
        epsilon: The privacy budget; inf means no privacy. For fine-tuning null takes noise.epsilon.
        size: Protected records; null takes data.declared_size, and for fine-tuning the counted number where that is public.
        compute: The compute budget in FLOPs. For fine-tuning, without either budget, what the measured settings take.
        device_hours: The compute budget in hours of the mesh's device, instead of FLOPs.
        measurements: A CSV table (dpx.cost.measured_runs) or a folder of runs, for fine-tuning a CSV table of runs
            (dpx.cost.fine_tuning); null takes the table that comes with dpx.
        match: Beginning of the names of the runs that are read.
        base: Recipe from which the designed experiment is made.
        reach: Up to how many times the measured steps to extrapolate.
        published: Whether the optima that McKenna et al. 2025 print are looked up instead.
    """

    epsilon: float | None = None
    size: int | None = None
    compute: float | None = None
    device_hours: float | None = None
    measurements: str | None = None
    match: str = ""
    base: str = "laptop/mckenna_grid"
    reach: float = 1.0
    published: bool = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "size", "compute", "device_hours"):
            value = getattr(self, name)
            require(value is None or value > 0, f"design.{name}={value}", "must be positive", "Give a number above 0")
        require(
            1 <= self.reach < float("inf"),
            f"design.reach={self.reach}",
            "the reach cannot be smaller than the measured steps",
            "Give 1, or a larger multiple of the measured steps",
        )

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        epsilon, is_tuned = self.epsilon, isinstance(experiment.task, Classification)
        reason = "the predictions of job=design are for single-label classification, and no run of this task was measured"
        fix = "Design task=classification with as many rows, and take its batch, steps and rate as a first try"
        require(is_tuned or not isinstance(experiment.task, Pooled), f"task={experiment.task.name}", reason, fix)
        if epsilon is None and is_tuned and isinstance(experiment.noise, TargetEpsilon):
            epsilon = experiment.noise.epsilon
        require(epsilon is not None, "design.epsilon", "no privacy budget is given", "Give design.epsilon=..., inf for none")
        assert epsilon is not None
        from dpx.config import build, recipes
        from dpx.cost import fine_tuning
        from dpx.cost.designs import Budget
        from dpx.job import design_fine_tuning

        data, privacy = experiment.data, experiment.privacy
        if is_tuned:
            size = self.size if self.size is not None else public_size(data, privacy)
            has_budget = self.compute is not None or self.device_hours is not None
            compute = self._compute(experiment.mesh.flops_per_s) if has_budget else math.inf
            _require_small_delta(privacy, size)
            place, is_own = Path(self.measurements or fine_tuning.shipped()), self.measurements is not None
            table = fine_tuning.read(place)
            found = design_fine_tuning.designed(experiment, size, epsilon, compute, table)
            about = {"compute": compute if has_budget else None, "size": size, "epsilon": epsilon, "delta": privacy.delta}
            _show(design_fine_tuning.tables(found, table, place, is_own), folder, about)
            overrides = recipes.of_this_command()
            if overrides is not None:
                _write(design_fine_tuning.experiment_file(overrides, found, place if is_own else None), folder)
            return

        size = self.size if self.size is not None else data.declared_size
        require(size is not None, "design.size", "the number of protected records is not known", "Give design.size=...")
        assert size is not None
        if self.published:
            return _show([supplied("published_optimum", "design.published=true")(size, epsilon)], folder, {"published": True})
        compute = self._compute(experiment.mesh.flops_per_s)
        _require_small_delta(privacy, size)
        # Read before the search.
        recipe = recipes.plan_config_if_found(self.base, [])
        if recipe is None:
            raise ConfigError(f"design.base={self.base}", "no recipe has this name", "Use a name that job=list shows")
        budget = Budget(compute, size, epsilon, privacy.delta, experiment.accountant.value_discretization_interval)
        tables, best, rate = self._designed(build(recipe)[0].data, data, budget)
        _show(tables, folder, {"compute": compute, "size": size, "epsilon": epsilon, "delta": privacy.delta})
        if recipes.plan_config_if_found(self.base, [f"model={best.model}"]) is None:
            wide_console().print(f"no experiment is written: model={best.model} is not an option here", highlight=False, soft_wrap=True)
            return
        own = None if self.measurements is None else Path(self.measurements)
        _write(experiment_file(best, self.base, budget, rate, data, privacy.allow_large_delta, own), folder)

    def _compute(self, flops_per_s: float) -> float:
        given = [value for value in (self.compute, self.device_hours) if value is not None]
        require(
            len(given) == 1, "design.compute, design.device_hours", "the design needs exactly one of the two limits", "Give one of them"
        )
        return self.compute if self.compute is not None else (self.device_hours or 0.0) * 3600 * flops_per_s

    def _designed(self, of_base: Data, data: Data, budget: Any) -> tuple[list[Table], Any, float]:
        """Returns tables, the best design and the learning rate that won at the node next to it.

        `of_base` is the data of the recipe that the designed experiment is made from, and `data` that of this command.
        """
        from dpx.cost.designs import best_of_each_model
        from dpx.cost.measured_runs import load, shipped
        from dpx.cost.surface import grid_of, surface_of

        measured, not_read = load(self.measurements or shipped(), self.match)
        tokens, batch = float(measured.sequence_length[0]), float(measured.batch_size[0])
        reason = f"losses were measured in rows of {tokens:g} tokens, and it has {of_base.sequence_length}"
        fix = "Use a base with that data.sequence_length, or losses measured with the base's value"
        require(tokens == of_base.sequence_length, f"design.base={self.base}", reason, fix)
        grid = grid_of(measured)
        surface = surface_of(grid, batch, tokens, reach=self.reach).for_epsilon(budget.epsilon)
        designs, asked = best_of_each_model(surface, budget)
        best = designs[0]
        notes = [f"left out of the grid: {line}" for line in (*not_read, *grid.left_out)]
        if data.name != of_base.name and getattr(data.source, "paths", None) is None:
            notes.append(f"the experiment below reads the text of {self.base}: data={data.name} has no paths that it could name")
        tables = self._tables(surface, budget, designs, asked, notes)
        grid = grid.for_epsilon(budget.epsilon)
        nearest = ((grid.parameters_M, best.parameters), (grid.ratios_R, best.noise_batch_ratio), (grid.steps_T, best.steps))
        m, r, t = (0 if len(nodes) == 1 else int(np.argmin(np.abs(np.log(nodes / value)))) for nodes, value in nearest)
        return tables, best, float(grid.rates_MRT[m, r, t])

    def _tables(self, surface: Any, budget: Any, designs: list[Any], asked: Any, more: list[str]) -> list[Table]:
        from dpx.cost.designs import doubled, excess

        best = designs[0]
        near = asked.near()
        notes = (
            *(f"{one.model}: {mark}" for one in designs for mark in one.marks),
            BATCHES.format(surface.batch_size),
            SHIPPED if self.measurements is None else PRIVATE,
            *more,
        )
        columns = ("model", "parameters", "batch", "steps", "sigma", "ratio", "sampler", "loss", "near", "epochs")
        columns += ("tokens_per_parameter", "advantage", "excess")
        rows = [
            (one.model, int(one.parameters), one.batch_size, one.steps, one.noise_multiplier, one.noise_batch_ratio, one.sampler)
            + (one.loss, one.is_near, one.epochs, one.tokens_per_parameter, one.advantage, excess(one, best))
            for one in designs
        ]
        spans = [
            (name, float(values[near].min()), float(values[near].max()))
            for name, values in (("parameters", asked.parameters), ("batch_size", asked.batch_size), ("steps", asked.steps))
        ]
        at_double = dict(doubled(surface, budget))
        own = at_double["nothing"] or best.loss
        bought = [(name, loss, None if loss is None else own - loss) for name, loss in at_double.items()]
        ends = ("more compute gains nothing where the measured steps end",) if at_double["compute"] == at_double["nothing"] else ()
        by_parameters = dict(zip(surface.parameters_M.tolist(), surface.names, strict=True))
        known = np.flatnonzero(np.isfinite(asked.loss))
        curve = sorted((by_parameters[float(asked.parameters[i])], float(asked.batch_size[i]), float(asked.loss[i])) for i in known)
        return [
            Table(
                "designs", columns, tuple(rows), f"epsilon {budget.epsilon:g}, {budget.size:,} records, {budget.compute:.3g} FLOPs", notes
            ),
            Table("near_optimal", ("what", "least", "most"), tuple(spans), f"{len(near)} configurations within 1 % of the least loss"),
            Table("doubled", ("twice_the", "loss", "gain"), tuple(bought), "gain from twice as much", ends),
            Table("curve", ("model", "batch_size", "loss"), tuple(curve), "loss by batch size at this compute"),
        ]


def _write(text: str, folder: RunFolder) -> None:
    write_durably(folder.release / "experiment" / "design.yaml", text)
    command = f"python -m dpx --config-dir {folder.release.absolute()} +experiment=design"
    wide_console().print(f"run it: {command}", highlight=False, soft_wrap=True)


def _require_small_delta(privacy: Privacy, size: int) -> None:
    is_small = privacy.delta < 1 / size or privacy.allow_large_delta
    require(is_small, f"privacy.delta={privacy.delta:g}", f"not below 1/N = {1 / size:g}", "Give privacy.delta=... below it")


def experiment_file(
    best: Any, base: str, budget: Any, rate: float, data: Data, allow_large_delta: bool = False, own: Path | None = None
) -> str:
    """Returns an experiment that trains `best`: `base` with the model, batch, steps, noise and sampler of the branch that won.

    `own` is the place of the user's own measured runs; `None` for the runs that come with dpx, which are of public text. Fixed batches are
    bounded under zero_out only. `base` states its noise by its ratio to the batch.
    """
    is_fixed = best.sampler == "deterministic"
    overrides = {"/model": best.model, "/sampler": "deterministic" if is_fixed else "poisson", "/noise": "noise_batch_ratio"}
    overrides |= {"/accountant": "deterministic" if is_fixed else "pld"}
    # A solved value just meets the target; rounded up, it still does. Zero noise becomes a value so small that float32 loses it.
    ratio = best.noise_batch_ratio * (1 + 1e-9) if best.noise_multiplier > 0 else 2.0**-40
    values: dict[str, Any] = {
        "name": f"design_{best.model}",
        "steps": best.steps,
        "batch_schedule": {"size": best.batch_size},
        "privacy": {"delta": budget.delta, "adjacency": "zero_out", "allow_large_delta": allow_large_delta},
        "data": {"declared_size": budget.size},
        "lr_schedule": {"learning_rate": rate},
        "noise": {"noise_batch_ratio": ratio},
        "hydra": {"mode": "RUN"},
        **({} if own is None else {"chosen_by": chosen_by(own)}),
    }
    if budget.coarse is not None:
        # On a finer grid the experiment would have a little less epsilon than it was designed for.
        values["accountant"] = {"value_discretization_interval": budget.coarse}
    paths = getattr(data.source, "paths", None)
    if paths is not None:
        overrides["/data"] = data.name
        values["data"]["source"] = {"paths": paths if isinstance(paths, str) else list(paths)}
    defaults = [f"/experiment/{base}", *({f"override {group}": option} for group, option in overrides.items()), "_self_"]
    head = "# @package _global_\n# Made by job=design: chosen on measured losses, which its claim does not cover.\n"
    return head + yaml.safe_dump({"defaults": defaults} | values, sort_keys=False)


def _show(tables: list[Table], folder: RunFolder, about: dict[str, Any]) -> None:
    from dpx.pages import pictures

    folder.made_release()
    document = about | {"tables": [table.as_json() for table in tables]}
    write_json(folder.release / "design.json", document)
    answer(document)
    console = wide_console()
    for table in tables:
        table.write_csv(folder.release)
        if table.name != "curve":
            console.print(table.shown())
        for note in table.notes:
            console.print(f"  {note}", highlight=False)
    if any(table.name == "curve" for table in tables):
        panel = Lines(table="curve", x="batch_size", y=("loss",), by="model", x_scale="log", x_label="batch size", y_label="loss (nats)")
        picture = Picture("design", "Predicted loss by batch size, everything at the same compute.", (panel,))
        drawn = pictures.write([picture], tables, folder.release)
        if drawn:
            console.print(drawn, highlight=False, soft_wrap=True)
