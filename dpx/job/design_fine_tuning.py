"""`job=design` of a classification task: batch, steps, rate, clipping norm and warm-up of fine-tuning, from measured runs."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from dpx.config.declared_init import chosen_by
from dpx.config.experiment import Experiment
from dpx.cost import fine_tuning
from dpx.cost.fine_tuning import Asked, Choice, Expected, Measured
from dpx.declaration import require
from dpx.files.results import interval
from dpx.job.run_plan import Program, RunPlan, plan_of_run
from dpx.mechanism.clip import Flat
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.optimizer import Adam
from dpx.optimizer.lr_schedule import WarmUpThen
from dpx.pages.analysis_tables import Table
from dpx.sampler.batch_schedule import Constant

WARMUP = 0.1
# With another option of these groups the design would not be what was measured.
OPTIONS = {"batch_schedule": "constant", "lr_schedule": "linear", "clip": "flat", "noise": "target_epsilon", "optimizer": "adam"}
OPTIMIZER = Adam(beta1=0.9, beta2=0.98, eps=1e-11, weight_decay=0.1)
# Groups and values of the command that the designed experiment replaces, or that are of this job alone.
NOT_KEPT = {"job", "design", "hydra", "name", "steps", "tune", *OPTIONS}
OWN = (
    "the measured runs are yours: if they read this data, the settings tell of it without noise, so the designed run has no guarantee; add "
    "chosen_by.provenance=public if you vouch that no protected data was read for them"
)


@dataclasses.dataclass(frozen=True)
class Designed:
    """A designed experiment, its plan, what it was chosen from, and what it is expected to reach."""

    experiment: Experiment
    plan: RunPlan
    asked: Asked
    choice: Choice
    expected: list[Expected]

    @property
    def batch(self) -> int:
        return self.plan.examples // self.plan.steps

    @property
    def snrs(self) -> list[float]:
        """Returns the gradient-SNR that a step would have with the gradients of each measured condition, ascending."""
        noise = (self.plan.noise_multiplier or math.nan) * math.sqrt(self.asked.parameters)
        return sorted(mean * self.batch / noise for mean in self.choice.clipped_means)


def designed(experiment: Experiment, size: int, epsilon: float, compute: float, table: list[Measured]) -> Designed:
    """Returns the design for `size` rows or units at `epsilon` from the runs of `table`.

    Its plan takes at most `compute` FLOPs; with inf the measured runs limit the passes.
    Raises `ConfigError` for parts of a run that no measured run had, and for a budget below a step.
    """
    fix = "Design it with what was measured, and change that afterwards"
    for name, part, measured in (
        ("mechanism", experiment.mechanism.name, "dp_sgd"),
        ("sampler", experiment.sampler.name, "poisson"),
        ("optimizer", experiment.optimizer.name, Adam.name),
    ):
        require(part == measured, f"{name}={part}", f"the measured runs of fine-tuning have {name}={measured}", fix)
    require(math.isfinite(epsilon), f"design.epsilon={epsilon}", "the measured runs of fine-tuning have noise", "Give a finite epsilon")
    parts = experiment.trained, experiment.mechanism, experiment.clipping_method, experiment.audit
    program = Program(experiment.fitted, *parts, experiment.mesh)
    once, twice = (program.costs(passes * size, size)["flops"] for passes in (1, 2))
    passes = 1 + (compute - once) / (twice - once)
    fix = f"Give at least {once:.3g} FLOPs, {once / experiment.mesh.flops_per_s / 3600:.3g} device hours, for one pass, or no budget"
    require(passes > 0, f"a budget of {compute:.3g} FLOPs", "does not pay for a step over these rows", fix)
    trained = program.trains().parameters
    signal = fine_tuning.signal(size, epsilon, experiment.privacy.delta, trained)
    asked = Asked(experiment.train.kind, trained, passes, signal, fine_tuning.head_of(experiment.model))
    choice = fine_tuning.choose(table, asked)
    steps = choice.point.steps(choice.passes)
    chosen = dataclasses.replace(
        experiment,
        name=f"{experiment.name}_design",
        steps=steps,
        batch_schedule=Constant(size=min(size, max(1, round(choice.point.share * size)))),
        lr_schedule=WarmUpThen(learning_rate=float(f"{2 * choice.point.path / steps:.2g}"), warmup_steps=WARMUP, decay="linear"),
        clip=Flat(clipping_norm=1.0),
        noise=TargetEpsilon(epsilon=epsilon),
        optimizer=OPTIMIZER,
        data=dataclasses.replace(experiment.data, declared_size=size),
    )
    return Designed(chosen, plan_of_run(chosen), asked, choice, fine_tuning.expected(choice, asked))


def tables(found: Designed, table: list[Measured], place: Path, is_own: bool) -> list[Table]:
    """Returns the design, the accuracy of each measured task at its signal, and what the other settings are expected to lose."""
    plan, schedule, point = found.plan, found.experiment.lr_schedule, found.choice.point
    assert isinstance(schedule, WarmUpThen)
    values = {
        "train": found.asked.trained,
        "batch": found.batch,
        "steps": plan.steps,
        "rate": schedule.learning_rate,
        "warmup": WARMUP,
        "clipping_norm": 1.0,
        "noise_multiplier": plan.noise_multiplier,
        "passes": plan.epochs,
        "device_hours": plan.device_hours,
        "signal": found.asked.signal,
        "snr_least": min(found.snrs, default=None),
        "snr_most": max(found.snrs, default=None),
    }
    rows = []
    for one in found.expected:
        low, high = interval(one.accuracy, one.near.rows)
        run = f"N {one.near.size:,}, epsilon {one.near.epsilon:g}: {one.near.accuracy:.1%}"
        row = {"task": one.task, "accuracy": one.accuracy, "low": low, "high": high, "rows": one.near.rows, "baseline": one.near.baseline}
        rows.append(row | {"above": one.is_above, "extrapolated": one.is_extrapolated, "nearest_run": run})
    others = [
        setting._asdict() | {"accuracy_lost": lost} for setting, lost in sorted(found.choice.lost.items(), key=lambda one: one[1])[:10]
    ]
    chosen = f"{plan.protected_rows:,} {plan.drawn}s, epsilon {found.experiment.noise.epsilon:g}"  # type: ignore[union-attr]
    notes = [*_notes(found, table, place), *([OWN] if is_own else [])]
    return [
        Table.from_rows("designs", [values], f"fine-tuning designed for {chosen}", notes),
        Table.from_rows("expected", rows, "accuracy of measured tasks with these settings, at this signal N mu / sqrt(d)"),
        Table.from_rows("settings", others, f"accuracy lost to the best; chosen: share {point.share:g}, path {point.path:g}"),
    ]


def _notes(found: Designed, table: list[Measured], place: Path) -> Iterator[str]:
    rows, asked = found.choice.measured, found.asked
    runs, tasks = sum(row.runs for row in rows), ", ".join(sorted({row.task for row in rows}))
    yield f"chosen by {runs:,} measured runs of train={asked.trained} in {place.name}: {tasks}"
    above = [one.task for one in found.expected if one.is_above]
    most_frequent = "always answering the most frequent class"
    if above:
        of_all = f"{len(above)} of {len(found.expected)} measured tasks"
        yield f"above {most_frequent}, by its 95 % interval, at this signal: {of_all} ({', '.join(above)}); yours may be harder"
    else:
        yield f"nothing is above {most_frequent} at this epsilon and N: no measured task was. Use more rows or a larger epsilon"

    least, most = min(row.signal for row in rows), max(row.signal for row in rows)
    if not least <= asked.signal <= most:
        yield f"extrapolates: the signal {asked.signal:.3g} is outside the measured {least:.3g} to {most:.3g}"
    if found.choice.passes < found.choice.point.passes:
        paid, shortest = asked.passes, found.choice.point.passes
        yield f"extrapolates: the budget pays {paid:.3g} passes, and the shortest measured runs have {shortest:.3g}"
    checkpoints, checkpoint = {row.checkpoint for row in rows}, Path(str(getattr(found.experiment.init, "path", None))).name
    if checkpoint not in checkpoints:
        yield f"extrapolates: the checkpoint {checkpoint} may differ from the measured {', '.join(sorted(checkpoints))}"
    if asked.parameters > 2 * (most := max(row.parameters for row in rows)):
        fewest = "train=last_layer of new weights trains fewest"
        yield f"extrapolates: {asked.parameters:,} parameters are trained, {most:,} in the measured runs; {fewest}"
    if heads := sorted({row.head for row in rows} - {asked.head}):
        yield f"extrapolates: the head ({asked.head}) was not measured with train={asked.trained}; measured is {', '.join(heads)}"
    if (classes := getattr(found.experiment.task, "classes", 2)) != 2:
        yield f"extrapolates: measured tasks have two classes, this one {classes}"
    if (settings := len({row.point for row in rows})) < 12:
        yield f"extrapolates: only {settings} settings were measured with train={asked.trained}"

    # Of each other trained part, the most accurate of the runs whose task and epsilon are those of the run nearest to this design.
    near = min(rows, key=lambda row: abs(math.log(row.signal / asked.signal)))
    for kind in sorted({row.trained for row in table} - {asked.trained}):
        same = [row for row in table if row.trained == kind and row.task == near.task and row.epsilon == near.epsilon]
        if same:
            best = max(same, key=lambda row: row.accuracy)
            yield f"train={kind} reached {best.accuracy:.1%} on {best.task} (N {best.size:,}, epsilon {best.epsilon:g}, {best.runs} runs)"


def experiment_file(overrides: Sequence[str], found: Designed, own: Path | None) -> str:
    """Returns an experiment that trains the design: what the command's `overrides` say, with the designed values in place of theirs.

    `own` is the place of the user's own measured runs; `None` for the runs that come with dpx.
    """
    from dpx.config import recipes

    chosen, schedule, noise = found.experiment, found.experiment.lr_schedule, found.experiment.noise
    assert isinstance(schedule, WarmUpThen) and isinstance(noise, TargetEpsilon)
    values = {
        "name": chosen.name,
        "steps": chosen.steps,
        "batch_schedule.size": found.batch,
        "lr_schedule.learning_rate": schedule.learning_rate,
        "lr_schedule.warmup_steps": schedule.warmup_steps,
        "clip.clipping_norm": 1.0,
        "noise.epsilon": noise.epsilon,
        **{f"optimizer.{name}": value for name, value in dataclasses.asdict(OPTIMIZER).items()},
    }
    values |= {} if own is None else {"chosen_by": chosen_by(own)}
    head = "# @package _global_\n# Made by job=design from measured runs of fine-tuning.\n"
    return head + yaml.safe_dump(recipes.recipe_of(overrides, NOT_KEPT, OPTIONS, values), sort_keys=False)
