"""From records to a monotone grid: what each stage makes true, and what the next one keeps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpx.cost import surface
from dpx.cost.measured_runs import Measurements
from dpx.declaration import ConfigError

from .synthetic import RATIOS, form_l2, measured, rows_of


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, (2, 4, 12), elements=st.floats(1, 8, width=32)))
def test_the_second_pass_keeps_the_first(losses):
    found = surface.smooth(losses, width=3)
    assert (np.diff(found, axis=2) <= 1e-12).all() and (np.diff(found, axis=1) >= -1e-12).all()


@settings(max_examples=20, deadline=None)
@given(arrays(np.float64, 12, elements=st.floats(1, 8, width=32)))
def test_isotonic_is_the_closest_monotone_line(line):
    found = surface.isotonic(line, 0, increasing=False)
    assert found.mean() == pytest.approx(line.mean())
    for other in (np.sort(line)[::-1], np.full_like(line, line.mean()), 0.5 * (found + line.mean())):
        assert ((found - line) ** 2).sum() <= ((other - line) ** 2).sum() + 1e-9


def test_what_is_monotone_already_stays():
    losses = np.array([[[5.0, 4.0, 3.0], [5.5, 4.5, 3.5]]])
    assert np.array_equal(surface.smooth(losses, width=1), losses)


def test_a_rolling_mean_takes_the_last_records_there_are():
    assert surface.rolling_mean(np.array([1.0, 3.0, 5.0, 9.0]), 2).tolist() == [1.0, 2.0, 4.0, 7.0]
    assert surface.rolling_mean(np.array([1.0, 3.0]), 10).tolist() == [1.0, 2.0]


def test_both_choices_over_rates():
    losses = np.array([[5.0, 3.0, 2.9], [4.0, 3.5, 2.8]])
    pointwise, winner = surface.over_rates(losses)
    assert pointwise.tolist() == [4.0, 3.0, 2.8] and winner.tolist() == [1, 0, 1]
    assert surface.over_rates(losses, "lowest_final_loss")[0].tolist() == [4.0, 3.5, 2.8]


def test_a_rate_that_was_cut_short_does_not_win():
    losses, _ = surface.over_rates(np.array([[1.0, np.nan], [4.0, 3.5]]))
    assert losses.tolist() == [4.0, 3.5]
    with pytest.raises(ConfigError):
        surface.over_rates(np.array([[1.0, np.nan]]))


def test_a_partial_grid_is_the_largest_whole_rectangle_and_names_the_rest():
    # The largest model has two ratios yet, and one run of another is still going on.
    rows = [row for row in rows_of(form_l2) if row["model"] != "e" or row["noise_batch_ratio"] <= RATIOS[1]]
    rows = [row for row in rows if not (row["model"] == "d" and row["noise_batch_ratio"] == RATIOS[0] and row["step"] > 500)]
    grid = surface.grid_of(Measurements.from_rows(rows))
    assert grid.names == ("a", "b", "c", "d") and grid.ratios_R.tolist() == RATIOS[1:].tolist()
    assert {line.split()[0] for line in grid.left_out} == {"a", "b", "c", "d", "e"} and len(grid.left_out) == 6
    assert grid.left_out[-1] == f"d at ratio {RATIOS[0]:g}: no run has the grid's {len(grid.steps_T)} records"


def test_one_longer_run_takes_none_of_the_others_away():
    rows = rows_of(form_l2)
    longer = {**rows[0], "step": 2 * max(row["step"] for row in rows)}
    grid, whole = (surface.grid_of(Measurements.from_rows(found)) for found in ([*rows, longer], rows))
    assert grid.parameters_M.tolist() == whole.parameters_M.tolist() and grid.steps_T.tolist() == whole.steps_T.tolist()
    assert any("no run has the grid's" in line for line in grid.left_out) and not whole.left_out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "b"}, "both a and b"),
        ({"parameters": 7.0}, "^model a: has 7 and"),
        ({"loss": -1.0}, "column loss"),
        ({"learning_rate": -0.01}, "column learning_rate"),
    ],
)
def test_a_model_has_one_name_and_one_size_and_losses_are_positive(changed, said):
    rows = [row for row in rows_of(form_l2) if row["model"] == "a"]
    with pytest.raises(ConfigError, match=said):
        surface.grid_of(Measurements.from_rows([*rows, *({**row, **changed} for row in rows)]))


def test_the_largest_rectangle_of_many_models_is_found_at_once():
    cells = {
        (m, name, ratio) for m, name in ((float(n), str(n)) for n in range(40)) for ratio in (1.0, 2.0, 3.0) if (m, ratio) != (5.0, 2.0)
    }
    names = sorted({(m, name) for m, name, _ in cells})
    models, kept = surface._rectangle(cells, names, [1.0, 2.0, 3.0])
    assert (len(models), kept) == (39, [1.0, 2.0, 3.0])


def test_replicates_count_as_their_mean_and_the_winning_rate_is_kept():
    rows = rows_of(form_l2) + [row | {"replicate": 1, "loss": row["loss"] + 0.2} for row in rows_of(form_l2)]
    better = [row | {"learning_rate": 0.005, "loss": row["loss"] + (-0.1 if row["step"] > 1000 else 1.0)} for row in rows_of(form_l2)]
    grid = surface.grid_of(Measurements.from_rows(rows + better))
    assert grid.losses_MRT[0, 0, 0] == pytest.approx(form_l2(2e4, 100.0, RATIOS[0]) + 0.1)
    assert grid.rates_MRT[0, 0, 0] == 0.01 and grid.rates_MRT[0, 0, -1] == 0.005


def test_two_physical_batches_are_not_one_grid():
    rows = rows_of(form_l2)
    with pytest.raises(ConfigError, match="batch_size"):
        surface.grid_of(Measurements.from_rows([*rows, rows[0] | {"batch_size": 64}]))


def test_the_table_goes_to_a_file_and_back(tmp_path):
    found = measured(form_l2, deviation=0.1)
    found.write(tmp_path / "table.csv")
    again = Measurements.read(tmp_path / "table.csv")
    assert np.array_equal(again.loss, found.loss) and np.array_equal(again.model, found.model)
    (tmp_path / "other.csv").write_text("model,loss\na,1\n")
    with pytest.raises(ConfigError, match="parameters"):
        Measurements.read(tmp_path / "other.csv")
