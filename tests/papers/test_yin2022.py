"""Yin and Habernal 2022: recipes that pre-train, names in a vocabulary, the corpus, and verdicts on made-up runs."""

import functools
from pathlib import Path
from typing import Any

import pytest

from dpx.claim import caveats
from dpx.claim.spent import RunFacts
from dpx.config import build, recipes
from dpx.config.declared_chain import declared
from dpx.data.declared_data import Data, TextFiles, Vocabulary
from dpx.data.protected_units import unit_facts
from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.declaration import ConfigError
from dpx.job.chain_stages import composed
from dpx.optimizer.lr_schedule import in_steps
from dpx_papers.yin2022.tokenizer_leak import FITTED, PUBLIC, legal_tokenizer_leak
from tests.report import made

from ..data.corpora import records, write_records

POINTS = {"legal_fig1a_snr_batch": 4, "legal_fig1b_snr_lr": 3, "legal_clip_sweep": 4, "legal_nonprivate_full": 1}
judged = functools.partial(made.verdict, "yin2022")


def experiments(name: str) -> list[Any]:
    return [build(recipes.plan_config(name, point))[0] for point in recipes.points(name)]


@pytest.mark.parametrize(("name", "runs"), POINTS.items())
def test_a_recipe_reads_one_row_of_each_document_and_epoch(name: str, runs: int) -> None:
    found = experiments(name)
    assert len(found) == runs
    for one in found:
        size, warmup = one.batch_schedule.size, in_steps(one.lr_schedule.warmup_steps, one.steps)
        assert one.steps == 5 * (one.data.declared_size // size) and warmup == max(25, one.steps // 20)
        assert (one.privacy.unit, one.privacy.unit_mode, one.privacy.rows_per_unit_max, one.data.cuts) == ("document", "one_row", 5, 5)
        assert one.data.pairs == "same_document" and one.privacy.delta == pytest.approx(1 / (1.1 * one.data.declared_size), rel=1e-4)


@pytest.mark.parametrize("by", ["hash", "first"])
def test_the_statement_says_which_documents_are_held_out(by: str) -> None:
    overrides = ["+experiment=legal_nonprivate_full", "mechanism=dp_sgd", f"data.heldout_by={by}"]
    experiment, _ = build(recipes.compose(overrides))
    assert unit_facts(experiment.data, experiment.privacy).heldout_by == by
    told = [
        line
        for line in caveats.assumptions(
            experiment.data, experiment.privacy, experiment.train, experiment.audit, None, 100, RunFacts.of(None)
        )
        if "the first 0.05 of the documents" in line
    ]
    assert len(told) == (by == "first")


def test_fine_tuning_ends_early_as_theirs_and_on_a_laptop_with_its_last_step() -> None:
    overruling = build(recipes.compose(["+base=legal_task"]))[0]
    casehold = build(recipes.compose(["+base=legal_task", "data=casehold", "task=multiple_choice", "batch_schedule.size=128"]))[0]
    found = [(one.schedule.stop_after_evaluations_without_gain, one.schedule.evaluate_every, one.gain_in) for one in (overruling, casehold)]
    assert found == [(4, 114, "macro_f1"), (2, 298, "macro_f1")]
    chain = build(recipes.plan_config("laptop/legal_best", recipes.points("laptop/legal_best")[0]))[1].chain
    stages = composed(declared(chain), "legal", 0, Path("outputs"))
    assert {run.experiment.schedule.stop_after_evaluations_without_gain for runs in stages.values() for run in runs} == {None}


@pytest.mark.parametrize("name", POINTS)
def test_its_laptop_recipe_runs_five_epochs_of_the_same_unit(name: str) -> None:
    for one in experiments(f"laptop/{name}"):
        assert 4.8 < one.steps * one.batch_schedule.size / 8022 <= 5 and one.privacy.unit_mode == "one_row"


def leak(folder: Path, **changed: Any) -> Any:
    corpus = write_records(folder / "corpus.jsonl", records(40))
    (folder / "vocabulary.txt").write_text("\n".join([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz", "river"]) + "\n")
    data = Data(name="test", source=TextFiles(paths=str(corpus)), vocabulary=Vocabulary(size=512), sequence_length=32)
    declared = {"names": ["brevlonska", "quandrithe"], "times": [1, 40], "size": 512}
    return legal_tokenizer_leak(data=data, public_vocabulary=str(folder / "vocabulary.txt"), **(declared | changed))


def test_a_fitted_vocabulary_lists_a_planted_name_and_a_public_one_does_not(tmp_path: Path) -> None:
    names, own, verdicts = leak(tmp_path)()
    found = {(row["vocabulary"], row["name"]): row["is_token"] for row in names.as_json()["rows"]}
    assert found[FITTED, "quandrithe"] and not found[PUBLIC, "quandrithe"] and not found["fitted without the names", "quandrithe"]
    assert [row["state"] for row in verdicts.as_json()["rows"]] == ["pass", "pass"]
    assert [row["documents_at_most"] for row in own.as_json()["rows"]] == [1, 2, 5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": ["two words"], "times": [1]}, r"analysis.names=\['two words'\]: a name is one word"),
        ({"times": [1]}, r"analysis.times=\[1\]: every name has one number of times"),
    ],
)
def test_names_that_cannot_be_planted_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        leak(tmp_path, **changed)


def test_the_corpus_is_counted_by_paragraphs(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", [{"text": "one\ntwo\n\ntwo"}, {"text": "four"}])
    (job,) = [build(recipes.compose(["+experiment=legal_table1_corpus", f"analysis.files=[{file},{tmp_path}/none.jsonl.gz]"]))[1].analysis]
    printed, here, verdicts = job()
    assert printed.as_json()["rows"][-1]["documents"] == 28_639_155
    (counted,) = here.as_json()["rows"]
    assert (counted["documents"], counted["paragraphs"], counted["distinct_paragraphs"], counted["bytes"]) == (2, 4, 3, 13)
    assert [row["state"] for row in verdicts.as_json()["rows"]] == ["fail", "pass", "pass"]


def _of_batches(ratios: dict[int, float], falls: float) -> list[Any]:
    return [
        made.run("legal_fig1a_snr_batch", 0.2, snr=lambda step, high=high: high * (1 - falls * step / 100), batch_schedule__size=size)
        for size, high in ratios.items()
    ]


def test_snr_by_batch() -> None:
    assert judged("L5").state == "not run"
    assert judged("L5", _of_batches({32: 0.1, 256: 0.3, 2048: 1.0}, 0.5)).state == "pass"
    assert [part.state for part in judged("L5", _of_batches({32: 0.1, 256: 0.3, 2048: 0.2}, -0.5)).parts] == ["fail", "fail"]


def _of_rates(swings: dict[float, float], accuracy: dict[float, float]) -> list[Any]:
    return [
        made.run(
            "legal_fig1b_snr_lr",
            accuracy[rate],
            snr=lambda step, swing=swing: 1 + swing * (-1) ** (step // 5),
            lr_schedule__learning_rate=rate,
        )
        for rate, swing in swings.items()
    ]


def test_too_large_a_rate() -> None:
    worse = {1e-3: 0.2, 2e-3: 0.25, 5e-2: 0.1}
    assert judged("L6", _of_rates({1e-3: 0.1, 2e-3: 0.1, 5e-2: 0.6}, worse)).state == "pass"
    better = {1e-3: 0.2, 2e-3: 0.25, 5e-2: 0.4}
    assert [part.state for part in judged("L6", _of_rates({1e-3: 0.6, 2e-3: 0.1, 5e-2: 0.1}, better)).parts] == ["fail", "fail"]


def _of_norms(accuracy: dict[float, list[float]], clipped: float) -> list[Any]:
    curves = {"grad/clipped_fraction": ((50, clipped), (100, clipped))}
    return [
        run
        for norm, values in accuracy.items()
        for run in made.replicates("legal_clip_sweep", values, curves=curves, clip__clipping_norm=norm)
    ]


def test_clipping_norm() -> None:
    assert judged("L10", _of_norms({0.01: [0.200, 0.201], 0.1: [0.201, 0.202], 1.0: [0.200, 0.201]}, 0.99)).state == "pass"
    states = [part.state for part in judged("L10", _of_norms({0.01: [0.20, 0.21], 0.1: [0.30, 0.31], 1.0: [0.40, 0.41]}, 0.5)).parts]
    assert states == ["fail", "fail"]


def test_without_privacy() -> None:
    private = _of_batches({32: 0.1, 256: 0.3}, 0.5)
    assert judged("L15", [*private, made.run("legal_nonprivate_full", 0.4, mechanism="NoPrivacy")]).state == "pass"
    assert judged("L15", [*private, made.run("legal_nonprivate_full", 0.1, mechanism="NoPrivacy")]).state == "fail"


@pytest.mark.slow
def test_a_chain_at_full_scale_is_planned_where_its_text_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary is declared disjoint from a text whose file does not exist yet."""
    monkeypatch.chdir(tmp_path)
    experiment, job = build(recipes.plan_config("legal_table2_baselines", []))
    assert {"sc_overruling", "sc_casehold"} <= {one.stage for one in job.document(experiment, None, tmp_path).stages}
