"""`job=train`: prepare, calibrate, train, state what was spent. Running the same command again resumes where it stopped.

`job=resume run=<folder>` resumes with the config that the run began with, even if the recipes have changed. `job=prepare` writes the
record store alone, so that training starts at once or on a machine without the source text.

A run that has trained to its end is detected: the same command then reports this and changes nothing.
"""

import subprocess
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from rich.table import Table

import dpx
from dpx import config
from dpx.config.experiment import Experiment
from dpx.config.identity import identity
from dpx.console import Console, answer, figure, stage
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import to_json
from dpx.files.results import BASELINES, Results, metric_in_words, nothing_learnt, read_results, shown_metrics
from dpx.files.run_folder import RunFolder, Status, as_printed, without_places
from dpx.privacy.origins import OWED, in_words
from dpx.processes import team
from dpx.statement import agreement, outside_code, seals
from dpx.statement.seals import MANIFEST, STATEMENT, read_run_statement
from dpx.statement.statement_records import AnyRun, RunStatement

TRAINING = ("train", "resume")
# The files that a run writes at its end; if one of them is removed, the same command makes it again.
_LEFT = ("release/params", f"release/{STATEMENT}", f"release/{MANIFEST}", "private/results.json")
CHECKOUT = Path(dpx.__file__).resolve().parents[1]


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
    held_out = {name: value for name, value in results.heldout.items() if name != "loss"}
    for name, value in shown_metrics(held_out, metric, results.rows).items():
        table.add_row(f"held-out {name.replace('_', ' ')}", value)
        for baseline, base in results.baselines.items() if name == metric else ():
            table.add_row(f"  {BASELINES.get(baseline, baseline.replace('_', ' '))}", metric_in_words(metric, base))
    for name, value in shown_metrics(results.test, metric, results.test_rows).items() if results.test else ():
        table.add_row(f"test set {name.replace('_', ' ')}", value)
    # Random weights have nothing that a part of them could be added to.
    can_train_less = claim.train is None and bool(claim.init.of_weights)
    if (nothing := nothing_learnt(results, folder / "private", can_train_less)) is not None:
        table.add_row(*nothing)
    if results.best_step is not None:
        table.add_row("weights", f"of step {results.best_step}, the best of {results.steps} steps by held-out rows")
    for origin in claim.init.origins:
        table.add_row(OWED[origin.kind], in_words(origin))
    table.add_row("guarantee", ", ".join([claim.guarantee, *claim.reasons]))
    if isinstance(claim, RunStatement):
        if claim.audit is not None:
            table.add_row("audit", claim.audit.verdict)
        for line in _hints(claim):
            table.add_row("hint", line)
        for accountant, epsilon in claim.epsilon.items():
            table.add_row(f"epsilon ({accountant})", f"{'infinite' if epsilon is None else figure(epsilon)} at delta {claim.delta:.2e}")
        for one in claim.unsupported if outside_code.packages_of_guarantee(claim.guarantee) else ():
            value = "infinite" if one.value is None else figure(one.value)
            table.add_row(outside_code.heading(one.name, claim.guarantee), f"{value} at delta {claim.delta:.2e}: {one.reason}")
    Console().print(table)


def _hints(claim: RunStatement) -> list[str]:
    """Returns the hint that a plan gives too: there is little data for the claim of the run."""
    from dpx.claim.caveats import little_data

    drawn = "row" if claim.unit_mode == "group" else claim.unit
    return little_data(claim.declared_size, drawn, claim.sampler["expected_batch_size"]["largest"], claim.delta)


def has_ended(folder: Path) -> bool:
    """Returns whether `folder` holds a run that has finished, whatever its config."""
    is_whole = all((folder / name).exists() for name in _LEFT)
    return is_whole and any(Status(folder, job).read().get("state") == "finished" for job in TRAINING)


def has_finished(folder: Path, plain: dict[str, Any]) -> bool:
    """Returns whether `folder` holds the run that the resolved config `plain` names, and that run has finished."""
    if not has_ended(folder):
        return False
    try:
        return is_of(folder, plain)
    except Exception:
        return False


def is_of(folder: Path, plain: dict[str, Any]) -> bool:
    """Returns whether the run in `folder` is the one that the resolved config `plain` names. Raises `ConfigError` if its config is not
    valid."""
    place = config.place_of(folder)
    held = cast(dict[str, Any], OmegaConf.to_container(config.read(place)))
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    # A copy of release/ does not contain the paths of the machine that it was made on.
    named = OmegaConf.to_container(OmegaConf.create(text if place.parent.name == "private" else without_places(text)))
    return identity(held) == identity(cast(dict[str, Any], named))


def say_finished(folder: Path) -> None:
    """Checks the folder against its ledger and its manifest, then shows the results of the run.

    Raises `ConfigError` if its parts do not agree, or if a part of what was released is missing.
    """
    agreement.check(folder)
    release = folder / "release"
    try:
        seals.check(release)
    except ConfigError as damaged:
        fix = f"Restore it, or remove {release / seals.PARAMS} and run the same command, which releases the weights again"
        raise ConfigError(damaged.value, damaged.reason, fix) from damaged
    results, claim = read_results(folder / "private"), read_run_statement(folder / "release" / STATEMENT)
    stage("this run has finished; nothing was done. With replicate=1 it is run again, with fresh noise and its own cost.")
    show(results, claim, folder)


def commit(checkout: Path = CHECKOUT) -> str | None:
    """Returns the version of the code that runs: the short hash of HEAD, with `+` if `dpx/` or `conf/` of the checkout differ from it.

    It is `None` in an installed wheel, which is in no checkout, or without git.
    """

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    if not (checkout / ".git").exists() or not (head := git("rev-parse", "--short=12", "HEAD")):
        return None
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", "dpx", "conf") else "")
