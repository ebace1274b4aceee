"""The chains of an item on its page: a line for each stage at each point."""

from collections.abc import Sequence

from dpx.pages.page_document import Block, code, escaped, grid
from dpx.pages.read_runs import HELD_OUT, Run
from dpx_papers.report import shape
from dpx_papers.report.privacy import bounds

_TEST_SET = "the test set itself"


def tables(runs: Sequence[Run]) -> list[Block]:
    """Returns the results of the stages of chains, replicates together, and those of every point of their sweeps."""
    columns = ("point", "stage", "setting chosen", "before", "held-out rows", "test set", "guarantee of the stage")
    chosen, all_points = [], []
    for point in dict.fromkeys(run.point for run in runs):
        own = [run for run in runs if run.point == point]
        for label in stages_of(own):
            name, bracket, setting = label.partition(" (")
            all_points.append(_line(own, label, name, code(setting.rstrip(")")) if setting else "–"))
            if not bracket:
                chosen.append(all_points[-1])
        chosen += [_line(own, name, name, _chosen(own, name)) for name in _swept(own)]
    count = f"{len(runs)} chain{'s' * (len(runs) > 1)}"
    interval = "in brackets: 95 % interval of the rows that were read (Wilson; of F1 an approximation); ±: standard deviation of replicates"
    found = [grid(columns, chosen), f"*{count} in all; {interval}.*"]
    if any(run.facts.get(f"{name}/compared_by") == _TEST_SET for run in runs for name in _swept([run])):
        found.append("**Chosen on the test set** (`select=test`), as the paper did: these scores are not those of unseen rows.")
    return [*found, grid(columns, all_points, "every point of their sweeps")] if len(all_points) > len(chosen) else found


def stages_of(runs: Sequence[Run]) -> list[str]:
    """Returns the labels of the runs of stages, in the order of their names; the chosen point of a sweep is not one of them."""
    labels = dict.fromkeys(key.removesuffix("/metric") for run in runs for key in run.facts if key.endswith("/metric"))
    swept = _swept(runs)
    return [label for label in labels if label not in swept]


def _swept(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(key.removesuffix("/chosen") for run in runs for key in run.facts if key.endswith("/chosen")))


def _line(runs: Sequence[Run], label: str, name: str, setting: str) -> tuple[str, ...]:
    return (code(runs[0].point), escaped(name), setting, *_scores(runs, label), _guarantee(runs, label))


def _chosen(runs: Sequence[Run], name: str) -> str:
    settings = ", ".join(dict.fromkeys(code(run.facts[f"{name}/chosen"]) for run in runs if f"{name}/chosen" in run.facts))
    return settings + " (chosen on the test set)" * any(run.facts.get(f"{name}/compared_by") == _TEST_SET for run in runs)


def _scores(runs: Sequence[Run], label: str) -> tuple[str, str, str]:
    """Returns the score before, on held-out rows and on the test set, as text."""
    metric = next((run.facts[f"{label}/metric"] for run in runs if f"{label}/metric" in run.facts), "")
    shown = "macro_f1" if any(f"{label}/heldout/macro_f1" in run.finals for run in runs) else metric
    rows = next((run.facts[f"{label}/before"] for run in runs if f"{label}/before" in run.facts), "")
    on = f" on {rows}" if rows and rows != HELD_OUT else ""
    before = _score(runs, f"{label}/before", shown, f"{label}/heldout/rows" if rows == HELD_OUT else "")
    heldout, test = (_score(runs, f"{label}/{place}/{shown}", shown, f"{label}/{place}/rows") for place in ("heldout", "test"))
    return before + escaped(on), heldout, test


def _score(runs: Sequence[Run], key: str, metric: str, rows: str) -> str:
    known = [run.finals for run in runs if key in run.finals]
    if not known:
        return "–"
    return f"{escaped(metric.replace('_', ' '))} {shape.of_rows([finals[key] for finals in known], metric, known[0].get(rows))}"


def _guarantee(runs: Sequence[Run], label: str) -> str:
    told = ", ".join(dict.fromkeys(run.facts.get(f"{label}/guarantee", "-") for run in runs))
    known = bounds(runs[0].facts, f"{label}/")
    return escaped(told) + f", ε = {known}" * bool(known)
