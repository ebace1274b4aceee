"""The pond's recipe, trained: every reader of the run folder names the package, and the run resumes with another version of it."""

import json
import os
import shutil

import pytest
from omegaconf import OmegaConf

import dpx
from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder, Status
from dpx.job.released_jobs import Evaluate
from dpx.job.report import Report
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import WITHOUT_NOISE
from tests.outside.made_up import POND, on_path, pond

BY = "dp_by_dpx_pond"
HERON = ("callbacks=heron", "callbacks.heron.protected=true")


def folder_at(root, name: str, *overrides: str):
    """The pond's recipe with its data under `root`, declared, and the run folder `name`."""
    overrides = (
        "+experiment=pond",
        f"data.directory={root}/data",
        "schedule.evaluation_rows=32",
        *HERON,
        f"callbacks.heron.file={root}/heron.jsonl",
        *overrides,
    )
    cfg = recipes.compose(list(overrides))
    return config.build(cfg), RunFolder(root / "outputs" / name, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pond")
    with on_path(pond(root / "site")):
        (experiment, job), folder = folder_at(root, "pond-1")
        job(experiment, folder)
        Status(folder.path, "train").write("finished")
        yield root, folder


def test_it_trains_and_states_the_packages_word(trained, capsys):
    _, folder = trained
    said = json.loads((folder.release / "privacy.json").read_text())
    assert said["guarantee"] == BY and said["epsilon"] == {} and said["spent"]["charged_steps"] == 3
    assert set(said["outside_code"][0]["parts"]) == {"model", "task", "data.source", "sampler", "mechanism", "clip", "callbacks.heron"}
    lines = [json.loads(line) for line in (folder.private / "metrics.jsonl").read_text().splitlines()]
    assert "privacy/epsilon" not in {name for line in lines for name in line}
    # Noise alone would not bring the loss below that of guessing among 128 pieces for long; three steps only have to be finite.
    assert json.loads((folder.private / "results.json").read_text())["heldout"]["loss"] > 0


def test_its_callback_is_told_every_moment_and_the_statement_says_what_it_was_given(trained):
    root, folder = trained
    told = [json.loads(line) for line in (root / "heron.jsonl").read_text().splitlines()]
    assert [(name, step) for name, step, *_ in told] == [("start", 0), ("evaluation", 3), ("save", 3), ("end", 3)]
    assert {guarantee for _, _, guarantee, _, _ in told} == {BY} and told[-1][-1] is True
    said = json.loads((folder.release / "privacy.json").read_text())["not_covered"]
    assert WITHOUT_NOISE + "this run gives to callbacks.heron (dpx_pond)" in said


def test_it_is_loaded_evaluated_and_reported_as_such(trained, tmp_path, capsys):
    root, folder = trained
    assert dpx.load(folder.path).privacy["guarantee"] == BY
    (experiment, _), _ = folder_at(root, "pond-1")
    Evaluate()(experiment, folder)
    assert f"guarantee: {BY}" in capsys.readouterr().out
    shutil.copytree(POND.parent / "experiments" / "pond", tmp_path / "pond")
    pytest.importorskip("matplotlib")
    new = RunFolder(tmp_path / "report", folder.config_yaml)
    Report(paper="pond", outputs=str(root / "outputs"), evidence=str(tmp_path))(experiment, new)
    text = (tmp_path / "pond" / "README.md").read_text()
    own = os.path.relpath(folder.private / "page.html", tmp_path / "pond")
    assert f'<a href="{own}"><code>1</code></a>' in (tmp_path / "pond" / "page.html").read_text()
    assert BY in (folder.private / "page.html").read_text() and "private/page" not in text
    assert f"| the package vouches for every run | {BY} | – | full scale | one run | ✅ pass |" in text and "| depth | 3 m |" in text


def test_without_the_package_it_is_refused_by_name(trained, monkeypatch):
    root, folder = trained
    import sys

    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(root / "site")])
    with pytest.raises(ConfigError, match="dpx_pond is not an installed package for dpx"):
        dpx.load(folder.path)


def test_another_version_goes_on_with_fresh_noise_and_charges_it(trained, tmp_path_factory):
    root, folder = trained
    newer = pond(tmp_path_factory.mktemp("newer"), "0.4")
    with on_path(newer):
        (experiment, job), _ = folder_at(root, "pond-1")
        job(experiment, folder)
    ledger = Ledger(folder.private / "ledger")
    assert [epoch.why for epoch in ledger.noise_epochs[1:]] == ["packages changed since this run began"]
    assert [epoch.fingerprint["packages"]["dpx_pond"]["version"] for epoch in ledger.noise_epochs] == ["0.3.1", "0.4"]
