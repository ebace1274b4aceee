"""`job=train`: prepare, calibrate, train, state what was spent. Running the same command again resumes where it stopped.

`job=resume run=<folder>` resumes with the config that the run began with, even if the recipes have changed. `job=prepare` writes the
record store alone, so that training starts at once or on a machine without the source text.
"""

from pathlib import Path

from rich.table import Table

from dpx.config.experiment import Experiment
from dpx.console import Console, answer, figure
from dpx.declaration import declaration, require
from dpx.files.records import to_json
from dpx.files.results import BASELINES, Results, accuracy_in_words, nothing_learnt
from dpx.files.run_folder import RunFolder, as_printed
from dpx.privacy.origins import OWED, in_words
from dpx.processes import team
from dpx.statement import outside_code, seals
from dpx.statement.statement_records import AnyRun, RunStatement


@declaration
class Train:
    """Trains the experiment into its run folder and prints held-out metrics, their baselines and the claim.

    Raises `ConfigError` at the end, everything written, where the run's own audit (`audit=canaries`) proves more than is claimed.
    """

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        team().require_joined()
        # jax starts here, after every declaration has been checked.
        from dpx.training.opening import open_run
        from dpx.training.session import train

        with folder.claimed(), open_run(experiment, folder, self) as run:
            # A refused command has changed nothing.
            seals.write_config(folder, run.ledger)
            trained = train(run)
        show(trained.results, trained.stated, folder.path)
        if trained.verdict is not None:
            from dpx.audit.verdict import require_passes
            from dpx.job import audit

            audit.show(trained.verdict)
            require_passes(trained.verdict)


@declaration
class Resume:
    """Continues training in a folder that holds a run; raises `ConfigError` for one that does not."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(folder.has_begun, "run", "this job resumes a run, and no run is named", "Add run=<folder>, or start one with job=train")
        Train()(experiment, folder)


@declaration
class Prepare:
    """Prepares the experiment's data, or opens the prepared data, and prints a summary."""

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        del folder
        from dpx.data.prepare import prepare, say_stage

        store = prepare(experiment.data, experiment.privacy, say_stage)
        rows = ", ".join(f"{count:,} {split}" for split, count in store.manifest.rows.items())
        text = f"{store.folder}: {rows} rows of {store.manifest.sequence_length} tokens, vocabulary from {store.manifest.vocabulary_source}"
        Console().print(text, highlight=False, soft_wrap=True)
        answer({"folder": str(store.folder), "manifest": to_json(store.manifest)})


def show(results: Results, claim: AnyRun, folder: Path) -> None:
    """Prints the final table: metrics with their intervals, baselines, whether they are exceeded, and the claim."""
    answer({"results": to_json(results), "statement": to_json(claim)})
    table = Table(title=as_printed(folder), title_justify="left", show_header=False)
    metric = results.metric
    table.add_row(f"held-out {metric.replace('_', ' ')}", accuracy_in_words(results.heldout[metric], results.rows))
    for name, value in results.baselines.items():
        table.add_row(f"  {BASELINES.get(name, name.replace('_', ' '))}", f"{value:.2%}")
    for name, value in results.heldout.items():
        if name not in ("loss", metric):
            table.add_row(f"held-out {name.replace('_', ' ')}", f"{value:.4g}")
    for name, value in (results.test or {}).items():
        shown = accuracy_in_words(value, results.test_rows) if name == metric else f"{value:.4g}"
        table.add_row(f"test set {name.replace('_', ' ')}", shown)
    # Random weights have nothing that a part of them could be added to.
    can_train_less = claim.train is None and bool(claim.init.of_weights)
    if (nothing := nothing_learnt(results, folder / "private", can_train_less)) is not None:
        table.add_row("learnt nothing", nothing)
    if results.best_step is not None:
        table.add_row("weights", f"of step {results.best_step}, the best of {results.steps} steps by held-out rows")
    for origin in claim.init.origins:
        table.add_row(OWED[origin.kind], in_words(origin))
    table.add_row("guarantee", ", ".join([claim.guarantee, *claim.reasons]))
    if isinstance(claim, RunStatement):
        _show_claim(claim, table)
    Console().print(table)


def _hints(claim: RunStatement) -> list[str]:
    """Returns the hint that a plan gives too: there is little data for the claim of the run."""
    from dpx.claim.caveats import little_data

    drawn = "row" if claim.unit_mode == "group" else claim.unit
    return little_data(claim.declared_size, drawn, claim.sampler["expected_batch_size"]["largest"], claim.delta)


def _show_claim(claim: RunStatement, table: Table) -> None:
    if claim.audit is not None:
        table.add_row("audit", claim.audit.verdict)
    for line in _hints(claim):
        table.add_row("hint", line)
    for accountant, epsilon in claim.epsilon.items():
        table.add_row(f"epsilon ({accountant})", f"{'infinite' if epsilon is None else figure(epsilon)} at delta {claim.delta:.2e}")
    if outside_code.packages_of_guarantee(claim.guarantee):
        for one in claim.unsupported:
            value = "infinite" if one.value is None else figure(one.value)
            table.add_row(outside_code.heading(one.name, claim.guarantee), f"{value} at delta {claim.delta:.2e}: {one.reason}")
