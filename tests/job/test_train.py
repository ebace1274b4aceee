"""The main job on a micro model, then what can be done with the finished run."""

import json

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf

import dpx
from dpx import config
from dpx.claim.combined_ledgers import read
from dpx.config import recipes
from dpx.data.prepare import prepare
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import from_json, to_json
from dpx.files.run_folder import RunFolder
from dpx.job.released_jobs import Evaluate
from dpx.job.train import Prepare
from dpx.privacy.declared_privacy import UnitFacts
from tests.processes import COARSE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    overrides = ["model=micro", "model.layers=1", "data=synthetic", "steps=2", "microbatch=8", "batch_schedule.size=16"]
    overrides += ["schedule.evaluation_rows=64"]
    overrides += [
        "noise=multiplier",
        "noise.noise_multiplier=1.0",
        "accountant=rdp",
        "privacy.delta=1e-4",
        f"data.directory={root}/data",
        COARSE,
    ]
    cfg = recipes.compose(overrides)
    experiment, job = config.build(cfg)
    folder = RunFolder(root / "finished", OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))))
    job(experiment, folder)
    return experiment, folder


def test_the_run_folder_holds_what_the_design_names(trained):
    _, folder = trained
    assert {path.name for path in folder.release.iterdir()} == {"config.yaml", "dpx_manifest.json", "params", "privacy.json"}
    assert {"ledger", "root_secret_0", "checkpoints", "metrics.jsonl", "tensorboard", "results.json"} <= {
        p.name for p in folder.private.iterdir()
    }
    secret = (folder.private / "root_secret_0").read_bytes()
    assert len(secret) == 32
    for path in folder.path.rglob("*"):
        if path.is_file() and path.name != "root_secret_0":
            assert secret not in path.read_bytes() and secret.hex().encode() not in path.read_bytes()


def test_what_its_units_are_is_entered_before_the_first_step_and_stated(trained):
    experiment, folder = trained
    lines = [json.loads(line.partition(" ")[2]) for line in (folder.private / "ledger").read_text().splitlines()]
    kinds = [line.get("kind") for line in lines]
    assert kinds.count("units") == 1 and kinds.index("units") < kinds.index("step")
    noted = lines[kinds.index("units")]["units"]
    store = prepare(experiment.data, experiment.privacy)
    assert noted == to_json(unit_facts(experiment.data, experiment.privacy, store.manifest)) and noted["vocabulary_sha256"]
    assert json.loads((folder.release / "privacy.json").read_text())["units"] == [noted]
    for place in (folder.path, folder.private / "ledger", folder.release / "privacy.json"):
        assert read(place).units == (from_json(UnitFacts, noted, place),) and read(place).reasons == ()


def test_tensorboard_reads_scalars_config_and_hparams(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = trained[1].private / "tensorboard"
    events = EventAccumulator(str(logs))
    events.Reload()
    tags = events.Tags()
    scalars = {"2_utility/train_loss", "2_utility/heldout_mlm_accuracy", "3_speed/examples_per_s", "1_privacy/epsilon", "grad/snr"}
    assert scalars | {"grad/clipped_fraction", "train/learning_rate"} <= set(tags["scalars"])
    assert sorted(tags["scalars"])[0] == "1_privacy/epsilon"
    assert "config/text_summary" in tags["tensors"]
    assert [event.step for event in events.Scalars("2_utility/train_loss")] == [1, 2]
    # Shorter than `evaluate_every`, it has its held-out point all the same.
    assert [event.step for event in events.Scalars("2_utility/heldout_mlm_accuracy")] == [2]


def test_every_scalar_in_tensorboard_is_described(trained):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    runs = EventMultiplexer().AddRunsFromDirectory(str(trained[1].path.parent / "tensorboard"))
    runs.Reload()
    told = runs.GetAccumulator(trained[1].path.name).summary_metadata
    scalars = {name: metadata.summary_description for name, metadata in told.items() if metadata.plugin_data.plugin_name == "scalars"}
    assert len(scalars) > 10 and [name for name, text in scalars.items() if not text] == []


def test_tensorboard_has_one_run_of_a_short_name_with_one_row_of_hparams(trained):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import plugin_data_pb2

    folder = trained[1]
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder.path.parent / "tensorboard"))
    runs.Reload()
    assert list(runs.Runs()) == [folder.path.name]
    told = runs.GetAccumulator(folder.path.name).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    # Made while its module is imported.
    message = plugin_data_pb2.HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]
    values = message.FromString(told).session_start_info.hparams
    claim = json.loads((folder.release / "privacy.json").read_text())
    assert values["guarantee"].string_value == "dp" and values["delta"].number_value == claim["delta"]
    assert values["epsilon"].number_value == claim["epsilon"]["rdp"]
    adam = trained[0].optimizer
    assert values["optimizer"].string_value == "adam" and values["decay_mask"].string_value == adam.decay_mask
    assert {name: values[name].number_value for name in ("beta1", "beta2", "eps", "weight_decay")} == {
        "beta1": adam.beta1,
        "beta2": adam.beta2,
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }


def test_evaluate_repeats_the_runs_own_figures(trained):
    experiment, folder = trained
    Evaluate()(experiment, folder)
    figures = json.loads((folder.private / "evaluation.json").read_text())
    results = json.loads((folder.private / "results.json").read_text())
    assert figures["loss"] == pytest.approx(results["heldout"]["loss"], rel=1e-5)
    assert figures["most_frequent_token_accuracy"] == results["baselines"]["most_frequent_token"]


def test_load_gives_parameters_and_claim(trained):
    experiment, folder = trained
    loaded = dpx.load(folder.path)
    assert loaded.experiment == experiment
    assert loaded.privacy["guarantee"] == "dp" and loaded.is_checked
    sizes = sum(np.size(leaf) for leaf in jax.tree.leaves(loaded.params))
    assert sizes == experiment.model.parameters(experiment.data.vocabulary.size, next_sentence=False)


def _begun(path):
    """A run folder in which a run has begun."""
    (path / "release").mkdir()
    (path / "release" / "config.yaml").write_text("name: micro\n")
    return path


def test_a_run_without_parameters_is_refused(trained, tmp_path):
    experiment, _ = trained
    with pytest.raises(ConfigError, match="contains no released parameters"):
        Evaluate()(experiment, RunFolder(_begun(tmp_path)))
    with pytest.raises(ConfigError, match="run: this job evaluates a run, and no run is named. Add run="):
        Evaluate()(experiment, RunFolder(tmp_path / "nowhere"))


def test_prepare_says_what_is_there(trained, tmp_path, capsys):
    Prepare()(trained[0], RunFolder(tmp_path))
    assert "protected" in capsys.readouterr().out
