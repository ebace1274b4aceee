"""`job=explain`: the claim of a config or a run in plain language, and the cost of the next stronger and weaker settings.

`python -m dpx +experiment=<name> job=explain`, or `python -m dpx job=explain run=<folder>`.

Imports no jax, except to compare the weights that a run released with the weights that it began from.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpx.claim.calibration import Entries, accounting_of, as_drawn_by, calibrate
from dpx.claim.caveats import little_data
from dpx.claim.statement import build
from dpx.config.experiment import Experiment
from dpx.config.experiment_parts import Claim
from dpx.console import answer, figure, wide_console
from dpx.data.declared_data import Data
from dpx.declaration import ConfigError, declaration
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder, write_json
from dpx.files.weights import PARAMS
from dpx.job.run_plan import prepared
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism
from dpx.packages import supplied_if_there
from dpx.pages.analysis_tables import Table
from dpx.pages.run_table import accuracy_of, baselines_of
from dpx.privacy.declared_privacy import Privacy, rows_in_words
from dpx.privacy.origins import VERDICTS, charged_in, in_words
from dpx.privacy.segments import IN_EPOCHS, Segments, join, rows_clipped_apart, until
from dpx.statement import agreement, outside_code, received
from dpx.statement.received import CheckedBy
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import AnyRun, PlainStatement, RunStatement

POINTS = (0.1, 0.25, 0.5, 0.75, 1.0)
_COMES = {kind: "It does not start from random parameters but from" for kind in ("run", "file")}
_COMES |= {"text": "Its vocabulary was not fitted on its own text but comes from", "table": "Its settings were chosen by"}


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
            _explain_chain(self.chain, experiment.name, experiment.replicate, folder)
            return
        said, checked_by = self.said(experiment, folder)
        document = said.as_json() | {"is_checked": checked_by == "ledger", "checked_by": checked_by}
        write_json(folder.made_release() / "explain.json", document)
        answer(document)
        _show(said, folder.path)

    def said(self, experiment: Experiment, folder: RunFolder) -> tuple[Explanation, CheckedBy]:
        """Returns the explanation of the config or the run, and what the run's folder was checked against (`dpx.statement.received`)."""
        (_, checked_by), stated = agreement.checked(folder.path), _statement(folder.path)
        data, privacy, begins_from = experiment.data, experiment.privacy, ()
        has_origins = not experiment.init.is_random or data.vocabulary.path is not None or experiment.chosen_by is not None
        if stated is None and (has_origins or folder.fork is not None):
            from dpx.data.prepare import prepare
            from dpx.init.start import planned_start

            store = prepare(data, privacy) if self.size is None and data.declared_size is None else None
            begins_from = planned_start(experiment.init, experiment.receiver, store, folder.fork).origins
        if self.size is not None:
            size = self.size
        elif stated is None:
            size = public_size(data, privacy)
        else:
            # Less the places of canaries, which are counted in again.
            size = stated.declared_size - experiment.audit.places(privacy) if isinstance(stated, RunStatement) else 0
        said = explain(experiment, size, stated, begins_from, folder.release)
        said = dataclasses.replace(said, words=(*said.words, *readings_of(experiment.name)))
        if stated is not None:
            said = dataclasses.replace(said, words=(*received.HEADS[checked_by], *said.words))
        return said, checked_by


def readings_of(recipe: str) -> tuple[str, ...]:
    """Returns what a recipe takes where its paper leaves a setting open; nothing without the package of the papers."""
    of_papers = supplied_if_there("readings")
    lines = of_papers(recipe) if of_papers else []
    return ("How the recipe reads its paper:", *(f"  - {line}" for line in lines)) if lines else ()


def _show(said: Explanation, path: Path) -> None:
    """Prints an explanation, and the held-out metric of a finished run with its rows and interval.

    The metric was computed without noise, so no file gets it.
    """
    console = wide_console()
    for line in (said.in_short, *said.words):
        console.print(line, highlight=False)
    for table in said.tables:
        console.print(table.shown())
    if measured := accuracy_of(path):
        line = f"What it learnt: {measured} on held-out rows, computed without noise: on this screen and under private/ alone."
        console.print(line, highlight=False)
        if compared := baselines_of(path):
            console.print(f"Without learning: {compared}.", highlight=False)


def _explain_chain(node: Any, name: str, replicate: int, folder: RunFolder) -> None:
    """Explains the first run of every stage that trains, then what all stages together protect, after a check of what was stated."""
    from dpx.config.declared_chain import declared
    from dpx.job import chain_plan, chain_stages
    from dpx.statement import chain_seal

    stated_chain, console = chain_seal.check(folder.path), wide_console()
    checked_by = None if stated_chain is None else stated_chain[1]
    for line in received.HEADS[checked_by] if stated_chain is not None else ():
        console.print(line, highlight=False)
    for line in readings_of(name):
        console.print(line, highlight=False)
    documents, outputs = [], folder.path.parent
    chain = declared(node)
    runs = chain_stages.composed(chain, name, replicate, outputs)
    for run in (each[0] for stage, each in runs.items() if chain.stages[stage].job == "train"):
        alone, stated = chain_plan.alone_of(chain, run, runs).experiment, _statement(run.folder)
        size = public_size(alone.data, alone.privacy) if alone.is_private and not isinstance(stated, PlainStatement) else 0
        said = explain(alone, size, stated, release=run.folder / "release")
        documents.append({"stage": run.label} | said.as_json())
        console.print(f"stage {run.label}:", highlight=False)
        _show(said, run.folder)
    planned = chain_plan.plan_of_chain(node, name, replicate, outputs)
    document = {"name": name, "stages": documents, "claim": to_json(planned.claim), "checked_by": checked_by}
    write_json(folder.made_release() / "explain.json", document)
    answer(document)
    chain_plan.show_claim(planned.claim, console)


def _statement(path: Path) -> AnyRun | None:
    """Returns what a run of this folder has stated so far."""
    file = path / "release" / STATEMENT
    return read_run_statement(file) if file.is_file() else None


def public_size(data: Data, privacy: Privacy) -> int:
    """Returns the public number of what is drawn (rows, or units): declared, or counted in the prepared data."""
    if data.declared_size is not None:
        return data.declared_size
    return privacy.population(prepared(data, privacy, "this job").manifest)


def explain(
    experiment: Experiment, size: int, stated: AnyRun | None, begins_from: Sequence[Any] = (), release: Path | None = None
) -> Explanation:
    """Returns sentences and tables about the claim.

    `stated` is the statement of the run; `None` for a run that has not begun and will start from `begins_from`. If `release` holds weights
    that were released with noise, it is said how far training moved them, beside how far noise alone would have.
    """
    if not experiment.is_private or isinstance(stated, PlainStatement):
        words = ["This run is not private: mechanism=none adds no noise, and the model may repeat any of its training text."]
        return Explanation(experiment.name, "Guarantee: none. mechanism=none adds no noise.", tuple(words))
    claim = experiment.claim
    calibrated = calibrate(claim, size)
    statement = stated or build(claim, None, calibrated, begins_from=begins_from)
    assert isinstance(statement, RunStatement)
    by = outside_code.packages_of_guarantee(statement.guarantee)
    mechanism, sampler, drawn = experiment.mechanism, experiment.sampler, experiment.privacy.drawn
    sampling = "each {drawn} is drawn independently by each micro-batch" if isinstance(mechanism, ForwardNoise) else sampler.explanation
    sampling = f"Sampling ({sampler.name}): {sampling.format(drawn=drawn)}."
    alone = next(iter(calibrated.epsilon.values()))
    words = _promise(statement, drawn, experiment.clip.explanation(), mechanism, sampling, alone)

    sigma, steps, before = calibrated.noise_multiplier, experiment.steps, charged_in(statement.init)
    assert sigma is not None
    whole = Entries.of(claim).planned(calibrated.batch_stages, calibrated.size, sigma)
    by_step: list[dict[str, Any]] = []
    for point in sorted({max(1, round(steps * part)) for part in POINTS}):
        by_step.append({"steps": point} | accounting_of(experiment.accountant, experiment.privacy, join(until(whole, point), before)))
    title = f"epsilon at delta {experiment.privacy.delta:.3g} by step"
    title += (", including the runs that it starts from" if before else "") + (", by the plan alone" if stated is not None else "")
    # Epsilon with one setting changed; the noise stays the same where it would be solved for again.
    changed: list[dict[str, Any]] = []
    for setting, noise, count in (
        ("as declared", sigma, steps),
        ("stronger: noise x 1.5", 1.5 * sigma, steps),
        ("stronger: half the steps", sigma, max(1, steps // 2)),
        ("weaker: noise / 1.5", sigma / 1.5, steps),
        ("weaker: twice the steps", sigma, 2 * steps),
    ):
        other = dataclasses.replace(claim, noise=Multiplier(noise_multiplier=noise), steps=count)
        changed.append({"setting": setting, "noise_multiplier": noise, "steps": count} | calibrate(other, size).epsilon)
    tables = [
        Table.from_rows("as_steps_go", by_step, title),
        Table.from_rows("neighbouring_settings", changed, "epsilon after one change"),
        *_by_sampler(claim, whole),
    ]
    trusting = f" (not bounds that dpx has proved: they trust {', '.join(by or ())})" if by else ""
    tables = [dataclasses.replace(table, title=f"{table.title}{trusting}") for table in tables]
    if isinstance(stated, RunStatement) and release is not None and (release / PARAMS).is_dir():
        # jax starts here.
        from dpx.job.change import sentences_of

        sentences, change = sentences_of(experiment, release, stated)
        words += sentences
        tables += [] if change is None else [Table.from_rows("what_training_changed", change.rows(), "what training changed")]
    return Explanation(experiment.name, _in_short(statement), tuple(words), tuple(tables))


# The samplers that are shown side by side.
_SIDE_BY_SIDE = ("poisson", "random_allocation", "shuffled")


def _by_sampler(claim: Claim, planned: Segments) -> list[Table]:
    """Returns a table of the epsilon of the planned steps, at the same noise, as each sampler would draw them; none for other releases.

    A sampler that has no bound for them, by the run's accountant, is left out, and so is one that cannot draw batches of several sizes.
    """
    own, rows = claim.sampler.name, []
    is_known = own in (*IN_EPOCHS, *_SIDE_BY_SIDE) and all(
        one.event is None and one.noise == "gaussian" and rows_clipped_apart(one) == 1 for one in planned
    )
    sizes = {one.expected_batch_size for one in planned}
    others = [name for name in _SIDE_BY_SIDE if len(sizes) == 1 or name not in IN_EPOCHS]
    for name in dict.fromkeys((own, *others)) if is_known else ():
        with suppress(ConfigError):
            found = accounting_of(claim.accountant, claim.privacy, planned if name == own else as_drawn_by(name, planned))
            rows.append({"sampler": name, "drawn": "by this run" if name == own else "by another run"} | found)
    return [Table.from_rows("by_sampler", rows, "epsilon of the same steps by sampler")] if len(rows) > 1 else []


def _in_which_neighbours_differ(statement: RunStatement) -> str:
    return rows_in_words("row", statement.rows_per_unit_max) if statement.unit == "row" else statement.unit


def _in_short(statement: RunStatement) -> str:
    """Returns the guarantee in two sentences."""
    if statement.guarantee == "none":
        return f"Guarantee: none, because {'; '.join(statement.reasons)}. The model may repeat any of its training text."
    epsilon, neighbour = _stated_epsilon(statement, statement.accountant), NEIGHBOURS[statement.adjacency].partition(";")[0]
    by = outside_code.sentences(outside_code.packages_of_guarantee(statement.guarantee) or ())
    held = f"Guarantee: none of dpx's own: {by[0]}. If it is right, epsilon is" if by else "Guarantee: epsilon"
    unit = _in_which_neighbours_differ(statement)
    likely = f"{_factor(epsilon)} times as likely with this text as {neighbour.format(unit=unit, drawn=statement.unit)}"
    told = f"{figure(epsilon)} ({statement.accountant}) at delta {statement.delta:.3g}"
    return (
        f"{held} {told} for one {unit} of the training text. Whatever is in release/ is at most "
        f"{likely}, except with a probability of at most delta."
    )


def _promise(statement: RunStatement, drawn: str, clip: str, mechanism: Mechanism, sampling: str, alone: float) -> list[str]:
    """Returns the claim in sentences: what the claim is about is read from the statement, which is sealed, as far as it holds it.

    `clip` says what is clipped to, and `alone` is epsilon of the run's own steps.
    """
    own, sigma, spent = statement.accountant, statement.mechanism.noise_multiplier, statement.spent
    batch = statement.sampler["expected_batch_size"]["largest"]
    epsilon = _stated_epsilon(statement, own)
    unit = rows_in_words(statement.unit, statement.rows_per_unit_max)
    neighbour = NEIGHBOURS[statement.adjacency].format(unit=_in_which_neighbours_differ(statement), drawn=drawn)
    is_text = statement.adjacency == "zero_out_text"
    lines = [f"What is protected: {f'the text of one {unit}, not its label' if is_text else f'one {unit} of the training text'}."]
    if statement.guarantee == "none":
        lines.append("GUARANTEE: NONE. " + "; ".join(statement.reasons) + ". The numbers below would hold without that.")
    if by := outside_code.packages_of_guarantee(statement.guarantee):
        lines.append(f"GUARANTEE: NONE OF DPX'S OWN, but {outside_code.sentences(by)[0]}. The numbers below hold if that package is right.")
    lines += [f"{_COMES[one.kind]} {in_words(one)}." for one in statement.init.origins]
    if any(one.kind in ("run", "file") for one in statement.init.origins):
        lines.append(f"Its own steps alone have epsilon {alone:.3g}; noise.epsilon, if set, is the target for these steps alone.")

    gradients = {"group": "each row's gradient", "one_row": f"the gradient of each {statement.unit}'s row"}
    clipped = gradients.get(statement.unit_mode, f"the sum of the gradients of all rows of one {statement.unit}")
    clipped = "the pooled vector of each drawn row" if isinstance(mechanism, ForwardNoise) else clipped
    lines += [
        "From whom: anyone who sees everything under release/, knows this config and all the other text, and computes without limit.",
        f"What they cannot do: tell this training set from one {neighbour}.",
        f"How well: whatever they see is at most e^{epsilon:.3g} = {_factor(epsilon)} times as likely with one as with the other,",
        f"  except with probability at most delta = {statement.delta:.3g} (accountant {own}, all {statement.steps:,} steps).",
        f"How: {clipped} is clipped to {clip};",
        f"  noise with standard deviation {sigma:.4g} times that norm is added to "
        f"{'each of them, before the loss' if isinstance(mechanism, ForwardNoise) else 'each sum'}.",
        *(f"  {line}" for line in mechanism.explanation()),
        sampling,
    ]
    if (audit := statement.audit) is None:
        lines.append("Audit: none in this run; job=audit attacks its mechanism.")
    else:
        planted = f"{audit.canaries.gradients:,} gradient canaries and {audit.canaries.sequences:,} sequences"
        proved = "the run fails if the lower bound on epsilon that they prove exceeds the claim"
        lines += [f"Audit: {planted} are in or out by secret coins; {proved}.", f"  The audit of this run {VERDICTS[audit.verdict]}."]
    lines.append(f"So far {spent.steps:,} steps have run and {spent.charged_steps:,} are charged.")
    lines += [f"Hint: {line}" for line in little_data(statement.declared_size, drawn, batch, statement.delta)]
    lines += ["What is assumed:"] + [f"  - {line}" for line in statement.assumptions]
    lines += ["What is not covered:"] + [f"  - {line}" for line in statement.not_covered]
    if statement.unsupported:
        lines += ["Numbers that dpx has not proved:"]
        lines += [f"  - {outside_code.heading(item.name, statement.guarantee)}: {item.reason}" for item in statement.unsupported]
    return lines


def _stated_epsilon(statement: RunStatement, accountant: str) -> float:
    """Returns the statement's epsilon, of the planned end and everything charged in addition to the plan.

    If it is not a bound, the number stated instead. Infinite without a number.
    """
    instead = {one.name.removeprefix("epsilon/"): one.value for one in statement.unsupported}
    value = (instead | statement.epsilon).get(accountant)
    return math.inf if value is None else value


def _factor(epsilon: float) -> str:
    return f"{float(f'{math.exp(epsilon):.3g}'):,g}" if epsilon < 700 else "no bounded number of"
