"""Which finished runs belong on the page of a paper: those that are points of their current recipe, on one corpus."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.config.identity import identity
from dpx.optimizer.lr_schedule import in_steps
from dpx.pages import read_runs
from dpx.pages.read_runs import Run, is_of_chain, knobs_of
from dpx_papers.report.sizes import FACT, PREFIX, recipe_of

# How a run is computed, and on which text, may differ from its recipe; what is computed may not.
_FREE = ("microbatch", "clipping_method", "data.name")
_SEARCHED = ("optimizer", "lr_schedule", "clip")
_WARM_UP = "lr_schedule.warmup_steps"
# What makes a run of a full-scale recipe smaller; with any other setting it is another experiment.
_OF_SIZE = ("model", "steps", "batch_schedule", "data", _WARM_UP, "privacy.delta", "task.max_masked_positions")


# A stage of a chain holds only what it changes: the options that it chooses, and values.
_OF_STAGE = re.compile(r"chain\.(?:common|stages\.[^.]+)\.(options|values)\.(.+)")
# Of a stage: how it is computed, on which weights it begins, and what its owner declares of the texts.
_FREE_OF_STAGE = ("mesh", "init", "clipping_method")
_DECLARED = re.compile(r"chain\.stages\.[^.]+\.disjoint_from")
_UNSET = "unset"
Also = Mapping[str, Sequence[str]]


def merged(kept: Iterable[Run], fresh: Sequence[Run], also: Also | None = None) -> tuple[list[Run], list[str]]:
    """Returns the runs of both, those of `fresh` where both have one. Runs outside their recipe's points are left out, with a line each; a
    run of a full-scale recipe that its command made smaller has the fact `smaller`, which says by what. `also` are overrides, by recipe,
    with which the paper has the recipe's points too."""
    new = {run.key for run in fresh}
    runs = [_sized(run, also or {}) for run in (*fresh, *(run for run in kept if run.key not in new))]
    reasons = strays(runs, also)
    return [run for run in runs if run.key not in reasons], [f"{'-'.join(key)}: {reasons[key]}" for key in sorted(reasons)]


def _sized(run: Run, also: Also) -> Run:
    """Returns the run, with the fact `smaller` if its recipe is at full scale and it differs from every point of it by its size alone."""
    facts = {key: value for key, value in run.facts.items() if key != FACT}
    points = [] if run.experiment.startswith(PREFIX) else _points(run.experiment, also)
    given, points = _compared(run, points)
    if points and _stray(given, points) and not _stray(_without_size(given), [_without_size(point) for point in points]):
        own = points[: len(_points_of(run.experiment))]
        swept = {key for key in points[0] if len({point.get(key) for point in own}) > 1}
        given, wanted = _with_warm_up_in_steps(given), _with_warm_up_in_steps(points[0])
        kept = swept | _without_size(wanted).keys()
        others = [key for key in wanted if key not in kept and given.get(key, wanted[key]) != wanted[key]]
        facts[FACT] = ", ".join(f"{key}={given[key]}" for key in others) or "at other points of its sweep"
    return dataclasses.replace(run, facts=facts)


def _compared(run: Run, points: list[dict[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Returns the settings of a run and those of the points that it is compared with. A chain at full scale has no other settings than its
    points: what one of them lacks is unset, and may not be set in another."""
    if run.experiment.startswith(PREFIX) or not is_of_chain(run):
        return run.config, points
    keys = [key for key in dict.fromkeys(key for one in (*points, run.config) for key in one) if not _is_free(key)]
    given, *wanted = ({key: one.get(key, _UNSET) for key in keys} for one in (run.config, *points))
    return given, wanted


def _is_free(key: str) -> bool:
    """Returns whether a setting of a chain may differ from its recipe, as those of a run may that no run is compared by."""
    found = _OF_STAGE.fullmatch(key)
    if found is None:
        return bool(_DECLARED.match(key))
    kind, setting = found.groups()
    return setting in _FREE_OF_STAGE if kind == "options" else not knobs_of({setting: ""}) or setting.startswith(_FREE)


def _without_size(knobs: dict[str, str]) -> dict[str, str]:
    """Returns the settings that are not of the size; those of a stage of a chain, and of its points, by what they set."""
    set_by = {value[2:-1]: key for key, value in knobs.items() if value.startswith("${point.")}
    return {key: value for key, value in knobs.items() if not _OF_STAGE.sub(r"\2", set_by.get(key, key)).startswith(_OF_SIZE)}


def strays(runs: Sequence[Run], also: Also | None = None) -> dict[tuple[str, str], str]:
    """Returns the reason why a run is not on the page, by the key of the run: it is not a point of its current recipe, or its corpus
    differs from that of the recipe's latest run with the same `data`. A recipe does not fix the corpus; runs that are compared share one.
    Runs that were made smaller are compared with runs of the same changes; the latest changes count.
    """
    compared = {run.key: _compared(run, _points(run.experiment, also or {})) for run in runs if FACT not in run.facts}
    reasons = {key: reason for key, found in compared.items() if (reason := _stray(*found))}
    points = sorted((run for run in runs if run.key not in reasons), key=lambda run: run.facts.get("at", ""))
    # Later runs come later here, so that each recipe ends with its latest.
    sizes = {run.experiment: run.facts[FACT] for run in points if FACT in run.facts}
    reasons |= {
        run.key: f"made smaller by {told}, not by {sizes[run.experiment]}"
        for run in points
        if (told := run.facts.get(FACT)) is not None and told != sizes[run.experiment]
    }
    corpora = {
        run.key: ((run.experiment, FACT in run.facts, run.config.get("data.name", "")), run.facts.get("corpus", "unknown"))
        for run in points
        if run.key not in reasons
    }
    latest = dict(corpora.values())
    pairs = ((key, corpus, latest[recipe]) for key, (recipe, corpus) in corpora.items())
    return reasons | {key: f"trained on {corpus}, not on {own}" for key, corpus, own in pairs if corpus != own}


def _points(name: str, also: Also) -> list[dict[str, str]]:
    """Returns the knobs of every point of the recipe, and of those with the overrides that the paper has too."""
    return [*_points_of(name), *(_points_of(name, tuple(also[name])) if name in also else ())]


@functools.cache
def _points_of(name: str, overrides: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Returns the knobs of every point of the current recipe; none if the recipe does not exist."""
    recipe = f"laptop/{recipe_of(name)}" if name.startswith(PREFIX) else name
    if recipe not in recipes.names():
        return []
    plain = ["hydra/sweeper=basic", "job=plan"]
    composed = [recipes.compose([f"+experiment={recipe}", *plain, *point, *overrides]) for point in recipes.points(recipe)]
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
