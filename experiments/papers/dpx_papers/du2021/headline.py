"""Recomputes RoBERTa-large's mean and its differences in the abstract of Du and Mi 2021 from the paper's own Table 2 (F21)."""

from dpx_papers.analysis import Input, Made, analysis
from dpx_papers.du2021 import table2
from dpx_papers.du2021.table2 import NON_PRIVATE, ROUNDING, dp_fp, dp_sgd
from dpx_papers.report.shape import Part


@analysis()
def dpfp_headline(published: Input, model: str, mean: float, over_dp_sgd: float, below_non_private: float) -> Made:
    """Compares the claims of the abstract with the printed numbers. The verdicts are on the arithmetic alone; another item judges whether
    the rows have a guarantee.

    Attributes:
        published: File of the printed numbers.
        model: Model of the claims.
        mean: Mean accuracy that the abstract gives.
        over_dp_sgd: Gain over DP-SGD that it gives.
        below_non_private: Loss against training without privacy that it gives.
    """
    scores = table2.scores(published)
    means = [
        {
            "model": name,
            "method": method,
            "printed": row["mean"],
            "from_five": table2.mean(row),
            "difference": table2.mean(row) - row["mean"],
        }
        for (name, method), row in scores.items()
    ]
    own, other, without = (table2.mean(scores[model, row]) for row in (dp_fp(3), dp_sgd(3), NON_PRIVATE))
    lines = (
        ("mean score, percent", mean, own, "one run; the last epoch"),
        ("over DP-SGD, points", over_dp_sgd, own - other, "DP-SGD has the printed epsilon, DP-FP has no guarantee"),
        ("below no privacy, points", below_non_private, without - own, "the best epoch on the reported set against the last"),
    )
    near = [row for row in means if abs(row["difference"]) <= ROUNDING]
    # A difference is between two rounded means.
    agree = all(abs(found - printed) <= 2 * ROUNDING for _, printed, found, _ in lines)
    words = ", ".join(f"{found:.2f} ({printed:.2f})" for _, printed, found, _ in lines)
    verdicts = [
        Part.of("the abstract's numbers follow from Table 2", agree, words),
        Part.of("every printed mean is that of its five scores", len(near) == len(means), f"{len(near)} of {len(means)} rows"),
    ]
    headline = [dict(zip(("quantity", "printed", "from_table_2", "compared"), line, strict=True)) for line in lines]
    return {"headline": headline, "means": means, "verdicts": verdicts}
