"""Which finished runs belong on the page of a paper: those that are points of their current recipe, on one corpus."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.config.identity import identity
from dpx.optimizer.lr_schedule import in_steps
from dpx.pages import read_runs
from dpx.pages.read_runs import Run, knobs_of

# How a run is computed, and on which text, may differ from its recipe; what is computed may not.
_FREE = ("microbatch", "clipping_method", "data.name")
_SEARCHED = ("optimizer", "lr_schedule", "clip")
_WARM_UP = "lr_schedule.warmup_steps"


def merged(kept: Iterable[Run], fresh: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Returns the runs of both, those of `fresh` where both have one. Runs outside their recipe's points are left out, with a line each."""
    new = {run.key for run in fresh}
    runs = [*fresh, *(run for run in kept if run.key not in new)]
    reasons = strays(runs)
    return [run for run in runs if run.key not in reasons], [f"{'-'.join(key)}: {reasons[key]}" for key in sorted(reasons)]


def strays(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """Returns the reason why a run is not on the page, by the key of the run: it is not a point of its current recipe, or its corpus
    differs from that of the recipe's latest run with the same `data`. A recipe does not fix the corpus; runs that are compared share one.
    """
    reasons = {run.key: reason for run in runs if (reason := _stray(run.config, _points_of(run.experiment)))}
    points = sorted((run for run in runs if run.key not in reasons), key=lambda run: run.facts.get("at", ""))
    corpora = {run.key: (run.experiment, run.config.get("data.name", ""), run.facts.get("corpus", "unknown")) for run in points}
    # Later runs come later here, so that each recipe ends with its latest.
    latest = {(recipe, data): corpus for recipe, data, corpus in corpora.values()}
    pairs = ((key, corpus, latest[recipe, data]) for key, (recipe, data, corpus) in corpora.items())
    return reasons | {key: f"trained on {corpus}, not on {own}" for key, corpus, own in pairs if corpus != own}


@functools.cache
def _points_of(name: str) -> list[dict[str, str]]:
    """Knobs of every point of the current recipe; empty if the recipe does not exist."""
    recipe = name.replace("laptop_", "laptop/", 1)
    if recipe not in recipes.names():
        return []
    plain = ["hydra/sweeper=basic", "job=plan"]
    composed = [recipes.compose([f"+experiment={recipe}", *plain, *point]) for point in recipes.points(recipe)]
    if composed[0].get("chain") is not None:
        return [read_runs.knobs(cast(dict[str, Any], OmegaConf.to_container(one, resolve=False))) for one in composed]
    configs = [config.resolved(one) for one in composed]
    sweep = recipes.compose([f"+experiment={recipe}", "hydra/sweeper=basic"], with_hydra=True).hydra.sweeper.params
    searched = any("interval" in str(value) for value in (sweep or {}).values())
    left_out = _SEARCHED if searched else ()
    return [{key: value for key, value in knobs_of(identity(one)).items() if not key.startswith(left_out)} for one in configs]


def _stray(knobs: dict[str, str], wanted: list[dict[str, str]]) -> str | None:
    """Returns the reason why the run is not a point of its current recipe, or `None`. A key that only one of the two has does not count."""
    if not wanted:
        return "no recipe of that name"
    fixed = _with_warm_up_in_steps({key: value for key, value in knobs.items() if not key.startswith(_FREE)})
    differences = (
        [f"{key}={fixed[key]}, not {point[key]}" for key in point if fixed.get(key, point[key]) != point[key]]
        for point in map(_with_warm_up_in_steps, wanted)
    )
    fewest = min(differences, key=len)
    return f"not a point of its recipe: {'; '.join(fewest)}" if fewest else None


def _with_warm_up_in_steps(knobs: dict[str, str]) -> dict[str, str]:
    """Returns the settings of a run with its warm-up in steps, which may be given as a fraction of them."""
    given, steps = knobs.get(_WARM_UP, ""), knobs.get("steps", "")
    is_fraction = "." in given and steps.isdecimal()
    return knobs | {_WARM_UP: str(in_steps(float(given), int(steps)))} if is_fraction else knobs
