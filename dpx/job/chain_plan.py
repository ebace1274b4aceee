"""The plan of a chain: a plan of each stage, and what all of them together would protect."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dpx.claim.calibration import Entries, calibrate
from dpx.config.declared_chain import Chain, declared
from dpx.config.declared_init import FromRun, RandomStart
from dpx.console import Console, duration, figure
from dpx.data import learnt_from
from dpx.data.prepare import prepare
from dpx.data.protected_units import unit_facts, vocabulary_source
from dpx.data.store import VOCABULARY
from dpx.init import chain_claim
from dpx.init.chain_claim import StageRelease
from dpx.init.start import Held, planned_start, vocabulary_of
from dpx.job import chain_stages
from dpx.job.chain_stages import Runs, StageRun, composed, fitted_by
from dpx.job.run_plan import ChainPlan, RunPlan, StagePlan, plan_of_run
from dpx.privacy.origins import Origin, ParentClaim, VocabularyFacts
from dpx.statement.chain_seal import ChainClaim


def plan_of_chain(node: Any, name: str, replicate: int, outputs: Path) -> ChainPlan:
    """Returns every field of the plan of the chain `name`; `outputs` holds the folders of runs.

    Raises `ConfigError` as the chain itself does, and where a stage cannot be planned."""
    chain = declared(node)
    runs = composed(chain, name, replicate, outputs)
    stages: list[StagePlan] = []
    releases: dict[str, StageRelease] = {}
    for run in (run for each in runs.values() for run in each):
        one = chain.stages[run.stage]
        is_over, alone = chain_stages.is_finished(run), alone_of(chain, run, runs)
        planned = None if one.job == "prepare" else plan_of_run(alone.experiment)
        releases[run.label] = chain_stages.release_of(run) if is_over else _planned(chain, run, alone, planned, runs, releases)
        stages.append(
            StagePlan(
                stage=run.stage,
                point=run.point,
                folder=run.folder.name,
                init=one.init,
                vocabulary=one.vocabulary or one.init,
                state="finished" if is_over else "to_run",
                stale=tuple(chain_stages.stale(run, outputs)) if one.feeds and not is_over else (),
                plan=planned,
            )
        )
    hours = sum((one.plan.device_hours for one in stages if one.plan is not None and one.state == "to_run"), 0.0)
    return ChainPlan(name=name, device_hours=hours, claim=chain_claim.claim(chain, list(releases.values())), stages=tuple(stages))


def alone_of(chain: Chain, run: StageRun, runs: Runs) -> StageRun:
    """Returns the stage as it can be planned now: without the weights of a stage that has not run, and with the vocabulary where that lies
    now.
    """
    experiment, stage = run.experiment, chain.stages[run.stage]
    if stage.init is not None and not chain_stages.is_finished(runs[stage.init][0]):
        experiment = dataclasses.replace(experiment, init=RandomStart())
    fed, vocabulary = stage.vocabulary or stage.init, experiment.data.vocabulary
    if fed is None or vocabulary.path is None or Path(vocabulary.path).exists():
        return run._replace(experiment=experiment)
    if experiment.data.declared_size is not None:
        # No text is read, so that its origins are not known to the stage; the claim of the chain has them.
        found = dataclasses.replace(vocabulary, disjoint_from=())
    else:
        source = alone_of(chain, runs[fed][0], runs).experiment
        store = prepare(source.data, source.privacy)
        # What is declared of a text that a stage keeps is declared of the text itself.
        apart = [store.manifest.name] if vocabulary.disjoint_from else []
        found = dataclasses.replace(vocabulary, path=str(store.folder / VOCABULARY), disjoint_from=apart)
    data = dataclasses.replace(experiment.data, vocabulary=found)
    return run._replace(experiment=dataclasses.replace(experiment, data=data))


def _planned(
    chain: Chain, run: StageRun, as_planned: StageRun, planned: RunPlan | None, runs: Runs, before: Mapping[str, StageRelease]
) -> StageRelease:
    """Returns what would be seen of a stage that has not run; `before` are the stages that feed it."""
    alone = as_planned.experiment
    own = Held(run.experiment.data, alone.privacy)
    release = StageRelease(run.stage, run.label, own, alone.accountant, False, (), chain_stages.texts_of(run))
    if planned is None:
        return release
    segments = []
    if alone.is_private:
        calibrated = calibrate(alone.claim, planned.protected_rows - alone.audit.places(alone.privacy))
        assert calibrated.noise_multiplier is not None
        segments = Entries.of(alone.claim).planned(calibrated.batch_stages, calibrated.size, calibrated.noise_multiplier, run.folder.name)
    units, source = unit_facts(alone.data, alone.privacy), vocabulary_source(run.experiment.data.vocabulary, None)
    without = () if alone.is_private else (f"mechanism={alone.mechanism.name} adds no noise",)
    origin = Origin(
        kind="run",
        name=run.experiment.name,
        identity=run.folder.name,
        segments=tuple(segments),
        reasons=planned.reasons if alone.is_private else without,
        claim=ParentClaim(
            unit=alone.privacy.unit,
            adjacency=alone.privacy.adjacency,
            delta=alone.privacy.delta,
            units=units,
            given_protected=alone.given_protected,
        ),
        vocabulary=VocabularyFacts(source=source),
    )

    # What it would come from: the stage before it, another run or file, and the text of its vocabulary.
    came_from, stage = [origin], chain.stages[run.stage]
    if stage.init is not None:
        came_from += before[runs[stage.init][0].label].origins
    fitted = fitted_by(chain, run.stage, runs)
    words = None if fitted in (None, run.stage) else runs[fitted][0]
    if stage.init is None or isinstance(alone.init, FromRun):
        # Until another stage has run, its text has a planned identity, by which other stages are declared apart from it.
        texts = {one.identity for one in vocabulary_of(alone.data)} if words is not None else set()
        came_from += [one for one in planned_start(alone.init, alone.receiver).origins if one.identity not in texts]
    if words is not None:
        data, is_protected = words.experiment.data, words.experiment.data.vocabulary.fit_on == "protected"
        text = Origin(
            kind="text",
            name=words.experiment.name,
            identity=chain_stages.planned_text(words),
            reasons=(learnt_from.PROTECTED,) if is_protected else (),
            claim=ParentClaim(units=unit_facts(data, words.experiment.privacy)),
            vocabulary=VocabularyFacts(source=vocabulary_source(data.vocabulary, None)),
        )
        came_from.append(text)
    return dataclasses.replace(
        release,
        is_private=alone.is_private,
        origins=tuple(came_from),
        segments=segments,
        units=units if alone.is_private else None,
        reasons=planned.reasons if alone.is_private else (),
    )


def show(document: ChainPlan, console: Console) -> None:
    """Prints the plan for people, one line for each run of a stage."""
    table = Table("stage", "state", "fed by", "parameters", "steps", "device time", "noise", "epsilon", "guarantee")
    table.title, table.title_justify = f"plan of the chain {document.name}", "left"
    for one in document.stages:
        label = f"{one.stage} ({one.point})" if one.point else one.stage
        fed = ", ".join(dict.fromkeys(filter(None, (one.init, one.vocabulary))))
        table.add_row(label, one.state.replace("_", " "), fed or "-", *cells(one.plan))
    console.print(table)
    for one in document.stages:
        for old in one.stale:
            console.print(f"{one.stage}: {old} is stale, since a stage before it has changed; it is not used", highlight=False)
    show_claim(document.claim, console)


def cells(plan: RunPlan | None) -> Sequence[str]:
    """Returns parameters, steps, hours, noise, epsilon and guarantee of one stage, as text."""
    if plan is None:
        return ["-"] * 6
    epsilon = ", ".join(f"{figure(value)} {name}" for name, value in plan.epsilon.items() if value is not None)
    numbers = (f"{plan.parameters:,}", f"{plan.steps:,}", duration(plan.device_hours * 3600))
    sigma = plan.noise_multiplier
    return [*numbers, "-" if sigma is None else f"{sigma:.4g}", epsilon or "-", plan.guarantee]


def show_claim(stated: ChainClaim, console: Console) -> None:
    """Prints what a chain protects."""
    console.print(f"guarantee of the chain: {stated.guarantee}", highlight=False)
    for one in stated.protects:
        epsilon = ", ".join(f"{'infinite' if value is None else figure(value)} ({by})" for by, value in one.epsilon.items())
        beside = f", with the steps of {', '.join(one.composed_with)}" if one.composed_with else ""
        told = f"epsilon {epsilon} at delta {one.delta:.2e}{beside}" if one.epsilon else f"guarantee {one.guarantee}"
        console.print(f"  text of {one.stage} ({one.protects}): {told}", highlight=False)
    for name in ("reasons", "assumptions", "not_covered"):
        lines = getattr(stated, name)
        if lines:
            console.print(name.replace("_", " ") + ":")
            for line in lines:
                console.print(f"  - {line}", highlight=False, markup=False)
