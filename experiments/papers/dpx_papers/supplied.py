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
    """Returns a line for each setting of a recipe that its paper leaves open, by the paper.yaml of each paper."""
    from dpx_papers.report import readings as declared

    return [one.words() for one in declared.of_recipe(recipe, homes(Path(__file__).parent))]


def homes(package: Path) -> list[Path]:
    """Returns the folders with a paper.yaml: those inside an installed wheel, or beside the package in a checkout."""
    in_wheel = package / "declared"
    return sorted(path.parent for path in (in_wheel if in_wheel.is_dir() else package.parents[1]).glob("*/paper.yaml"))


def published_optimum(size: int, epsilon: float) -> Any:
    """Returns the printed optimum of `job=design design.what=published`, or raises `ConfigError` for one that is not printed."""
    from dpx_papers.scaling import published

    return published.table(size, epsilon)
