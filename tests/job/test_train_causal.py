"""A causal decoder through the same jobs: planned, trained, measured again."""

import json
from typing import Literal

import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.data import left_out
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.generate import Generate
from dpx.job.released_jobs import Evaluate
from dpx.models.shape import Decoder
from dpx.statement import agreement
from tests.planned import plan
from tests.processes import COARSE

CAUSAL = ["model=decoder_micro", "model.layers=1", "task=causal_lm", "data=synthetic", "data.pairs=none", "data.sequence_length=16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("causal")
    overrides = CAUSAL + ["steps=2", "microbatch=4", "batch_schedule.size=8", "schedule.evaluation_rows=64", "accountant=rdp"]
    overrides += ["noise=multiplier", "noise.noise_multiplier=1.0", "privacy.delta=1e-4", f"data.directory={root}/data", COARSE]
    cfg = recipes.compose(overrides)
    experiment, job = config.build(cfg)
    folder = RunFolder(root / "finished", OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))))
    job(experiment, folder)
    return experiment, folder


def test_a_run_has_the_tasks_own_figures(trained):
    experiment, folder = trained
    results = json.loads((folder.private / "results.json").read_text())
    assert results["metric"] == "next_token_accuracy"
    assert results["heldout"].keys() == {"loss", "next_token_accuracy", "perplexity"}
    lines = [json.loads(line) for line in (folder.private / "metrics.jsonl").read_text().splitlines()]
    assert {"train/loss", "train/next_token_accuracy", "train/perplexity", "grad/snr", "privacy/epsilon"} <= lines[-1].keys()
    # An untrained model is about as good as a uniform guess among the vocabulary's words.
    assert 1 < lines[0]["train/perplexity"] < 2 * experiment.data.vocabulary.size
    Evaluate()(experiment, folder)
    again = json.loads((folder.private / "evaluation.json").read_text())
    assert again["perplexity"] == pytest.approx(results["heldout"]["perplexity"], rel=1e-5)
    assert 0 < again["most_frequent_token_accuracy"] < 1


def test_a_run_completes_prompts_and_says_what_its_statement_covers(trained, tmp_path):
    experiment, folder = trained
    (tmp_path / "asked.jsonl").write_text('{"prompt": "some words"}\n{"prompt": "other words of this text"}\n')
    written, trees = {}, {"protected": folder.private, "public": folder.release}
    provenances: tuple[Literal["protected", "public"], ...] = ("protected", "public")
    for provenance in provenances:
        tree = trees[provenance]
        Generate(prompts=str(tmp_path / "asked.jsonl"), max_new_tokens=3, prompts_provenance=provenance)(experiment, folder)
        written[provenance] = (tree / "generated" / "asked.jsonl").read_text()
        told = json.loads((tree / "generated" / "asked.json").read_text())
        assert told["guarantee"] == "dp" and ("completions have the same" in told["covers"]) == (provenance == "public")
    lines = [json.loads(line) for line in written["public"].splitlines()]
    assert written["public"] == written["protected"] and [line["row"] for line in lines] == [1, 2]
    assert all(1 <= line["tokens"] <= 3 and "##" not in line["completion"] for line in lines)
    agreement.check(folder.path)
    refused = Generate(prompts=str(tmp_path / "asked.jsonl"), max_new_tokens=3, output=str(folder.release / "own.jsonl"))
    with pytest.raises(ConfigError, match="own.jsonl: completions of protected prompts show these prompts, and release/ may be shared"):
        refused(experiment, folder)


def test_the_runs_own_rows_are_not_public_prompts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "a text of its own, number {number}", "prompt": "its own"}}\n' for number in range(40)))
    read = (f"data.source.paths={rows}", "data=text", f"data.directory={tmp_path}/data", "data.vocabulary.size=128")
    experiment = config.build(recipes.compose(["model=micro", *read, "data.public_fraction=0.5"]))[0]
    folder = RunFolder(tmp_path / "run")
    left_out.keep_manifest(folder.made_private(), prepare(experiment.data, experiment.privacy))
    with pytest.raises(ConfigError, match="prompts_provenance=public: a whole file of this text is also in that of the run"):
        Generate(prompts=str(rows), prompts_provenance="public")(experiment, folder)


def test_a_plan_counts_every_position_of_the_head():
    experiment, _ = config.build(recipes.compose([*CAUSAL, "data.declared_size=2000", "privacy.delta=1e-4", "accountant=rdp"]))
    found, model, vocabulary = plan(experiment), experiment.model, experiment.data.vocabulary.size
    assert isinstance(model, Decoder) and found["parameters"] == model.parameters(vocabulary)
    layer = 2 * 16 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 16 * 16 * 32
    assert found["flops_of_products"] == 3 * (layer + 2 * 16 * 32 * vocabulary) * found["examples"]


@pytest.mark.parametrize(
    "changes, words",
    [
        (["data.pairs=same_document"], "data.pairs=same_document with task=causal_lm: two segments side by side are not running text"),
        (["model=micro"], "model=micro: an encoder can read the token that it should predict"),
        (["task=mlm"], "model=decoder_micro: a causal decoder cannot read words after the masked word"),
        (["model=roberta_micro", "task=mlm_nsp", "data.pairs=same_document"], "model.segments=1"),
    ],
)
def test_what_does_not_fit_stops_before_anything_runs(changes, words):
    with pytest.raises(ConfigError, match=words):
        config.build(recipes.compose([*CAUSAL, *changes]))


@pytest.mark.slow
def test_a_model_of_one_example_in_dpx_own_tree_is_trained_under_dpx_own_claim(tmp_path):
    overrides = [
        *CAUSAL,
        "model=gemma_micro",
        "clipping_method=traced",
        "steps=2",
        "microbatch=4",
        "batch_schedule.size=8",
        "accountant=rdp",
    ]
    overrides += ["noise=multiplier", "privacy.delta=1e-4", "schedule.evaluation_rows=64", f"data.directory={tmp_path}/data", COARSE]
    cfg = recipes.compose(overrides)
    experiment, job = config.build(cfg)
    folder = RunFolder(tmp_path / "finished", OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))))
    job(experiment, folder)
    statement = json.loads((folder.release / "privacy.json").read_text())
    assert statement["guarantee"] == "dp" and "outside_code" not in statement
    lines = [json.loads(line) for line in (folder.private / "metrics.jsonl").read_text().splitlines()]
    assert 1 < lines[0]["train/perplexity"] < 2 * experiment.data.vocabulary.size
