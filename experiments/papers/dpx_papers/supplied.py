"""What jobs of dpx's core ask the package of the papers for (`dpx.packages.supplied`)."""

from pathlib import Path
from typing import Any

from dpx.packages import require_extra


def report_of_papers(asked: Any) -> None:
    """Makes what `job=report report.paper=...` asks for (`dpx.job.report.Report`)."""
    for library in ("pandas", "jinja2", "matplotlib"):
        require_extra(f"report.paper={asked.paper}", "papers", library)
    from dpx_papers.report import written

    written.of_all(asked) if asked.paper == "all" else written.of_one(asked, asked.paper)


def readings(recipe: str) -> list[str]:
    """Returns a line for each setting of a recipe that its paper leaves open, by the paper.yaml of a checkout; none in a wheel."""
    from dpx_papers.report import readings as declared

    homes = sorted(path.parent for path in Path(__file__).parents[2].glob("*/paper.yaml"))
    return [one.words() for one in declared.of_recipe(recipe, homes)]


def published_optimum(size: int, epsilon: float) -> Any:
    """Returns the printed optimum of `job=design design.what=published`, or raises `ConfigError` for one that is not printed."""
    from dpx_papers.scaling import published

    return published.table(size, epsilon)
