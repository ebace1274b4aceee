"""`job=chain`: every stage of a chain in order, each as an ordinary run; the same command again skips what is finished."""

import os
import time
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from dpx.config import resolved
from dpx.config.command_line import as_refused
from dpx.config.declared_chain import Chain, declared
from dpx.config.experiment import Experiment
from dpx.console import answer, figure, stage, wide_console
from dpx.declaration import ConfigError, declaration
from dpx.files.records import to_json
from dpx.files.results import read_results
from dpx.files.run_folder import RunFolder, Status, write_json
from dpx.init import chain_claim
from dpx.job import chain_stages
from dpx.job.chain_plan import show_claim
from dpx.job.chain_stages import VOCABULARY, Runs, StageRun, composed
from dpx.job.train import commit
from dpx.processes import team
from dpx.processes.interruption import Interrupted
from dpx.processes.mesh import simulate_devices
from dpx.processes.team import PeerLost
from dpx.statement import chain_seal
from dpx.statement.chain_seal import ChainStatement

RESULTS = "chain_results.json"


@declaration
class RunChain:
    """Runs the stages of `chain`, and after each writes `release/chain.json`, the statement of what all of them protect.

    Each stage is a run with its own folder, beside the folder of the chain, and every job works on it. In a job of several processes all of
    them run each stage that trains. Raises `ConfigError` before the first stage for stages that do not fit each other, for a finished stage
    whose folder is missing, and for a statement that was edited.

    Attributes:
        chain: What every stage begins with (common), and the stages by name.
    """

    chain: Any

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        chain, outputs = declared(self.chain), folder.path.parent
        chain_seal.read(folder.path)
        runs = composed(chain, experiment.name, experiment.replicate, outputs)
        chain_stages.require_nothing_lost(runs, outputs, experiment.name)
        stated = _state(chain, runs, experiment.name, experiment.replicate, folder)
        first = next(iter(runs.values()))[0].experiment
        simulate_devices(first.mesh, first.mesh.simulated_here(team().count))
        for name in chain.in_order():
            for run in runs[name]:
                if chain.stages[run.stage].feeds and not chain_stages.is_finished(run):
                    for old in chain_stages.stale(run, outputs):
                        reason = "is stale, since a stage before it has changed; it stays as it is and is not used"
                        stage(f"stage {run.label}: {old} {reason}")
                _run(chain, run, runs)
            chain_stages.keep_vocabulary(runs[name][0], runs[name][0].folder / "private" / VOCABULARY)
            stated = _state(chain, runs, experiment.name, experiment.replicate, folder)
        _show(chain, runs, stated, folder)


def _run(chain: Chain, run: StageRun, runs: Runs) -> None:
    """Trains or prepares one stage, unless it has finished. A failure is noted in its own folder."""
    if chain_stages.is_finished(run):
        chain_stages.require_fed_alike(chain, run, runs)
        stage(f"stage {run.label}: finished before, in {run.folder.name}")
        return
    stage(f"stage {run.label}: {os.path.relpath(run.folder)}")
    run.experiment.require_new()
    status, began, code = Status(run.folder, str(chain.stages[run.stage].job)), time.monotonic(), commit()
    status.write("running", pid=os.getpid(), commit=code)
    try:
        run.job(run.experiment, RunFolder(run.folder, OmegaConf.to_yaml(OmegaConf.create(resolved(run.cfg)))))
    except Interrupted as interrupted:
        status.write("interrupted", steps=interrupted.done)
        raise
    except Exception as error:
        refused = as_refused(error)
        status.write("failed", error=str(refused or f"{type(error).__name__}: {error}"))
        if refused is None or isinstance(refused, PeerLost):
            raise
        raise ConfigError(f"chain.stages.{run.stage}: {refused.value}", refused.reason, refused.fix) from error
    status.write("finished", seconds=round(time.monotonic() - began, 1), commit=code, score=_score(run))


def _state(chain: Chain, runs: Runs, name: str, replicate: int, folder: RunFolder) -> ChainStatement:
    """Writes the statement of what has run so far."""
    facts = [chain_stages.facts(chain, run) for each in runs.values() for run in each]
    is_over = {one.folder for one in facts if one.state == "finished"}
    releases = [chain_stages.release_of(run) for each in runs.values() for run in each if run.folder.name in is_over]
    waiting = [f"{one.stage} ({one.point})" if one.point else one.stage for one in facts if one.state == "not_run"]
    claim = chain_claim.claim(chain, releases, waiting)
    stated = ChainStatement(name=name, replicate=replicate, claim=claim, stages=tuple(facts))
    chain_seal.write(folder, stated)
    return stated


def _score(run: StageRun, metric: str | None = None) -> float | None:
    if not (run.folder / "private" / "results.json").is_file():
        return None
    results = read_results(run.folder / "private")
    name = metric or results.metric
    if name not in results.heldout:
        raise ConfigError(f"chain.stages.{run.stage}.choose_by={name}", "is not measured", f"Use one of {', '.join(results.heldout)}")
    return results.heldout[name]


def chosen(chain: Chain, each: list[StageRun]) -> StageRun:
    """Returns the run of a stage with the best score on the rows that its points are compared by; the first of equal ones."""
    metric = chain.stages[each[0].stage].choose_by
    return max(each, key=lambda run: _score(run, metric) or 0.0) if len(each) > 1 else each[0]


def _show(chain: Chain, runs: Runs, stated: ChainStatement, folder: RunFolder) -> None:
    """Prints the stages and the claim, and writes the scores, which depend on held-out text, below `private/`."""
    table = Table("stage", "folder", "held-out", "test set", "guarantee", "epsilon", title=str(folder.path), title_justify="left")
    by_folder, rows = {one.folder: one for one in stated.stages}, []
    for name, each in runs.items():
        best = chosen(chain, each).folder.name if chain.stages[name].job == "train" else None
        for run in each:
            fact, held = by_folder[run.folder.name], (run.folder / "private" / "results.json").is_file()
            results = read_results(run.folder / "private") if held else None
            heldout, test = (None, None) if results is None else (results.heldout, results.test)
            metric = chain.stages[name].choose_by or (results.metric if results else None)
            row = {"stage": run.stage, "point": run.point, "folder": run.folder.name, "metric": metric}
            rows.append(row | {"heldout": heldout, "test": test, "chosen": run.folder.name == best})
            epsilon = ", ".join(f"{figure(value)} {by}" for by, value in fact.epsilon.items() if value is not None)
            mark = " *" if len(each) > 1 and run.folder.name == best else ""
            scores = [f"{metric} {measured[metric]:.2%}" if measured and metric else "-" for measured in (heldout, test)]
            table.add_row(run.label + mark, run.folder.name, *scores, fact.guarantee or "-", epsilon or "-")
    write_json(folder.made_private() / RESULTS, {"name": stated.name, "stages": rows})
    answer({"stages": rows, "statement": to_json(stated)})
    console = wide_console()
    console.print(table)
    if any(len(each) > 1 for each in runs.values()):
        console.print("* the best of its stage on the rows that its points are compared by", highlight=False)
    show_claim(stated.claim, console)
