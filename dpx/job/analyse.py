"""`job=analyse`: one analysis into tables. No model is trained; jax starts only in an analysis that computes gradients."""

from typing import Any

from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import declaration, require
from dpx.files.run_folder import RunFolder, write_json
from dpx.packages import without_papers
from dpx.pages import pictures
from dpx.pages.analysis_tables import Table


@declaration
class Analyse:
    """Computes the tables of an analysis, prints them, and writes `release/analysis.json` and a CSV of each.

    An analysis is a declaration that is called without arguments and returns a list of `dpx.pages.analysis_tables.Table`. It may have two
    more methods: `inputs() -> list[Path]`, the files that it reads, which must exist; and `pictures(tables) -> list[Picture]` of its tables
    (`dpx.pages.analysis_tables`), which are drawn if matplotlib (extra `plots`) is installed.

    Attributes:
        analysis: The analysis, chosen by analysis=<name>.
    """

    analysis: Any = None

    def __post_init__(self) -> None:
        require_analysis(self.analysis)

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(
            self.analysis is not None, "analysis", "no analysis is chosen", "Add analysis=<name>, or choose an experiment that sets one"
        )
        absent = [str(entry["path"]) for entry in inputs(self.analysis) if not entry["exists"]]
        require(not absent, ", ".join(absent), "the analysis reads this file, but the file is missing", "Run the job that writes it first")
        tables: list[Table] = self.analysis()
        folder.made_release()
        document = {"name": experiment.name, "tables": [table.as_json() for table in tables]}
        write_json(folder.release / "analysis.json", document)
        answer(document)
        console = wide_console()
        for table in tables:
            table.write_csv(folder.release)
            console.print(table.shown())
            for note in table.notes:
                console.print(f"  {note}", highlight=False)
        shown = self.analysis.pictures(tables) if hasattr(self.analysis, "pictures") else []
        drawn = pictures.write(shown, tables, folder.release)
        if drawn:
            console.print(drawn, highlight=False, soft_wrap=True)


def require_analysis(analysis: Any) -> None:
    """Raises `ConfigError` for a value other than an analysis; `None` says that no analysis is chosen."""
    # Without a package that has analyses, this group of options does not exist, and a name stays a text.
    if isinstance(analysis, str):
        raise without_papers(f"analysis={analysis}")
    known = analysis is None or callable(analysis)
    require(known, f"analysis={analysis}", "is not an analysis", "Choose one by its name: analysis=<name>, listed by --help")


def inputs(analysis: Any) -> list[dict[str, Any]]:
    """Returns the path of each input and whether it exists."""
    return [{"path": str(path), "exists": path.exists()} for path in getattr(analysis, "inputs", list)()]
