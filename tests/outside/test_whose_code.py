"""Everything that ran is named: a package's job, a package that is only imported, and code of no package, by every road to a claim."""

import dataclasses
import importlib
import json
import sys
from typing import Any

import pytest

from dpx import config, packages
from dpx.claim import calibration, spent, statement, trial_charges
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.data.protected_units import unit_facts
from dpx.files.orbax_checkpoints import State
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job import explain
from dpx.job.train import Resume, Train
from dpx.launch.search import search_of
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.privacy.segments import decode
from dpx.statement import outside_code
from dpx.training import fingerprint, loop, opening, session
from tests.outside.made_up import on_path, package, record
from tests.planned import plan
from tests.tuning import made_up as trials

BY, SIZE, BATCH, SIGMA = "dpx_reed", 1000, 16, 2.0
OWN = ["steps=3", "accountant=rdp", "noise=multiplier", f"noise.noise_multiplier={SIGMA}", "privacy.delta=1e-4", "batch_schedule.size=16"]

# A job of a package that takes the noise away from dpx's own mechanism.
JOB = """
from unittest import mock

from dpx.declaration import declaration
from dpx.job import train
from dpx.mechanism.dp_sgd import DpSgd

noisy = DpSgd.noisy_sum


@declaration
class Train(train.Train):
    def __call__(self, experiment, folder):
        mute = lambda self, total, drawn, deviation, *rest: noisy(self, total, drawn, 0 * deviation, *rest)
        with mock.patch.object(DpSgd, "noisy_sum", mute):
            super().__call__(experiment, folder)
"""
FILES = {"job.py": JOB, "conf/job/reed.yaml": "# @package _global_\njob:\n  _target_: dpx_reed.job.Train\n", "patch.py": ""}


@pytest.fixture
def site(tmp_path):
    """A package that is installed and not imported yet."""
    path = tmp_path / "site"
    package(path, BY, FILES)
    with on_path(path):
        yield path


@pytest.fixture(params=["job", "import"])
def taking_part(request, site):
    """The job of an experiment of dpx's own, once the package takes part: by its job, or by being imported."""
    if request.param == "job":
        return config.build(recipes.compose([*OWN, f"data.declared_size={SIZE}", "job=reed"]))[1]
    importlib.import_module("dpx_reed.patch")
    return Train()


def _plan_of(of: Any, calibrated: Any) -> Any:
    return calibration.plan_of(of.claim, calibrated)


def built(*overrides: str) -> Experiment:
    return config.build(recipes.compose([*OWN, f"data.declared_size={SIZE}", *overrides]))[0]


def entered(experiment: Experiment, path, job=None) -> Ledger:
    found = Ledger(path / "ledger")
    found.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(3):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(SIZE, SIGMA, BATCH, job=job))
    return found


def stated(experiment: Experiment, held: Ledger | None = None, job=None) -> dict:
    return to_json(statement.build(experiment.claim, None, calibration.calibrate(experiment.claim, SIZE), held, job=job))


ROADS = {
    "entry": lambda experiment, job, path: calibration.Entries.of(experiment.claim).of_step(SIZE, SIGMA, BATCH, job=job).by,
    "planned steps": lambda experiment, job, path: calibration.Entries.of(experiment.claim).planned(((BATCH, 3),), SIZE, SIGMA)[0].by,
    "statement": lambda experiment, job, path: said(stated(experiment, None, job)),
    "statement of a ledger alone": lambda experiment, job, path: said(stated(experiment, entered(experiment, path, job))),
    "plan": lambda experiment, job, path: said(plan(experiment)),
    "search": lambda experiment, job, path: "+".join(search_of(trials.experiment("composition", 1)).by),
    "fingerprint": lambda experiment, job, path: "+".join(fingerprint.code_of_parts(experiment, job)["packages"]),
    "explanation": lambda experiment, job, path: BY if BY in json.dumps(explain.explain(experiment, SIZE, None).words) else None,
}


def said(document: dict) -> str | None:
    """The package that a statement or a plan names, with no number left as a bound."""
    assert document["guarantee"] == f"dp_by_{BY}" and document["epsilon"] == {} and document["unsupported"]
    assert [one["package"] for one in document.get("outside_code") or [{"package": BY}]] == [BY]
    return document["guarantee"].removeprefix("dp_by_")


# In turn by its job and by being imported.
BY_ROAD = [(road, way, place == number % 2) for number, road in enumerate(ROADS) for place, way in enumerate(("job", "import"))]


@pytest.mark.parametrize(
    ("road", "taking_part"),
    [pytest.param(road, way, marks=[pytest.mark.slow] * (not is_its_turn)) for road, way, is_its_turn in BY_ROAD],
    indirect=["taking_part"],
)
def test_a_package_that_takes_part_is_named_by_every_road(taking_part, road, tmp_path):
    assert ROADS[road](built(), taking_part, tmp_path) == BY


def test_a_package_that_is_installed_and_not_imported_takes_no_part(site, tmp_path):
    config.build(recipes.compose([]))
    assert recipes.names() and outside_code.packages_of(built(), Train()) == outside_code.packages_of(built(), Resume()) == ()
    assert stated(built(), entered(built(), tmp_path), Train())["guarantee"] == "dp"


def test_what_it_costs_does_not_depend_on_who_is_imported(site, tmp_path):
    before = _plan_of(built(), calibration.calibrate(built().claim, SIZE))
    importlib.import_module("dpx_reed.patch")
    assert _plan_of(built(), calibration.calibrate(built().claim, SIZE)) == before, "else resuming would look like a late choice"


def test_a_package_imported_between_two_steps_is_named_from_there_on_and_every_step_counts_once(site, tmp_path):
    experiment, found = built(), Ledger(tmp_path / "ledger")
    found.note_units(unit_facts(experiment.data, experiment.privacy, None))
    epoch = NoiseEpoch(number=0, name="e", from_step=0, start=None, secret_tag="", secret_place=1, fingerprint={}, why="")
    found.open_noise_epoch(epoch)
    run = object.__new__(loop.Run)
    vars(run).update(experiment=experiment, calibrated=calibration.calibrate(experiment.claim, SIZE), ledger=found, job=Train())
    loop._enter(run, epoch, 0)
    importlib.import_module("dpx_reed.patch")
    loop._enter(run, epoch, 1)
    assert [entry.by for _, entry in found.entries()] == [None, BY]
    whole = spent.planned_end(calibration.Entries.of(experiment.claim), run.calibrated, found)
    assert sorted(step for _, step, _ in decode(whole)) == [0, 1, 2]
    assert said(stated(experiment, found)) == BY
    plain = calibration.Entries.of(experiment.claim).planned(run.calibrated.batch_stages, SIZE, SIGMA)
    assert len(list(decode(trial_charges.union(plain, found.segments(), "trial")))) == 3


def test_a_package_imported_while_a_run_trains_is_stated_before_the_next_value_is_shown(site, monkeypatch):
    class Stated(Exception):
        pass

    def publish(_):
        raise Stated

    monkeypatch.setattr(session, "publish", publish)
    observe = session.Restatement(object.__new__(loop.Run))
    observe(1, object.__new__(State), {})
    importlib.import_module("dpx_reed.patch")
    with pytest.raises(Stated):
        observe(2, object.__new__(State), {})


def test_what_was_entered_stays_named_where_the_package_is_gone(taking_part, tmp_path):
    found = entered(built(), tmp_path, taking_part)
    for name in [name for name in sys.modules if name.startswith(BY)]:
        del sys.modules[name]
    assert outside_code.packages_of(built()) == () and said(stated(built(), found, Resume())) == BY


def test_a_job_of_no_package_is_named_by_its_module(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Louder(Train):
        """As a notebook has one."""

    assert calibration.Entries.of(built().claim).of_step(SIZE, SIGMA, BATCH, job=Louder()).by == "tests"
    (facts,) = stated(built(), None, Louder())["outside_code"]
    assert facts["version"] == "unlisted" and facts["parts"]["job"].endswith("Louder")
    Louder.__module__, Louder.__qualname__ = Train.__module__, Train.__qualname__
    assert outside_code.packages_of(built(), Louder()) == ("unknown",)


def test_every_base_of_a_job_that_is_not_dpxs_is_named(site):
    theirs = importlib.import_module("dpx_reed.job").Train

    @dataclasses.dataclass(frozen=True)
    class Both(theirs):
        """A notebook's, of a package's, of dpx's."""

    assert outside_code.packages_of(built(), Both()) == (BY, "tests")


def test_a_job_says_who_it_is_and_every_step_and_statement_asks(monkeypatch, tmp_path):
    """`Train` is what subclasses inherit; of what it opens, the loop and the statement read the job."""
    opened = []

    def opens(experiment, folder, job=None):
        opened.append(job)
        raise InterruptedError

    monkeypatch.setattr(opening, "open_run", opens)

    @dataclasses.dataclass(frozen=True)
    class Louder(Train):
        pass

    for job in (Louder(), Train()):
        with pytest.raises(InterruptedError):
            job(built(), RunFolder(tmp_path / "run"))
        assert opened.pop() is job


def test_a_package_that_is_set_aside_is_named_where_it_is_imported_and_an_entry_that_names_another_is_not(site, tmp_path):
    package(tmp_path / "other", "dpx_reed_too", {"conf/job/reed.yaml": "a: 1"})
    record(tmp_path / "third", "dpx_sly", entry="json")
    with on_path(tmp_path / "other"), on_path(tmp_path / "third"):
        assert all(one.set_aside for one in packages.outside()) and outside_code.imported() == ()
        importlib.import_module("dpx_reed_too")
        assert outside_code.packages_of(built()) == ("dpx_reed_too",)
