"""Units of several rows: drawn whole they cost what one row costs; drawn row by row they never do."""

import dataclasses
from typing import Literal

import pytest

from dpx.claim import statement
from dpx.claim.calibration import Entries, calibrate
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.job.explain import explain
from dpx.privacy import ledger
from dpx.privacy.declared_privacy import Adjacency, Privacy, Rdp
from dpx.privacy.ledger import Ledger
from dpx.sampler import Deterministic, FixedSize

N = 1_000


class Manifest:
    rows = {"protected": 4_000}
    units = {"protected": N}
    vocabulary_source = "public_split"
    vocabulary_checksum = ""


@pytest.fixture
def units(small):
    """Documents of at most five rows, drawn whole unless said."""

    def vary(mode: Literal["group", "sample_units"] = "sample_units", adjacency: Adjacency = "zero_out", **changes):
        privacy = Privacy(delta=1e-5, unit="document", rows_per_unit_max=5, unit_mode=mode, adjacency=adjacency)
        return dataclasses.replace(small(accountant=Rdp()), privacy=privacy, **changes)

    return vary


def charged(experiment, path):
    entered = Ledger(path)
    entered.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(experiment.steps):
        entered.append(step, Entries.of(experiment.claim).of_step(N, 1.0, 64))
    return entered


def test_a_unit_drawn_whole_costs_what_a_row_costs(units, small):
    row = small(accountant=Rdp(), privacy={"delta": 1e-5})
    assert calibrate(units().claim, N).epsilon == calibrate(row.claim, N).epsilon


def test_rows_drawn_singly_are_never_charged_as_units(units, tmp_path):
    kinds = {mode: ledger.releases(charged(units(mode), tmp_path / mode).segments())[0][0].kind for mode in ("group", "sample_units")}
    assert kinds == {"group": "group", "sample_units": "poisson"}


def test_n_counts_what_is_drawn(units):
    assert units().privacy.population(Manifest) == N
    assert units("group").privacy.population(Manifest) == Manifest.rows["protected"]
    assert units().privacy.rows_per_example == 5 and units("group").privacy.rows_per_example == 1


@pytest.mark.parametrize(("sampler", "adjacency"), [(FixedSize(), "replace_one"), (Deterministic(), "zero_out")])
def test_units_drawn_whole_may_have_any_sampler(units, sampler, adjacency, small):
    row = small(accountant=Rdp(), sampler=sampler, privacy={"delta": 1e-5, "adjacency": adjacency})
    assert calibrate(units(sampler=sampler, adjacency=adjacency).claim, N).epsilon == calibrate(row.claim, N).epsilon


@pytest.mark.parametrize(("sampler", "adjacency"), [(FixedSize(), "replace_one")])
def test_rows_drawn_singly_may_not(units, sampler, adjacency):
    with pytest.raises(ConfigError, match="drawn row by row"):
        calibrate(units("group", sampler=sampler, adjacency=adjacency).claim, N)


def test_a_batch_is_counted_in_units(units):
    with pytest.raises(ConfigError, match="a step draws from 63 documents"):
        calibrate(units().claim, 63)


def test_the_statement_and_the_explanation_speak_of_units(units, tmp_path):
    experiment = units()
    calibrated = calibrate(experiment.claim, N)
    stated = statement.build(experiment.claim, Manifest, calibrated, charged(experiment, tmp_path / "ledger"))
    document = to_json(stated)
    assert document["unit_mode"] == "sample_units" and document["rows_per_unit_max"] == 5 and document["guarantee"] == "dp"
    assert any("whole document" in line for line in document["assumptions"])
    assert any(f"the number of documents ({N}) is public" in line for line in document["assumptions"])
    words = "\n".join(explain(experiment, N, stated).words)
    assert "the sum of the gradients of all rows of one document" in words and "each document is drawn" in words


def test_drawing_rows_as_units_is_refused():
    with pytest.raises(ConfigError, match="^privacy.unit_mode=sample_units with privacy.unit=row"):
        Privacy(delta=1e-5, unit_mode="sample_units")
