"""The command of a full-scale recipe, made tiny, and that of the page: what a person with a pod runs, for real."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from tests.processes import CHECKOUT, COARSE, answers

TINY = (
    *("model=micro", "model.layers=1", "mesh=single", "microbatch=16", "steps=8", "lr_schedule.warmup_steps=2", COARSE),
    *("data=synthetic", "data.sequence_length=64", "data.declared_size=17000", "privacy.delta=1e-5", "schedule.evaluation_rows=64"),
)
SIZES = (16, 256)


@pytest.mark.slow
def test_runs_of_a_full_scale_recipe_on_the_micro_model_fill_its_page(tmp_path: Path) -> None:
    home = tmp_path / "page" / "anil2021"
    home.mkdir(parents=True)
    for name in ("paper.yaml", "published.csv", "notes.csv"):
        shutil.copy(CHECKOUT / "experiments" / "anil2021" / name, home)
    sweep = ["-m", "+experiment=anil_batch_sweep", f"batch_schedule.size={','.join(map(str, SIZES))}", *TINY]
    page = ["job=report", "report.paper=anil2021", "report.evidence=page"]
    (trained,) = answers([(tmp_path, sweep)], trains_alike=True)
    assert trained.returncode == 0, trained.stderr
    (drawn,) = answers([(tmp_path, page)])
    assert drawn.returncode == 0, drawn.stderr

    text = (home / "README.md").read_text()
    item = text[text.index("## A7. ") : text.index("## A8. ")]
    claims = [line for line in item.splitlines() if "| made smaller | one run |" in line]
    assert len(claims) == 3 and all(line.endswith(("✅ pass |", "❌ fail |")) for line in claims)
    assert "| laptop |" not in item and "| full scale |" not in item
    assert "Runs made smaller by their command: model.name=micro" in item and "made smaller runs by point: 2 in all" in item

    figures = {path.stem: path.read_text() for path in (home / "figures").glob("*.svg")}
    assert set(figures) == {"anil-figure-2", "anil-figure-3", "anil-figure-3-ends"} and "made smaller" in figures["anil-figure-3"]

    statements = [json.loads(path.read_text()) for path in (tmp_path / "outputs").glob("*/release/privacy.json")]
    assert len(statements) == len(SIZES)
    for statement in statements:
        assert statement["guarantee"] == "dp"
        for accountant, epsilon in statement["epsilon"].items():
            assert f"{epsilon:.4g} ({accountant})" in item
    assert "Privacy, made smaller: **dp**" in item and "no ε to state" not in item
    with (home / "results.csv").open() as rows:
        assert {line["experiment"] for line in csv.DictReader(rows)} == {"anil_batch_sweep"}
