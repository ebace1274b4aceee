"""An analysis of two rows, through the job: JSON, CSV and terminal show the same; inputs are checked first."""

import csv
import json
from pathlib import Path

import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError, declaration
from dpx.files.run_folder import RunFolder
from dpx.job.plan import Plan
from dpx.job.report import Analyse
from dpx.job.run_plan import AnalysisInput, AnalysisPlan
from dpx.pages.analysis_tables import Table

EXPERIMENT, _ = config.build(recipes.compose([]))


@declaration
class Squares:
    """n and its square, after reading `path`."""

    path: str | None = None

    def inputs(self) -> list[Path]:
        return [] if self.path is None else [Path(self.path)]

    def __call__(self) -> list[Table]:
        return [Table("squares", ("n", "square"), ((2, 4), (1 / 3, None)), notes=("computed",))]


def test_tables_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Analyse(analysis=Squares())(EXPERIMENT, RunFolder(tmp_path))
    document = json.loads((tmp_path / "release" / "analysis.json").read_text())
    assert document["tables"][0]["rows"] == [{"n": 2, "square": 4}, {"n": 1 / 3, "square": None}]
    with open(tmp_path / "release" / "squares.csv") as file:
        assert list(csv.reader(file)) == [["n", "square"], ["2", "4"], [str(1 / 3), ""]]
    assert "0.33333" in capsys.readouterr().out


def test_absent_input_is_refused_and_planned(tmp_path: Path) -> None:
    analysis = Squares(path=str(tmp_path / "runs.csv"))
    with pytest.raises(ConfigError, match="runs.csv"):
        Analyse(analysis=analysis)(EXPERIMENT, RunFolder(tmp_path))
    planned = Plan(analysis=analysis).document(EXPERIMENT)
    assert isinstance(planned, AnalysisPlan) and planned.inputs == (AnalysisInput(path=str(tmp_path / "runs.csv"), exists=False),)


def test_an_analysis_has_to_be_chosen(tmp_path: Path) -> None:
    experiment, job = config.build(recipes.compose(["job=analyse"]))
    with pytest.raises(ConfigError, match="no analysis is chosen"):
        job(experiment, RunFolder(tmp_path))


def test_rows_have_as_many_cells_as_columns() -> None:
    with pytest.raises(ValueError, match="2 cells under 1"):
        Table("t", ("a",), ((1, 2),))


@pytest.mark.parametrize("job", [Analyse, Plan])
def test_a_value_that_is_no_analysis_is_refused_before_anything_is_planned(job):
    for value, reason in ((5, "is not an analysis"), ("anil_accounting", "needs the package of the papers")):
        with pytest.raises(ConfigError, match=f"analysis={value}: {reason}"):
            job(analysis=value)
