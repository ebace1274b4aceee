"""The same text cut several times: which rows a passage has, and what a claim on them says."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dpx.claim.calibration import calibrate
from dpx.data.declared_data import Vocabulary
from dpx.data.prepare import prepare
from dpx.data.store import Store
from dpx.data.unit_names import Split
from dpx.declaration import ConfigError
from dpx.job.run_plan import plan_of_run
from dpx.privacy.declared_privacy import Privacy
from tests.composed import composed
from tests.processes import COARSE

from .corpora import declared, records, write_records, write_vocabulary

REPEATS = 4
CORPUS = records(40)


def cut(folder: Path, repeats: int, pairs: str, privacy: Privacy | None = None) -> Store:
    folder.mkdir(exist_ok=True)
    vocabulary = Vocabulary(size=256, path=str(write_vocabulary(folder / "vocabulary.txt")))
    file = write_records(folder / "corpus.jsonl", CORPUS)
    data = declared(folder, file, unit_field="id", vocabulary=vocabulary, repeats=repeats, pairs=pairs, public_fraction=0.1)
    return prepare(data, privacy or Privacy(delta=1e-5))


def rows(store: Store, split: Split = "protected") -> np.ndarray:
    return store.rows(split, np.arange(store.manifest.rows[split]))["tokens"]


@pytest.mark.parametrize("pairs", ["none", "same_document", "cross_document"])
def test_rows_of_a_passage_follow_its_row_and_nothing_else_changes(tmp_path: Path, pairs: str) -> None:
    once, several = (cut(tmp_path / str(repeats), repeats, pairs) for repeats in (1, REPEATS))
    splits: tuple[Split, ...] = ("heldout", "public")
    for split in splits:
        assert np.array_equal(rows(once, split), rows(several, split)), "what is not trained on stands once"
    first, all_rows = rows(once), rows(several)
    places = []
    for row in first:
        (found,) = np.nonzero((all_rows[(places[-1] + 1) if places else 0 :] == row).all(axis=1))
        places.append(int(found[0]) + (places[-1] + 1 if places else 0))
    counts = np.diff([*places, len(all_rows)])
    assert places[0] == 0 and counts.max() == REPEATS and counts.mean() > REPEATS - 1, (
        "at most so many rows of a passage, one after another"
    )
    if pairs == "none":
        assert np.array_equal(all_rows, np.repeat(first, REPEATS, axis=0))
    else:
        differ = [len(np.unique(all_rows[start : start + count], axis=0)) for start, count in zip(places, counts, strict=True)]
        assert np.mean(differ) > 2, "segments are paired and trimmed anew"


def test_rows_beyond_the_most_of_a_document_are_dropped(tmp_path: Path) -> None:
    store = cut(tmp_path, REPEATS, "same_document", Privacy(delta=1e-5, unit="document", rows_per_unit_max=3))
    assert np.bincount(store.unit_of_rows("protected", np.arange(store.manifest.rows["protected"]))).max() == 3


HUB = (
    "data=hub",
    "model=micro",
    "data.sequence_length=64",
    "data.repeats=10",
    "data.declared_size=100000",
    "batch_schedule.size=500",
    "steps=50",
    COARSE,
)
GROUP = ("privacy.rows_per_unit_max=10", "data.pairs=cross_document")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), r"data.repeats=10 with privacy.unit=row: .* Use privacy.unit=document with privacy.rows_per_unit_max=<the most rows"),
        (GROUP[1:], r"data.repeats=10 with privacy.unit=row: .* Use privacy.rows_per_unit_max=10, or data.repeats=1"),
        (GROUP[:1], r"privacy.rows_per_unit_max=10: with privacy.unit=row a unit has exactly one row"),
        (("privacy.rows_per_unit_max=9", GROUP[1]), r"privacy.rows_per_unit_max=9: .* exactly 10 rows, the copies of one"),
    ],
)
def test_epsilon_of_one_row_is_not_claimed_for_a_text_that_several_rows_hold(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed(*HUB, *overrides)


@pytest.mark.slow
def test_a_row_is_charged_with_its_copies_and_the_epsilon_of_one_is_named_apart() -> None:
    """The group's epsilon is that of ten rows of a document, which the table of events proves; a target for one copy gives the same noise
    as the same run without repeats."""
    target = ("noise=target_copy", "noise.epsilon=2.0", "privacy.delta=1e-6")
    experiment = composed(*HUB, *GROUP, *target)[0]
    plan = plan_of_run(experiment)
    usual = composed(*HUB[:3], "data.declared_size=100000", *HUB[5:], *target[1:], "accountant=rdp")[0]
    assert plan.noise_multiplier == calibrate(usual.claim, 100000).noise_multiplier
    of_document = dataclasses.replace(
        composed(*HUB, "data.repeats=1", "privacy.unit=document", GROUP[0], "privacy.delta=1e-6", "noise=multiplier")[0],
        noise=composed("noise=multiplier", f"noise.noise_multiplier={plan.noise_multiplier!r}")[0].noise,
    )
    assert plan.epsilon == calibrate(of_document.claim, 100000).epsilon and (plan.epsilon["pld"] or 0) > 4
    named = {one.name: one for one in plan.unsupported}
    assert set(named) == {"epsilon/pld/one_copy", "epsilon/rdp/one_copy"}
    assert 1.99 < (named["epsilon/rdp/one_copy"].value or 0) <= 2.0
    assert "10 rows hold the same text" in named["epsilon/rdp/one_copy"].reason
    assert any("a protected row stands with its copies, 10 rows in all" in line for line in plan.assumptions)


def test_a_target_for_one_copy_needs_copies() -> None:
    with pytest.raises(ConfigError, match="noise=target_copy: a unit has no other rows"):
        calibrate(composed("model=micro", "noise=target_copy")[0].claim, 10_000)
