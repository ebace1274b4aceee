"""How large the runs behind a verdict are, and to which recipe a run or a table belongs, whatever its size."""

from dpx.pages.read_runs import Run

# Points of a recipe as it stands; runs under its name that their command made smaller; and runs of the recipe of that name in `laptop/`.
FULL, SMALLER, LAPTOP = "full scale", "made smaller", "laptop"
# The first one with a verdict has the verdict of the item.
SIZES = (FULL, LAPTOP, SMALLER)
# Of the names of runs and tables of the recipes in `laptop/`.
PREFIX = "laptop_"
# The fact of a run of a full-scale recipe that says by which settings it was made smaller.
FACT = "smaller"


def recipe_of(experiment: str) -> str:
    """Returns the full-scale recipe that a run or a table of this name belongs to."""
    return experiment.removeprefix(PREFIX)


def size_of(run: Run) -> str:
    """Returns which of `SIZES` a run has."""
    return LAPTOP if run.experiment.startswith(PREFIX) else SMALLER if FACT in run.facts else FULL
