"""A release is read in one place: consistent as its sender states, unchecked and called so, or refused because it contradicts itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

import dpx
from dpx import config
from dpx.config.declared_init import FromCheckpoint, FromRun
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.files.weights import by_path
from dpx.generation import completer
from dpx.init.parent import open_parent
from dpx.init.start import require_not_exported
from dpx.job.explain import Explain
from dpx.job.generate import Generate
from dpx.job.released_jobs import Evaluate, Export
from dpx.statement import received, seals
from dpx.statement.seals import MANIFEST
from dpx.training.evaluation import of_checkpoint

from ..composed import composed
from ..generation.conftest import checkpoint as checkpoint
from ..released_digests import unexplained
from .conftest import train

AS_STATED = "dp (as its sender states: "
UNCHECKED = "dp (unchecked: "


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """Adapters and a new head on a checkpoint."""
    return train(place, "received", "train=lora", "train.head=true", "train.rank=2", "init.provenance=public")


def declared(run: Path) -> Any:
    return config.build(OmegaConf.load(run / "private" / "config.yaml"))[0]  # type: ignore[arg-type]


def exported(run: Path, to: Path, **options: Any) -> Path:
    Export(to=str(to), **options)(declared(run), RunFolder(run))
    return to


@pytest.fixture(scope="module")
def whole_export(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(run, tmp_path_factory.mktemp("received") / "exported")


@pytest.fixture
def folder(whole_export: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole_export, tmp_path / "exported")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A folder that holds a copy of the run's release/ alone."""
    shutil.copytree(run / "release", tmp_path / "copy" / "release")
    return tmp_path / "copy"


def test_a_manifest_lists_every_file_and_repeats_the_random_id_of_the_statement(run: Path, folder: Path, tmp_path: Path):
    adapters = exported(run, tmp_path / "adapters", format="peft")
    identity = (run / "private" / "ledger").read_text().partition('"chain": "')[2][:16]
    for place in (run / "release", folder, adapters):
        held = json.loads((place / MANIFEST).read_text())
        files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()} - {MANIFEST}
        assert set(held["files"]) == files and held["format"] == seals.MANIFEST_FORMAT and held["release"] == identity
        assert seals.release_id(json.loads((place / "privacy.json").read_text())) == identity
        assert seals.check(place)
    # The base model and its vocabulary are public by the user's word, and nothing else has a digest that is not of these files.
    stated = json.loads((run / "release" / "privacy.json").read_text())
    public = [stated["vocabulary"]["sha256"], stated["init"]["origins"][0]["weights"].removeprefix("sha256:")]
    for place in (run / "release", folder, adapters):
        assert unexplained(place, [run / "private"], public) == {}


def test_a_finished_run_that_ends_again_keeps_its_id_and_its_weights(run: Path, place: Path):
    """A manifest that is missing is made again, from the last checkpoint."""
    again = shutil.copytree(run, place / "outputs" / "again")
    (again / "release" / MANIFEST).unlink()
    train(place, "again", "train=lora", "train.head=true", "train.rank=2", "init.provenance=public")
    one, other = (json.loads((folder / "release" / MANIFEST).read_text()) for folder in (run, again))
    assert one["release"] == other["release"] and seals.check(again / "release")
    differing = {name for name, known in one["files"].items() if other["files"].get(name) != known}
    # A statement names the newest line of the ledger, and so does what lies beside the weights.
    assert differing <= {"privacy.json", "params/_CHECKPOINT_METADATA", *(name for name in one["files"] if "params/state" in name)}
    values = [dpx.load(folder).params for folder in (run, again)]
    assert all(left.tobytes() == right.tobytes() for left, right in zip(*map(leaves, values), strict=True))


def leaves(tree: Any) -> list[np.ndarray]:
    return list(by_path(tree).values())


def test_a_run_is_checked_by_its_ledger_and_a_copy_by_its_manifest(run: Path, copy: Path, folder: Path):
    assert received.read(run).checked_by == "ledger" and received.read(run).in_words() == "dp"
    for place in (copy, folder):
        found = received.read(place)
        assert found.checked_by == "manifest" and found.in_words().startswith(AS_STATED) and not found.facts["is_checked"]
    for place in (copy / "release", folder):
        (place / MANIFEST).unlink()
    for place in (copy, folder):
        found = received.read(place)
        assert found.checked_by is None and found.in_words().startswith(UNCHECKED) and found.facts["checked_by"] is None


def test_a_copy_is_given_the_same_words_by_every_job(run: Path, copy: Path, capsys: pytest.CaptureFixture[str]):
    experiment = declared(run)
    Evaluate()(experiment, RunFolder(copy))
    words = received.read(copy).in_words()
    assert f"guarantee: {words}" in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(copy / "private")
    assert words in Generate(prompts="a.csv")._covered(received.read(copy))["covers"]
    Explain()(experiment, RunFolder(copy))
    assert "AS ITS SENDER STATES" in capsys.readouterr().out
    assert (dpx.load(copy).is_checked, dpx.load(copy).checked_by) == (False, "manifest")
    card = exported_card(copy, experiment)
    assert f"guarantee: **dp**{received.said('manifest')}" in card
    (copy / "release" / MANIFEST).unlink()
    assert f"guarantee: **dp**{received.said(None)}" in exported_card(copy, experiment)
    assert "is trusted without a check" in " ".join(open_parent_assumptions(copy))


def exported_card(copy: Path, experiment: Any) -> str:
    to = copy.parent / "again"
    shutil.rmtree(to, ignore_errors=True)
    Export(to=str(to))(experiment, RunFolder(copy))
    return (to / "README.md").read_text()


def open_parent_assumptions(copy: Path) -> list[str]:
    from dpx.privacy.origins import assumptions

    return assumptions(open_parent(FromRun(run=str(copy)), "init.run=copy").origins)


def other_weights(place: Path) -> None:
    """As a model that was trained further in transformers and saved into the same folder."""
    file = place / "model.safetensors"
    held = {name: values + 1 for name, values in load_file(file).items()}
    file.unlink()
    save_file(held, file, {"format": "pt"})


def other_epsilon(place: Path) -> None:
    told = json.loads((place / "privacy.json").read_text())
    told["epsilon"] = {name: 1e-6 for name in told["epsilon"]}
    (place / "privacy.json").write_text(json.dumps(told))


def other_statement(place: Path) -> None:
    """Of another release, listed by hand."""
    told = json.loads((place / "privacy.json").read_text())
    told["ledger"]["mark"]["chain"] = "0" * 16
    (place / "privacy.json").write_text(json.dumps(told))
    listed = json.loads((place / MANIFEST).read_text())
    from dpx import durable

    listed["files"]["privacy.json"] = durable.of_file(place / "privacy.json")
    (place / MANIFEST).write_text(json.dumps(listed))


def in_parts(place: Path) -> None:
    """As transformers saves a large model: other weights under a name that is not listed."""
    shutil.copyfile(place / "model.safetensors", place / "model-00001-of-00001.safetensors")


def no_file(place: Path) -> None:
    (place / "tokenizer.json").unlink()


def elsewhere(place: Path) -> None:
    listed = json.loads((place / MANIFEST).read_text())
    listed["files"]["../../a"] = listed["files"]["config.json"]
    (place / MANIFEST).write_text(json.dumps(listed))


def of_another_format(place: Path) -> None:
    (place / MANIFEST).write_text(json.dumps(json.loads((place / MANIFEST).read_text()) | {"format": 99}))


CONTRADICTIONS: dict[Callable[[Path], None], str] = {
    other_weights: "model.safetensors: differs from the file that was released with its statement",
    other_epsilon: "privacy.json: differs from the file that was released",
    other_statement: "config.json: is of the release .*, but privacy.json beside it is of 0000",
    in_parts: "model-00001-of-00001.safetensors: was not released with the other files",
    no_file: "tokenizer.json: is missing, and dpx_manifest.json lists it",
    elsewhere: "lists ../../a, which is not in this folder",
    of_another_format: "is in format 99, not 1",
}


@pytest.mark.parametrize("change", CONTRADICTIONS, ids=lambda change: change.__name__)
def test_an_export_that_contradicts_itself_is_refused_in_one_line(folder: Path, change: Callable[[Path], None]):
    of_checkpoint(str(folder))
    change(folder)
    for read in (received.read, lambda place: of_checkpoint(str(place))):
        with pytest.raises(ConfigError, match=CONTRADICTIONS[change]) as raised:
            read(folder)
        assert "\n" not in str(raised.value)


def test_a_copied_release_with_a_file_of_another_run_is_refused(run: Path, copy: Path):
    for change, said in (
        (lambda place: (place / "params" / "added").write_text(""), "params/added: was not released"),
        (lambda place: (place / "config.yaml").unlink(), "config.yaml: is missing"),
    ):
        shutil.rmtree(copy)
        shutil.copytree(run / "release", copy / "release")
        (copy / "release" / "account.json").write_text("{}")
        received.read(copy)
        change(copy / "release")
        for read in (received.read, lambda place: open_parent(FromRun(run=str(place / "release")), "init.run=copy")):
            with pytest.raises(ConfigError, match=said):
                read(copy)


def test_weights_beside_a_statement_that_somebody_wrote_are_called_unchecked(checkpoint: Path, folder: Path, tmp_path: Path):
    """`generate` repeats no guarantee for them without that word, and the file beside its completions has it too."""
    place = shutil.copytree(checkpoint, tmp_path / "theirs")
    other_epsilon(folder)
    shutil.copyfile(folder / "privacy.json", place / "privacy.json")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    given = {"prompts": f"{tmp_path}/prompts.jsonl", "output": f"{tmp_path}/out.jsonl", "max_new_tokens": 2, "prompts_provenance": "public"}
    Generate(checkpoint=str(place), **given)(composed()[0], RunFolder(tmp_path / "run"))
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["checked_by"] is None and not told["is_checked"] and f"the weights' guarantee is {UNCHECKED}" in told["covers"]
    seals.write(place)
    assert completer.of_checkpoint(str(place)).received.in_words().startswith(AS_STATED), "its sender's word"
    other_weights(place)
    with pytest.raises(ConfigError, match="model.safetensors: differs"):
        completer.of_checkpoint(str(place))


def test_no_export_is_a_public_start_and_no_folder_that_was_saved_again_from_one(run: Path, folder: Path, tmp_path: Path):
    """What PEFT and transformers keep of the marks was measured with PEFT 0.21 and transformers 5.24 (experiments/LOG.md)."""
    adapters = exported(run, tmp_path / "adapters", format="peft")
    peft = json.loads((adapters / "adapter_config.json").read_text())
    assert peft["auto_mapping"] == {"dpx": {"run": "received", "release": seals.stated_id(adapters)}}
    refused = "contains weights that a run of dpx trained and exported. Use init=run"
    # Trained further by transformers, merged by PEFT and saved with the tokenizer, saved again by PEFT, beside the card, or the statement.
    for number, (source, names) in enumerate(
        [
            (folder, ["config.json"]),
            (adapters, ["tokenizer_config.json"]),
            (adapters, ["adapter_config.json"]),
            (adapters, ["README.md"]),
            (adapters, ["privacy.json"]),
            (adapters, [path.name for path in adapters.iterdir()]),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        for name in names:
            shutil.copyfile(source / name, place / name)
        with pytest.raises(ConfigError, match=refused):
            require_not_exported(FromCheckpoint(path=str(place), provenance="public"))
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "config.json").write_text("{}")
    require_not_exported(FromCheckpoint(path=str(tmp_path / "public"), provenance="public"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_survives_in_peft_and_transformers(run: Path, place: Path, folder: Path, tmp_path: Path):
    """Marks are kept where a model, a tokenizer or adapters are saved again; merged adapters alone have none."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    adapters, kind = exported(run, tmp_path / "adapters", format="peft"), transformers.AutoModelForSequenceClassification
    kind.from_pretrained(folder).save_pretrained(tmp_path / "further")
    loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(place / "model", num_labels=2), adapters)
    loaded.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert received.marks(tmp_path / "merged") == {}, "the one way that leaves no mark, as the documentation says"
    transformers.AutoTokenizer.from_pretrained(adapters).save_pretrained(tmp_path / "merged")
    own = received.mark("received", adapters)["dpx"]
    kept = {"further": "config.json", "again": "adapter_config.json", "merged": "tokenizer_config.json"}
    for name, file in kept.items():
        assert received.marks(tmp_path / name) == {file: own}
        with pytest.raises(ConfigError, match="contains weights that a run of dpx trained and exported"):
            require_not_exported(FromCheckpoint(path=str(tmp_path / name), provenance="public"))
    for path in (tmp_path / "further").iterdir():
        shutil.copyfile(path, folder / path.name)
    with pytest.raises(ConfigError, match="differs from the file that was released"):
        received.read(folder)
