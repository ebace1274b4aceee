"""Table 1 of McKenna et al. 2025: exact counts, and which printed ones they are not."""

import pytest

from dpx.config import build, recipes
from dpx.job.report import Analyse


def test_exact_counts_of_the_seven_sizes():
    _, job = build(recipes.compose(["+experiment=mckenna_table1_models"]))
    assert isinstance(job, Analyse)
    table, _ = job.analysis()
    rows = {row["model"]: row for row in table.as_json()["rows"] if row["vocabulary"] == 30522}
    exact = {"tiny": 4_433_468, "mini": 11_267_900, "small": 29_058_876, "medium": 41_668_412, "base": 110_106_428}
    exact |= {"large": 336_226_108, "mega": 732_389_180}
    assert {name: row["with_next_sentence"] for name, row in rows.items()} == exact
    assert all(row["exact"] == pytest.approx(row["table_4"], rel=0.03) for row in rows.values())
    assert rows["mega"]["exact"] < 0.95 * rows["mega"]["table_1"] < rows["mega"]["untied"]
