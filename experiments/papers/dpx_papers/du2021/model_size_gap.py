"""Computes the difference of DP-FP's printed scores to those without privacy, by size of the model (Du and Mi 2021, section 4.2, F20)."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpx_papers.analysis import Input, Made, analysis, frame
from dpx_papers.du2021 import table2
from dpx_papers.du2021.table2 import NON_PRIVATE, ROUNDING, TARGETS, TASKS, dp_fp
from dpx_papers.report.shape import Part


@analysis()
def dpfp_model_size_gap(
    published: Input, parameters: Mapping[str, int], printed_mean_gaps: Mapping[int, Sequence[float]], printed_sst2_gap: float
) -> Made:
    """Computes gaps between model sizes from the printed numbers.

    Attributes:
        published: File of the printed numbers.
        parameters: The models in their order of size, with their parameters.
        printed_mean_gaps: By printed epsilon the smallest and the largest mean gap in the text.
        printed_sst2_gap: Its gap of the largest model on SST-2.
    """
    scores, lines, reverse = table2.scores(published), [], []
    for model, size in parameters.items():
        for target in TARGETS:
            without, own = scores[model, NON_PRIVATE], scores[model, dp_fp(target)]
            means = {"non_private_mean": table2.mean(without), "dp_fp_mean": table2.mean(own)}
            means["mean_gap"] = means["non_private_mean"] - means["dp_fp_mean"]
            by_task = {task: without[task] - own[task] for task in TASKS}
            lines.append({"model": model, "parameters": size, "printed_epsilon": target} | means | by_task)
        # Cells in which the row of less noise has the lower score: a lower limit of the variation of one run by chance.
        noisy, less = (scores[model, dp_fp(target)] for target in TARGETS)
        for task in (task for task in TASKS if noisy[task] > less[task]):
            cell = {"model": model, "task": task, "at_printed_3": noisy[task], "at_printed_8": less[task]}
            reverse.append(cell | {"excess": noisy[task] - less[task]})
    gaps = frame(lines)
    of_largest = gaps[gaps["model"] == list(parameters)[-1]].iloc[0]["SST-2"]
    claims = [("gap of the largest model on SST-2", TARGETS[0], printed_sst2_gap, of_largest)]
    for target, (low, high) in printed_mean_gaps.items():
        own = gaps.loc[gaps["printed_epsilon"] == target, "mean_gap"]
        claims += [("smallest mean gap", target, low, own.min()), ("largest mean gap", target, high, own.max())]
    compared = frame(claims, columns=["claim", "printed_epsilon", "printed", "from_table_2"])
    compared["difference"] = compared["from_table_2"] - compared["printed"]
    return {"gaps": gaps, "claims": compared, "reversed": reverse, "verdicts": judged(gaps, compared, reverse)}


def judged(gaps: Any, claims: Any, reverse: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: whether the gap falls with size, and whether the text's numbers are those of the table."""
    by_target = gaps.sort_values("parameters").groupby("printed_epsilon")["mean_gap"]
    falls = all((own.diff().dropna() < 0).all() for _, own in by_target)
    words = "; ".join(f"{target}: " + ", ".join(f"{gap:.2f}" for gap in own) for target, own in by_target)
    off = claims[claims["difference"].abs() > ROUNDING].itertuples()
    apart = "; ".join(f"{row.claim} at {row.printed_epsilon}: {row.printed:.2f}, table {row.from_table_2:.2f}" for row in off)
    most = max((row["excess"] for row in reverse), default=0.0)
    return [
        Part.of("the mean gap falls with the size of the model", falls, words),
        Part.of("the gaps in the text are those of Table 2", not apart, apart or "all agree"),
        Part.of("less noise never scores lower", not reverse, f"{len(reverse)} cells reversed, by up to {most:.2f} points"),
    ]
