"""`job=explain`: the claim of a config or a run in plain language, and the cost of the next stronger and weaker settings.

`python -m dpx +experiment=<name> job=explain`, or `python -m dpx job=explain run=<folder>`.

Imports no jax, except to compare the weights that a run released with the weights that it began from.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.config.experiment import Experiment
from dpx.console import answer, figure, wide_console
from dpx.declaration import ConfigError, declaration
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder, write_json
from dpx.files.weights import PARAMS
from dpx.mechanism.mechanism_protocol import ForwardNoise
from dpx.pages.analysis_tables import Table
from dpx.pages.run_table import accuracy_of, baselines_of
from dpx.privacy.origins import VERDICTS, charged_in, in_words
from dpx.statement import agreement, outside_code, received
from dpx.statement.received import CheckedBy
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import AnyRun, PlainStatement, RunStatement

POINTS = (0.1, 0.25, 0.5, 0.75, 1.0)

NEIGHBOURS = {
    "zero_out": "with the content of one {unit} blanked out; the number of {drawn}s is public",
    "zero_out_text": "with the text of one {unit} blanked out; its label, and that it is there, stay as they are",
    "add_remove": "with one {unit} taken away or added; only the declared size is public",
    "replace_one": "with one {unit} replaced by any other; the number of {drawn}s is public",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A claim in two sentences (`in_short`), in all its sentences, and in tables."""

    name: str
    in_short: str
    words: tuple[str, ...]
    tables: tuple[Table, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "in_short": self.in_short,
            "words": list(self.words),
            "tables": [table.as_json() for table in self.tables],
        }


@declaration
class Explain:
    """Prints the explanation and writes `release/explain.json`. Of a chain every stage is explained.

    Attributes:
        size: Number of protected rows, if the data is not prepared.
        chain: The chain that the config declares, if any.
    """

    size: int | None = None
    chain: Any = None

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        if self.chain is not None:
            _explain_chain(self.chain, experiment, folder)
            return
        said, checked_by = self.said(experiment, folder)
        document = said.as_json() | {"is_checked": checked_by == "ledger", "checked_by": checked_by}
        write_json(folder.made_release() / "explain.json", document)
        answer(document)
        _show(said)
        _show_utility(folder.path)

    def said(self, experiment: Experiment, folder: RunFolder) -> tuple[Explanation, CheckedBy]:
        """Returns the explanation of the config or the run, and what the run's folder was checked against (`dpx.statement.received`)."""
        (_, checked_by), stated = agreement.checked(folder.path), _statement(folder.path)
        begins_from = () if stated is not None else _planned_start(experiment, self.size is None, folder.fork)
        said = explain(experiment, self._size(experiment, stated), stated, begins_from)
        said = _with_change(said, experiment, folder.release, stated)
        if stated is not None:
            said = dataclasses.replace(said, words=(*received.HEADS[checked_by], *said.words))
        return said, checked_by

    def _size(self, experiment: Experiment, stated: AnyRun | None) -> int:
        """Returns the number that was given, or stated (less the places of canaries, which are counted in again), or counted; 0 if it is
        unknown."""
        if self.size is not None:
            return self.size
        if stated is None:
            return public_size(experiment)
        if _is_not_private(stated):
            return 0
        assert isinstance(stated, RunStatement)
        return stated.declared_size - experiment.audit.places(experiment.privacy)


def _show(said: Explanation) -> None:
    console = wide_console()
    for line in (said.in_short, *said.words):
        console.print(line, highlight=False)
    for table in said.tables:
        console.print(table.shown())


def _show_utility(path: Path) -> None:
    """Prints the held-out metric of a finished run, with its rows and interval. It was computed without noise, so no file gets it."""
    if measured := accuracy_of(path):
        line = f"What it learnt: {measured} on held-out rows, computed without noise: on this screen and under private/ alone."
        wide_console().print(line, highlight=False)
        if compared := baselines_of(path):
            wide_console().print(f"Without learning: {compared}.", highlight=False)


def _explain_chain(node: Any, experiment: Experiment, folder: RunFolder) -> None:
    """Explains the first run of every stage that trains, then what all stages together protect, after a check of what was stated."""
    from dpx.job import chain_plan
    from dpx.job.plan import plan_of_run
    from dpx.statement import chain_seal

    stated_chain = chain_seal.check(folder.path)
    checked_by = None if stated_chain is None else stated_chain[1]
    for line in received.HEADS[checked_by] if stated_chain is not None else ():
        wide_console().print(line, highlight=False)
    documents, outputs = [], folder.path.parent
    for label, alone, run_folder in chain_plan.stages_alone(node, experiment, outputs):
        stated = _statement(run_folder)
        size = 0 if stated is not None and _is_not_private(stated) else public_size(alone) if alone.is_private else 0
        said = _with_change(explain(alone, size, stated), alone, run_folder / "release", stated)
        documents.append({"stage": label} | said.as_json())
        wide_console().print(f"stage {label}:", highlight=False)
        _show(said)
        _show_utility(run_folder)
    planned = chain_plan.plan_of_chain(node, experiment, plan_of_run, outputs)
    document = {"name": experiment.name, "stages": documents, "claim": to_json(planned.claim), "checked_by": checked_by}
    write_json(folder.made_release() / "explain.json", document)
    answer(document)
    chain_plan.show_claim(planned.claim, wide_console())


def _with_change(said: Explanation, experiment: Experiment, release: Path, stated: AnyRun | None) -> Explanation:
    """Returns `said` with how far training moved the released weights, beside how far noise alone would have, if the run has released
    any with noise."""
    if not isinstance(stated, RunStatement) or not (release / PARAMS).is_dir():
        return said
    # jax starts here.
    from dpx.job.change import sentences_of

    sentences, change = sentences_of(experiment, release, stated)
    tables = () if change is None else (Table.from_rows("what_training_changed", change.rows(), "what training changed"),)
    return dataclasses.replace(said, words=(*said.words, *sentences), tables=(*said.tables, *tables))


def _is_not_private(stated: AnyRun | None) -> bool:
    return isinstance(stated, PlainStatement)


def _statement(path: Path) -> AnyRun | None:
    """Returns what a run of this folder has stated so far."""
    file = path / "release" / STATEMENT
    return read_run_statement(file) if file.is_file() else None


def _planned_start(experiment: Experiment, is_prepared: bool, fork: str | None) -> Sequence[Any]:
    """Returns the origins of a run that has not begun."""
    if experiment.init.is_random and fork is None and experiment.data.vocabulary.path is None and experiment.chosen_by is None:
        return ()
    from dpx.data.prepare import prepare
    from dpx.init.start import planned_start, receiver_of

    store = prepare(experiment.data, experiment.privacy) if is_prepared and experiment.data.declared_size is None else None
    receiver = receiver_of(experiment)
    return planned_start(experiment.init, receiver, store, fork).origins


def public_size(experiment: Experiment) -> int:
    """Returns the public number of what is drawn (rows, or units): declared, or counted in the prepared data."""
    if experiment.data.declared_size is not None:
        return experiment.data.declared_size
    if experiment.data.is_remote:
        raise ConfigError(
            "data.declared_size", "this job does not download data, so the number of rows is not known", "Set data.declared_size"
        )
    from dpx.data.prepare import prepare

    return experiment.privacy.population(prepare(experiment.data, experiment.privacy).manifest)


def explain(experiment: Experiment, size: int, stated: AnyRun | None, begins_from: Sequence[Any] = ()) -> Explanation:
    """Returns sentences and tables about the claim.

    `stated` is the statement of the run; `None` for a run that has not begun and will start from `begins_from`.
    """
    from dpx.claim.calibration import calibrate
    from dpx.claim.statement import build

    if not experiment.is_private or _is_not_private(stated):
        words = ["This run is not private: mechanism=none adds no noise, and the model may repeat any of its training text."]
        return Explanation(experiment.name, "Guarantee: none. mechanism=none adds no noise.", tuple(words))
    calibrated = calibrate(experiment, size)
    statement = stated or build(experiment, None, calibrated, begins_from=begins_from)
    assert isinstance(statement, RunStatement)
    by = outside_code.packages_of_guarantee(statement.guarantee)
    words = [*_promise(experiment, statement, calibrated), *_lists(statement)]
    go_by = _as_steps_go(experiment, calibrated, charged_in(statement.init))
    if stated is not None:
        go_by = dataclasses.replace(go_by, title=f"{go_by.title}, by the plan alone")
    tables = (go_by, _neighbouring_settings(experiment, size))
    return Explanation(experiment.name, _in_short(statement), tuple(words), tuple(_with_trust(table, by) for table in tables))


def _with_trust(table: Table, by: tuple[str, ...] | None) -> Table:
    """Returns `table`, with a note in its title if its numbers are not proved but trust the packages `by`."""
    trusting = f"{table.title} (not bounds that dpx has proved: they trust {', '.join(by or ())})"
    return dataclasses.replace(table, title=trusting) if by else table


def _in_short(statement: RunStatement) -> str:
    """Returns the guarantee in two sentences."""
    if statement.guarantee == "none":
        return f"Guarantee: none, because {'; '.join(statement.reasons)}. The model may repeat any of its training text."
    epsilon, neighbour = _stated_epsilon(statement, statement.accountant), NEIGHBOURS[statement.adjacency].partition(";")[0]
    by = outside_code.sentences(outside_code.packages_of_guarantee(statement.guarantee) or ())
    held = f"Guarantee: none of dpx's own: {by[0]}. If it is right, epsilon is" if by else "Guarantee: epsilon"
    one = f"one {statement.unit} of the training text"
    likely = f"{_factor(epsilon)} times as likely with this text as {neighbour.format(unit=statement.unit, drawn=statement.unit)}"
    return (
        f"{held} {figure(epsilon)} ({statement.accountant}) at delta {statement.delta:.3g} for {one}. Whatever is in release/ is at most "
        f"{likely}, except with a probability of at most delta."
    )


def _promise(experiment: Experiment, statement: RunStatement, calibrated: Any) -> list[str]:
    from dpx.claim.caveats import little_data

    # What the claim is about is read from the statement, which is sealed, as far as it holds it.
    drawn, own, sigma = experiment.privacy.drawn, statement.accountant, statement.mechanism.noise_multiplier
    batch = statement.sampler["expected_batch_size"]["largest"]
    origins = statement.init.origins
    epsilon = _stated_epsilon(statement, own)
    unit = statement.unit if statement.unit == "row" else f"{statement.unit} (at most {statement.rows_per_unit_max} rows)"
    spent = statement.spent
    neighbour = NEIGHBOURS[statement.adjacency].format(unit=statement.unit, drawn=drawn)
    is_text = statement.adjacency == "zero_out_text"
    lines = [f"What is protected: {f'the text of one {unit}, not its label' if is_text else f'one {unit} of the training text'}."]
    if statement.guarantee == "none":
        lines.append("GUARANTEE: NONE. " + "; ".join(statement.reasons) + ". The numbers below would hold without that.")
    if by := outside_code.packages_of_guarantee(statement.guarantee):
        lines.append(f"GUARANTEE: NONE OF DPX'S OWN, but {outside_code.sentences(by)[0]}. The numbers below hold if that package is right.")
    return [
        *lines,
        *_start(origins, next(iter(calibrated.epsilon.values()))),
        "From whom: anyone who sees everything under release/, knows this config and all the other text, and computes without limit.",
        f"What they cannot do: tell this training set from one {neighbour}.",
        f"How well: whatever they see is at most e^{epsilon:.3g} = {_factor(epsilon)} times as likely with one as with the other,",
        f"  except with probability at most delta = {statement.delta:.3g} (accountant {own}, all {statement.steps:,} steps).",
        f"How: {_clipped(experiment, statement)} is clipped to {experiment.clip.explanation()};",
        f"  noise with standard deviation {sigma:.4g} times that norm is added to "
        f"{'each of them, before the loss' if isinstance(experiment.mechanism, ForwardNoise) else 'each sum'}.",
        *(f"  {line}" for line in experiment.mechanism.explanation()),
        *_sampling(experiment, drawn),
        *_audit(statement.audit),
        f"So far {spent.steps:,} steps have run and {spent.charged_steps:,} are charged.",
        *(f"Hint: {line}" for line in little_data(statement.declared_size, drawn, batch, statement.delta)),
    ]


def _clipped(experiment: Experiment, statement: RunStatement) -> str:
    if isinstance(experiment.mechanism, ForwardNoise):
        return "the pooled vector of each drawn row"
    whole = {"group": "each row's gradient", "one_row": f"the gradient of each {statement.unit}'s row"}
    return whole.get(statement.unit_mode, f"the sum of the gradients of all rows of one {statement.unit}")


def _sampling(experiment: Experiment, drawn: str) -> list[str]:
    if isinstance(experiment.mechanism, ForwardNoise):
        return [f"Sampling ({experiment.sampler.name}): each {drawn} is drawn independently by each micro-batch."]
    return [f"Sampling ({experiment.sampler.name}): {experiment.sampler.explanation.format(drawn=drawn)}."]


def _stated_epsilon(statement: RunStatement, accountant: str) -> float:
    """Returns the statement's epsilon, of the planned end and everything charged in addition to the plan.

    If it is not a bound, the number stated instead. Infinite without a number.
    """
    instead = {one.name.removeprefix("epsilon/"): one.value for one in statement.unsupported}
    value = (instead | statement.epsilon).get(accountant)
    return math.inf if value is None else value


_COMES = {kind: "It does not start from random parameters but from" for kind in ("run", "file")}
_COMES |= {"text": "Its vocabulary was not fitted on its own text but comes from", "table": "Its settings were chosen by"}


def _start(origins: Sequence[Any], alone: float) -> list[str]:
    """Returns the lines about the origins of the run."""
    lines = [f"{_COMES[one.kind]} {in_words(one)}." for one in origins]
    if any(one.kind in ("run", "file") for one in origins):
        lines.append(f"Its own steps alone have epsilon {alone:.3g}; noise.epsilon, if set, is the target for these steps alone.")
    return lines


def _audit(audit: Any) -> list[str]:
    """Returns the lines about the audit's canaries in the run."""
    if audit is None:
        return ["Audit: none in this run; job=audit attacks its mechanism."]
    planted = f"{audit.canaries.gradients:,} gradient canaries and {audit.canaries.sequences:,} sequences"
    return [
        f"Audit: {planted} are in or out by secret coins; the run fails if the lower bound on epsilon that they prove exceeds the claim.",
        f"  The audit of this run {VERDICTS[audit.verdict]}.",
    ]


def _factor(epsilon: float) -> str:
    return f"{float(f'{math.exp(epsilon):.3g}'):,g}" if epsilon < 700 else "no bounded number of"


def _lists(statement: RunStatement) -> list[str]:
    lines = ["What is assumed:"] + [f"  - {line}" for line in statement.assumptions]
    lines += ["What is not covered:"] + [f"  - {line}" for line in statement.not_covered]
    if statement.unsupported:
        lines += ["Numbers that dpx has not proved:"]
        lines += [f"  - {outside_code.heading(item.name, statement.guarantee)}: {item.reason}" for item in statement.unsupported]
    return lines


def _as_steps_go(experiment: Experiment, calibrated: Any, before: Sequence[Any]) -> Table:
    from dpx.claim.calibration import accounting_of, planned_segments
    from dpx.privacy.ledger import join, until

    whole = planned_segments(experiment, calibrated.batch_stages, calibrated.size, calibrated.noise_multiplier)
    rows = []
    for steps in sorted({max(1, round(experiment.steps * part)) for part in POINTS}):
        rows.append({"steps": steps} | accounting_of(experiment.accountant, experiment.privacy, join(until(whole, steps), before)))
    title = f"epsilon at delta {experiment.privacy.delta:.3g} by step"
    return Table.from_rows("as_steps_go", rows, title + (", including the runs that it starts from" if before else ""))


def _neighbouring_settings(experiment: Experiment, size: int) -> Table:
    """Returns epsilon with one setting changed; the noise stays the same where it would otherwise be solved for again."""
    from dpx.claim.calibration import calibrate
    from dpx.mechanism.declared_mechanism import Multiplier

    sigma = calibrate(experiment, size).noise_multiplier
    assert sigma is not None

    def changed(noise: float, steps: int) -> Experiment:
        return dataclasses.replace(experiment, noise=Multiplier(noise_multiplier=noise), steps=steps)

    settings = [
        ("as declared", changed(sigma, experiment.steps)),
        ("stronger: noise x 1.5", changed(1.5 * sigma, experiment.steps)),
        ("stronger: half the steps", changed(sigma, max(1, experiment.steps // 2))),
        ("weaker: noise / 1.5", changed(sigma / 1.5, experiment.steps)),
        ("weaker: twice the steps", changed(sigma, 2 * experiment.steps)),
    ]
    rows: list[dict[str, Any]] = []
    for words, setting in settings:
        noise = setting.noise
        assert isinstance(noise, Multiplier)
        rows.append(
            {"setting": words, "noise_multiplier": noise.noise_multiplier, "steps": setting.steps} | calibrate(setting, size).epsilon
        )
    return Table.from_rows("neighbouring_settings", rows, "epsilon after one change")
