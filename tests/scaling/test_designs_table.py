"""The table of experiments/mckenna2025/designs.py: what is predicted beside what was trained, and beside choices by hand."""

import json
import runpy
from pathlib import Path

import pytest

DESIGNS = Path(__file__).parents[2] / "experiments" / "mckenna2025" / "designs.py"


def _finished(folder: Path, losses: list[float]) -> None:
    private = folder / "private"
    private.mkdir(parents=True)
    lines = [{"step": step, "train/loss": loss, "train/examples": 9.0} for step, loss in enumerate(losses, 1)]
    # A step that drew nobody has no loss.
    lines[-1] = {"step": len(losses), "train/examples": 0.0}
    (private / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (private / "results.json").write_text("{}")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    budget = tmp_path / "budget_4"
    (budget / "release").mkdir(parents=True)
    designs = {"name": "designs", "rows": [{"model": "width_32", "batch": 300, "steps": 700, "loss": 5.66}]}
    (budget / "release" / "design.json").write_text(json.dumps({"tables": [{"name": "curve", "rows": []}, designs]}))
    _finished(budget / "designed_0", [9.0] * 50 + [5.70] * 99 + [5.70])
    _finished(budget / "designed_1", [5.72] * 100)
    _finished(budget / "twenty_tokens_0", [5.80] * 150)
    _finished(budget / "middle_model_0", [5.72] * 150)
    (budget / "middle_model_1" / "private").mkdir(parents=True)
    (tmp_path / "frequencies.json").write_text("6.03")
    return tmp_path


def test_what_was_trained_stands_beside_what_was_predicted(work: Path) -> None:
    of = runpy.run_path(str(DESIGNS))
    rows = of["trained"](work)
    assert [row["replicate"] for row in rows] == [0, 1, 0, 0]
    of["write"](rows, work / "designs.csv")
    (line,) = [line for line in of["table"](of["read"](work / "designs.csv"), 0.01, 5).splitlines() if line.startswith("| 4")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["4, 2e+12", "width_32, 300 x 700", "5.660", "5.710 (5.700, 5.720)"]
    # A tenth of the way from word frequencies to the best loss that was measured is 0.05 nats.
    assert cells[4].startswith("0.050") and cells[6] == "better (+0.090)" and cells[8] == "tie (+0.010)"


def test_the_page_shows_what_was_kept() -> None:
    of = runpy.run_path(str(DESIGNS))
    deviation, pairs = of["seed_deviation"]()
    assert pairs >= 5 and 0.002 < deviation < 0.05
    assert of["table"](of["read"](of["TRAINED"]), deviation, pairs) in of["README"].read_text()


def test_choices_by_hand_cost_what_the_design_costs() -> None:
    of = runpy.run_path(str(DESIGNS))
    sizes = of["models"]()
    for _, compute in of["BUDGETS"]:
        chosen = of["by_hand"](compute)
        for model, batch, steps in chosen.values():
            assert 6 * sizes[model] * of["TOKENS"] * batch * steps == pytest.approx(compute, rel=0.01)
        assert chosen["twenty_tokens"] != chosen["middle_model"]
