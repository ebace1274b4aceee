"""A throwaway paper: fifteen made-up items, each a declaration in paper.yaml and at most one of these functions from rows to rows."""

import numpy as np

from dpx_papers.report.of_rows import of_rows


@of_rows
def means(rows):
    """Mean accuracy of each method, and how far it is above no training."""
    found = rows.groupby(["task", "method"], as_index=False)["accuracy"].mean()
    return found.assign(gain=found["accuracy"] - rows["accuracy"].min())


@of_rows
def gaps(rows):
    """What privacy costs on each task at each epsilon."""
    wide = rows.pivot_table(index=["task", "epsilon"], columns="method", values="accuracy", dropna=False).reset_index()
    return wide.assign(gap=wide["plain"].fillna(wide["plain"].max()) - wide["private"]).dropna(subset="gap")


@of_rows
def doublings(rows):
    """The gain in accuracy for every doubling of epsilon."""
    private = rows[rows["method"] == "private"].groupby("epsilon", as_index=False)["accuracy"].mean()
    return private.assign(gain=private["accuracy"].diff() / np.log2(private["epsilon"]).diff()).dropna()


@of_rows
def hardest(rows):
    """The task with the lowest accuracy of each method."""
    return rows.loc[rows.groupby("method")["accuracy"].idxmin(), ["method", "task", "accuracy"]]


@of_rows
def noise(rows):
    """Noise by batch size, by the rule that doubles both."""
    return rows.assign(ratio=rows["sigma"] / rows["batch"], expected=rows["sigma"].iloc[0] / rows["batch"].iloc[0])


@of_rows
def ends(rows):
    """The last accuracy of each run, as a fraction."""
    return rows.assign(share=rows["heldout/mlm_accuracy"] / 100)
