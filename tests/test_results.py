"""What a run's results show: intervals of accuracies, baselines that are not exceeded, and the gradient-SNR beside them."""

import json
from pathlib import Path

import pytest
from scipy.stats import binomtest

from dpx.files.results import Results, interval, late_snr, metric_in_words, not_better, nothing_learnt, shown_metrics, write_results
from dpx.files.run_folder import Status
from dpx.launch.sweep_tables import Outcome
from dpx.pages.run_table import accuracy_of, epsilon_of, runs_in, state_of

from .test_sweep import _shown


def _results(accuracy: float, rows: int | None = 126) -> Results:
    return Results(steps=4, metric="accuracy", heldout={"accuracy": accuracy}, baselines={"most_frequent_class": 70 / 126}, rows=rows)


@pytest.mark.parametrize(("right", "rows"), [(0, 5), (70, 126), (126, 126), (1, 1), (930, 10_000)])
def test_the_interval_is_wilsons(right: int, rows: int) -> None:
    known = binomtest(right, rows).proportion_ci(0.95, "wilson")
    assert interval(right / rows, rows) == pytest.approx((known.low, known.high), abs=1e-12)


def test_a_classifier_at_chance_is_not_better_than_the_most_frequent_class() -> None:
    assert not_better(_results(76 / 126)) == {"accuracy": ["always answering the most frequent class (55.6%, 126 rows)"]}
    assert not_better(_results(100 / 126)) == {}
    assert not_better(_results(float("nan"))) != {}


def test_an_older_run_without_a_number_of_rows_is_compared_by_its_value() -> None:
    assert not_better(_results(0.56, rows=None)) == {} and not_better(_results(0.55, rows=None)) != {}
    assert metric_in_words("accuracy", 0.56) == "56.00%"


def _of_numbers(pearson: float, rmse: tuple[float, float, float], spearman: float = 0.4) -> Results:
    low, value, high = rmse
    heldout = {"pearson": pearson, "spearman": spearman, "rmse": value, "rmse_low": low, "rmse_high": high, "constant_rmse": 0.922}
    return Results(steps=4, metric="pearson", heldout=heldout, baselines={"constant": 0.0}, rows=400)


def test_every_metric_with_a_baseline_is_looked_at(tmp_path: Path) -> None:
    """A correlation above none beside an error that is worse than a constant's is told of the error."""
    heading, said = nothing_learnt(_of_numbers(0.184, (0.91, 0.976, 1.04)), tmp_path, False) or ("", "")
    assert heading == "learnt nothing by rmse" and "not better than always answering the same number by rmse (0.922, 400 rows). " in said
    assert nothing_learnt(_of_numbers(0.5, (0.75, 0.8, 0.85)), tmp_path, False) is None
    # An error whose interval holds the constant's.
    assert set(not_better(_of_numbers(0.5, (0.85, 0.9, 0.95)))) == {"rmse"}
    assert set(not_better(_of_numbers(0.5, (0.75, 0.8, 0.85), spearman=0.01))) == {"spearman"}
    assert (nothing_learnt(_of_numbers(0.01, (0.91, 0.976, 1.04)), tmp_path, False) or ("",))[0] == "learnt nothing"
    labels = {"subset_accuracy": 0.6, "micro_f1": 0.92, "macro_f1": 0.5, "constant_micro_f1": 0.8, "constant_macro_f1": 0.5}
    several = Results(steps=4, metric="subset_accuracy", heldout=labels, baselines={"most_frequent_labels": 0.1}, rows=400)
    assert not_better(several) == {"macro_f1": ["always answering the same labels by macro f1 (50.0%, 400 rows)"]}


def test_ends_stand_beside_their_metric() -> None:
    shown = shown_metrics(_of_numbers(0.5, (0.75, 0.8, 0.85)).heldout, "pearson", 400)
    assert list(shown) == ["pearson", "spearman", "rmse", "constant_rmse"] and shown["rmse"] == "0.8 (0.75 to 0.85)"


def test_the_reason_names_the_snr_and_what_raises_it(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "grad/snr": step / 100}) for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert late_snr(tmp_path) == pytest.approx(0.075)
    heading, said = nothing_learnt(_results(0.5), tmp_path, True) or ("", "")
    assert heading == "learnt nothing" and "gradient-SNR 0.075" in said
    assert all(word in said for word in ("batch_schedule.size", "train=lora", "steps", "learning_rate"))
    assert nothing_learnt(_results(0.9), tmp_path, True) is None
    assert "train=" not in str(nothing_learnt(_results(0.5), tmp_path, False))
    assert "SNR 0" not in str(nothing_learnt(_results(0.5), tmp_path / "absent", True))


def test_a_sweep_shows_intervals_and_replicates_together(tmp_path: Path) -> None:
    outcomes = []
    for number, score in enumerate((0.5, 0.7)):
        folder = tmp_path / f"run-{number}"
        write_results(folder / "private", _results(score))
        outcomes.append(Outcome(folder, ("noise.epsilon=8", f"replicate={number}"), "finished", score))
    shown = _shown(*outcomes)
    assert "50.00% (41.4% to 58.6%, 126 rows)" in shown and "60.00% ± 14.14%" in shown
    assert "±" not in _shown(outcomes[0])


def test_a_run_is_summed_up_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run-0"
    write_results(folder / "private", _results(0.7))
    assert runs_in(tmp_path) == [] and state_of(folder) == "not trained"
    (folder / "release").mkdir()
    (folder / "release" / "config.yaml").touch()
    Status(folder, "train").write("finished")
    assert runs_in(tmp_path) == [folder]
    assert (state_of(folder), accuracy_of(folder), epsilon_of(folder)) == ("finished", metric_in_words("accuracy", 0.7, 126), "")
