"""The table and the choices of the authors of McKenna et al. 2025, on a table in their form that is made up, with optima that are known."""

import csv
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx.config import build, declare, recipes
from dpx.cost.designs import NEAR, Calibration, candidates
from dpx.declaration import ConfigError
from dpx.packages import option_file
from dpx_papers.analysis import analysis
from dpx_papers.mckenna2025 import authors
from dpx_papers.mckenna2025.lab import Lab
from dpx_papers.scaling.optima import optimum, saturating_compute
from tests.scaling.synthetic import simple_ratio

MODELS = ("BertTiny", "BertMini", "BertSmall", "BertBase", "BertLarge")
RATIOS = (0.0, 2.0**-16, 2.0**-12, 2.0**-8)
STEPS = np.arange(200, 16_001, 200)
ROUGH = np.where(np.arange(len(STEPS)) % 2, 0.2, -0.2)


def truth(parameters: Any, steps: Any, ratio: Any) -> Any:
    """Every curve of a model falls to its own E; a larger model has a lower one, and bears noise less well."""
    return 1.5 + 60 / parameters**0.25 + (8 + 4e3 * ratio**0.8 * (parameters / 4.5e6) ** 0.3) * steps**-0.3


def table(folder: Path, rough: float = 0.0, changed: Any = None) -> Path:
    """A table in the authors' form: of two rates, the second is above the first by a hundredth and as rough."""
    path, changed = folder / "results.csv", changed or {}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([changed.get(name, name) for name in ("Unnamed", *authors.COLUMNS)])
        for name, ratio, (number, rate) in itertools.product(MODELS, RATIOS, enumerate((2.0**-7, 2.0**-8))):
            losses = truth(authors.PARAMETERS[name], STEPS, ratio) + 0.01 * number + rough * ROUGH * (-1) ** number
            writer.writerows((0, changed.get(name, name), rate, step, ratio, loss) for step, loss in zip(STEPS, losses, strict=True))
    return path


def lab(path: Path, by: str, **changes: Any) -> Lab:
    own = declare(option_file("analysis/lab", "full"), "lab")
    return dataclasses.replace(own, **{"measurements": str(path), "by": by, "reach": 64, **changes})


def test_the_authors_table_is_read_by_its_columns(tmp_path: Path) -> None:
    measured, left_out = lab(table(tmp_path), "text").measured()
    assert len(measured) == 5 * 4 * 2 * 80 and not left_out
    found = set(zip(measured.model.tolist(), measured.parameters.tolist(), strict=True))
    assert found == {(name, authors.PARAMETERS[name]) for name in MODELS}
    assert set(measured.batch_size) == {1024} and set(measured.sequence_length) == {512} and measured.is_noisy.mean() == 0.75


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"BertTiny": "BertTny"}, "BertTny: is not a model of the paper"), ({"BertSmall": "BertTiny"}, "has two different losses")],
)
def test_a_table_that_cannot_be_the_authors_is_refused(changed: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        authors.read(table(tmp_path, changed=changed))
    assert not authors.is_table(table(tmp_path, changed={"Iterations": "Steps"})) and not authors.is_table(tmp_path)


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("rough"), rough=1.0)


def test_a_minimum_over_rough_rates_is_biased_and_one_over_smooth_rates_is_not(rough: Path) -> None:
    by_text, by_authors = (lab(rough, by).fitted() for by in ("text", "authors"))
    raw = np.meshgrid(by_text.grid.parameters_M, by_text.grid.ratios_R, STEPS, indexing="ij")
    assert float((by_text.grid.losses_MRT - truth(raw[0], raw[2], raw[1])).mean()) < -0.15
    place = np.meshgrid(by_authors.surface.parameters_M, STEPS[10:-10:7], RATIOS[1:], indexing="ij")
    assert abs(float((by_authors.surface.at(*place).loss - truth(*place)).mean())) < 0.02


def test_steps_logarithms_bands_accounting_and_the_rule_of_table_2_are_those_of_the_option(tmp_path: Path) -> None:
    by_text, by_authors = (lab(table(tmp_path), by) for by in ("text", "authors"))
    fitted = by_authors.fitted()
    surface = fitted.surface
    assert (
        surface.steps_T[0] == 1000
        and surface.at(4.5e6, 500, 2.0**-12).is_outside
        and not by_text.fitted().surface.at(4.5e6, 500, 0.001).is_outside
    )
    ends = [float(surface.at(m, 8000, 2.0**-12).loss) for m in (4.5e6, 11.4e6)]
    assert surface.at(np.sqrt(4.5e6 * 11.4e6), 8000, 2.0**-12).loss == pytest.approx(np.sqrt(ends[0] * ends[1]))
    assert (by_text.near, by_authors.near) == (NEAR, 0.02)
    assert fitted.notes[-1] == "by the choices of the published code, analysis.lab.by=authors"
    assert by_text.fitted().notes[-1] == "by the choices of the text"
    losses = np.array([3.0, 2.4, 2.0, 2.5])
    assert [saturating_compute(np.array([1.0, 2.0, 3.0, 4.0]), losses, of_best=best) for best in (False, True)] == [2.0, 3.0]


def test_beyond_the_measured_steps_every_curve_falls_to_the_e_of_the_curve_without_noise(tmp_path: Path) -> None:
    surface = lab(table(tmp_path), "authors").fitted().surface
    assert surface.steps_T[-1] == 64 * 16_000 and surface.noiseless is not None
    place = np.meshgrid(surface.parameters_M, surface.steps_T[-6:], RATIOS, indexing="ij")
    assert surface.at(*place).loss == pytest.approx(truth(*place), rel=1e-3)


def test_the_optimum_of_the_option_is_the_known_one(tmp_path: Path) -> None:
    surface = lab(table(tmp_path), "authors").fitted().surface
    for compute in (1e18, 1e20):
        found = optimum(surface, simple_ratio, size=1e7, epsilon=4, compute=compute, near=0.02)
        assert found is not None
        asked = candidates(surface, simple_ratio, compute=compute, size=1e7)
        known = np.where(np.isfinite(asked.loss), truth(asked.parameters, asked.steps, np.maximum(asked.ratio, RATIOS[1])), np.inf)
        best = int(np.argmin(known))
        assert found.loss == pytest.approx(known[best], rel=0.02)
        apart = [np.log(found.parameters / asked.parameters[best]), np.log(found.batch_size / asked.batch_size[best])]
        assert abs(apart[0]) < 0.5 and abs(apart[1]) < 0.75
        assert found.smallest_model <= asked.parameters[best] <= found.largest_model


def test_poisson_sampling_alone_is_accounted_where_fixed_batches_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "_poisson", lambda self, q, steps: np.full(q.shape, 100.0))
    at = (np.array([1e7]), np.array([1000.0]), np.array([10.0]))
    both, alone = (Calibration(64, 1e-8, poisson_alone=alone).ratio(*at) for alone in (False, True))
    assert alone[0][0] == 0.1 > both[0][0] and both[1][0] and not alone[1][0]


@pytest.mark.slow
def test_the_option_has_the_authors_axes_and_the_table_is_named_once(tmp_path: Path) -> None:
    path = table(tmp_path)
    asked = [f"+experiment={name}" for name in ("mckenna_fig6_full_grid", "mckenna_fig3c_token_ratio")]
    grid, ratio = (build(recipes.compose([one, "analysis/lab=authors", f"analysis.measurements={path}"]))[1] for one in asked)
    text: Any = build(recipes.compose([asked[0], f"analysis.measurements={path}"]))[1]
    assert isinstance(grid.analysis.lab, Lab) and grid.analysis.lab.by == "authors" and grid.analysis.inputs() == [path]
    assert list(grid.analysis.times_of_compute) == [0.01, 1, 100, 10000] and grid.analysis.lab.computes == 100
    assert list(ratio.analysis.epsilons) == [10**power for power in range(7)]
    assert text.analysis.lab.by == "text" and text.analysis.lab.measurements == str(path)


def test_an_analysis_without_a_lab_takes_no_measurements() -> None:
    @analysis()
    def made(size: int) -> dict[str, Any]:
        """Makes nothing.

        Attributes:
            size: A number.
        """
        return {}

    with pytest.raises(ConfigError, match=r"analysis\.measurements=somewhere: this analysis reads no measurements"):
        made(size=1, measurements="somewhere")
