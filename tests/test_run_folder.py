"""A run's folder is private by mode, safe to open when it comes from somebody else, and tells nothing of the machine it was made on."""

import fcntl
import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

import dpx
from dpx import config
from dpx.claim.search_record import opened
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.config.declared_init import FromRun
from dpx.config.hydra_version import register_resolver
from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.declaration import ConfigError
from dpx.durable import locked, make_private, write_durably
from dpx.files import orbax_checkpoints
from dpx.files.run_folder import RunFolder, Status, as_printed, without_places
from dpx.init.parent import open_parent
from dpx.interop.export import export
from dpx.job.account import Account
from dpx.job.explain import Explain
from dpx.launch.point import require_same_claim, require_same_run
from dpx.launch.search import hydra_files
from dpx.pages import pictures
from dpx.privacy.hash_chain import Chain
from dpx.training.metrics import MetricsWriter, Released

from .composed import composed
from .init.conftest import MICRO, WORDS
from .training.sharing import run_job, shared_programs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and its own vocabulary; as open to others as a home folder may be."""
    root = tmp_path_factory.mktemp("machine")
    root.chmod(0o777)
    draw = random.Random(2)
    (root / "letters.txt").write_text("".join(" ".join(draw.choices(WORDS, k=26)) + "\n" for _ in range(60)))
    (root / "vocabulary.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return root


@pytest.fixture(scope="module")
def declared(root: Path) -> tuple[Any, Any, str]:
    places = [f"data.source.paths={root}/letters.txt", f"data.vocabulary.path={root}/vocabulary.txt", f"data.directory={root}/data"]
    return composed(*MICRO, *places)


@pytest.fixture(scope="module")
def run(root: Path, declared: tuple[Any, Any, str]) -> Path:
    """A finished run, made where nothing is withheld from others by a umask."""
    before = os.umask(0)
    try:
        with shared_programs():
            run_job(declared, root / "outputs" / "run")
    finally:
        os.umask(before)
    return root / "outputs" / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_made_of_protected_text_is_its_owners_alone(run: Path, root: Path) -> None:
    (store,) = (root / "data").iterdir()
    assert mode(run / "private") == mode(store) == 0o700 and mode(run / "release") & 0o044 == 0o044
    for tree in (run / "private", store):
        for path in tree.rglob("*"):
            assert mode(path) & 0o077 == 0, path
    assert any((run / "private" / "checkpoints").rglob("d/*")) and any((run / "private" / "tensorboard").iterdir())
    assert {path.name for path in store.iterdir()} >= {"protected.units.jsonl", "vocabulary.txt", "manifest.json"}


def test_what_may_leave_is_as_open_as_its_folder_also_where_a_library_wrote_it(run: Path, declared: Any, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        orbax_checkpoints.export(outputs / "params", {"w": np.ones(3, np.float32)}, {})
        export(declared[0].fitted, run, outputs / "exported")
    finally:
        os.umask(before)
    for path in outputs.rglob("*"):
        assert mode(path) & 0o022 == 0, path


def hydra_of(place: Path, job: str = "plan") -> Any:
    """What Hydra knows when it asks where its files go."""
    return OmegaConf.create({"hydra": {"runtime": {"output_dir": str(place), "choices": {"job": job}}}})


@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_private_folders_are_so_whatever_the_umask_and_whoever_makes_them(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o777)
    before = os.umask(umask)
    try:
        hydra_files(hydra_of(tmp_path / "hydra"))
        Status(tmp_path / "status", "train").write("running")
        with RunFolder(tmp_path / "claimed").claimed(), opened(tmp_path, tmp_path / "studies" / "s"):
            pass
        write_durably(tmp_path / "claimed" / "private" / "deeper" / "file", "x")
        (tmp_path / "before").mkdir(mode=0o777)
        make_private(tmp_path / "before")
    finally:
        os.umask(before)
    private = [tmp_path / name / "private" for name in ("hydra", "status", "claimed", "studies/s")]
    assert {mode(path) for path in [*private, tmp_path / "before", tmp_path / "claimed" / "private" / "deeper"]} == {0o700}
    assert {mode(path) for one in private for path in one.rglob("*") if path.is_file()} == {0o600}


# What opens a run's folder to write there, and how.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "hydra": lambda path: hydra_files(hydra_of(path)),
    "hydra, train": lambda path: hydra_files(hydra_of(path, "train")),
    "status": lambda path: Status(path, "train").write("running"),
    "claimed": lambda path: RunFolder(path).claimed().__enter__(),
    "release": lambda path: RunFolder(path).made_release(),
    "private": lambda path: RunFolder(path).made_private(),
    "study": lambda path: opened(path.parent, path).__enter__(),
}
LINKED = ["release", "private", "private/lock", "private/status.json", "private/ledger", "private/metrics.jsonl", "private/hydra"]
LINKED += ["private/dpx.log", "private/checkpoints", "private/checkpoints/2/any", "private/trials.lock", "release/config.yaml"]
LINKED += ["release/privacy.json", "release/params", "release/explain.json", "release/telemetry.jsonl"]


@pytest.mark.parametrize("writer", WRITERS)
def test_no_link_in_a_runs_folder_is_followed_by_whoever_writes_there(tmp_path: Path, writer: str) -> None:
    for number, place in enumerate(LINKED):
        victim, path = tmp_path / f"victim-{number}", tmp_path / f"run-{number}"
        victim.mkdir()
        (victim / "kept").write_text("kept")
        (path / place).parent.mkdir(parents=True)
        (path / place).symlink_to(victim if "." not in place and place not in ("private/lock", "private/ledger") else victim / "kept")
        modes = mode(victim), mode(victim / "kept")
        with pytest.raises(ConfigError, match=f"{place}: is a symbolic link"):
            WRITERS[writer](path)
        assert [one.name for one in victim.iterdir()] == ["kept"] and (victim / "kept").read_text() == "kept"
        assert (mode(victim), mode(victim / "kept")) == modes


def test_the_refusal_of_a_link_reaches_the_user_through_hydra(tmp_path: Path) -> None:
    register_resolver("linked", lambda *, _root_: hydra_files(_root_))
    (tmp_path / "private").symlink_to(tmp_path)
    cfg = OmegaConf.merge(hydra_of(tmp_path), {"place": "${linked:}"})
    with pytest.raises(Exception) as raised:
        cfg.place  # noqa: B018
    refused = as_refused(raised.value)
    assert refused is not None and refused.value == tmp_path / "private" and "symbolic link" in refused.reason


def test_files_that_stay_open_follow_no_link_that_comes_later(tmp_path: Path) -> None:
    victim, private = tmp_path / "victim", tmp_path / "private"
    Chain(victim).close()
    before = victim.read_bytes()
    private.mkdir()
    for name in ("lock", "ledger", "telemetry.jsonl"):
        (private / name).symlink_to(victim)
    # A link whose target does not exist yet: an existing file is read first, and replaced by a new file.
    (private / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    released = Released(tmp_path / "none")
    released._path = private / "telemetry.jsonl"
    released.hold(0, 0, {"released/x": 1.0})
    chain = Chain(private / "ledger")
    for write in (
        lambda: locked(private / "lock", fcntl.LOCK_EX).__enter__(),
        lambda: chain.append([1]),
        lambda: released.publish(None),
    ):
        with pytest.raises(OSError, match="symbolic links"):
            write()
    assert victim.read_bytes() == before
    # Measurements stop no run: what would follow a link is dropped, and counted.
    writer = MetricsWriter(private, 0)
    writer.write(0, {"a": 1.0})
    writer.close()
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_is_opened_and_not_emptied(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.claimed():
        pass
    (folder.private / "lock").write_text("kept")
    with folder.claimed(), pytest.raises(ConfigError, match="another process is training"), folder.read_by_another():
        pass
    assert (folder.private / "lock").read_text() == "kept"


def test_a_pipe_in_a_runs_folder_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    os.mkfifo(tmp_path / "private" / "metrics.jsonl")
    with pytest.raises(ConfigError, match="metrics.jsonl: is not a regular file or folder"):
        RunFolder(tmp_path).made_private()


def bytes_of(tree: Path) -> bytes:
    return b"".join(str(path.relative_to(tree)).encode() + path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file())


def test_nothing_that_may_leave_names_a_place_of_the_machine(copy: Path, run: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "write", lambda *_: "")
    cfg, _ = config.load(str(copy))
    assert cfg.data.source.paths == f"{root}/letters.txt", "the whole config is read where it is"
    experiment, _ = config.build(cfg)
    export(experiment.fitted, copy, copy / "release" / "hf")
    Explain()(experiment, RunFolder(copy))
    Account(accountant="rdp")(experiment, RunFolder(copy))
    told = OmegaConf.load(copy / "release" / "config.yaml")
    assert (told.data.source.paths, told.data.vocabulary.path, told.data.directory) == ("letters.txt", "vocabulary.txt", "data")
    assert str(root).encode() not in bytes_of(copy / "release") and str(Path.cwd()).encode() not in bytes_of(copy / "release")
    assert str(root) in (copy / "private" / "config.yaml").read_text()


def test_a_copy_of_a_release_is_enough_to_load_begin_from_and_explain_it(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "release", tmp_path / "handed" / "release")
    loaded = dpx.load("handed")
    assert loaded.privacy["guarantee"] == "dp" and not loaded.is_checked
    assert loaded.experiment.data.source.paths == "letters.txt"
    assert (
        open_parent(FromRun(run="handed/release"), "init.run=x").origins[0].name
        == open_parent(FromRun(run=str(run)), "init.run=x").origins[0].name
    )
    Explain()(loaded.experiment, RunFolder(Path("handed")))
    assert "e^" in capsys.readouterr().out and not (tmp_path / "outputs").exists(), "no text is looked for"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("/data/me/letters.txt", "letters.txt"),
        ("~/letters", "letters"),
        ("file:///data/me/letters.txt", "letters.txt"),
        (r"C:\me\letters.txt", "letters.txt"),
        (r"\\host\me\letters.txt", "letters.txt"),
        ("../outputs/run@4", "run@4"),
        ("text/../../letters.txt", "letters.txt"),
        ("/", "."),
        (f"ftp:{Path.home()}/x", "x"),
        (f"of {Path.cwd()}/x", "x"),
        ("text/letters.txt", "text/letters.txt"),
        ("text/../letters.txt", "text/../letters.txt"),
        ("outputs/data", "outputs/data"),
        ("google/bert", "google/bert"),
        ("https://host/letters.txt", "https://host/letters.txt"),
        ("..a/b", "..a/b"),
        ("layers/qkv/*", "layers/qkv/*"),
        (1e-6, 1e-6),
        (None, None),
        ("1e-6", "1e-6"),
    ],
)
def test_a_path_is_told_by_its_form_whatever_key_it_stands_under(given: Any, told: Any) -> None:
    text = OmegaConf.to_yaml(OmegaConf.create({"a": given, "of": {"a_package": [given, {"b": given}]}}))
    assert OmegaConf.create(without_places(text)) == {"a": told, "of": {"a_package": [told, {"b": told}]}}


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
NOT_PLAIN = {
    "environment": ("a: ${oc.env:DPX_TEST_SECRET}", "has an interpolation"),
    "reference": ("a: 1\nb: {c: 'x ${a}'}", "has an interpolation"),
    "escaped": ("a: \\${x}", "has an interpolation"),
    "key": ("'${a}': 1", "has an interpolation"),
    "missing": ("a: [1, '???']", "has a missing value"),
    "object": ("a: !!python/object/apply:os.system [touch made]", "has the tag"),
    "path": ("a: !!python/object/apply:pathlib.Path [x]", "has the tag"),
    "tag": ("a: !!int 1", "has the tag"),
    "bomb": (BOMB, "with an anchor"),
    "deep": ("[" * 5000 + "]" * 5000, "is nested too deeply"),
    "large": ("a: " + "x" * (1 << 20), "holds more than"),
    "number": ("a: " + "9" * 5000, "is not YAML"),
    "null byte": ("a: \0", "is not YAML"),
    "twice": ("a: 1\na: 2", "is not YAML"),
    "several": ("a: 1\n---\nb: 2", "is not YAML"),
    "list": ("- a", "is not a config of a run"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
@pytest.mark.parametrize("place", ["release", "private"])
def test_the_config_of_a_received_run_is_data(name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPX_TEST_SECRET", "a secret of this machine")
    monkeypatch.chdir(tmp_path)
    text, said = NOT_PLAIN[name]
    for one in ("release", place):
        (tmp_path / one).mkdir(exist_ok=True)
        (tmp_path / one / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        config.load(str(tmp_path))
    assert "secret of" not in str(raised.value) and not (tmp_path / "made").exists()
    assert len(str(raised.value)) < 1000


def test_plain_configs_are_read_as_they_were_written(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "main.yaml"
    assert config.read(golden) == OmegaConf.load(golden)
    odd = {"a": 1e-6, "b": "1e-6", "c": float("inf"), "d": "2020-01-01", "e": "no", "f": [None, True, "x\ny: &a"], "g": "???x", "h": -0.0}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(odd)))
    assert OmegaConf.to_container(config.read(tmp_path / "config.yaml")) == odd


def test_a_job_looks_at_a_run_by_its_own_config_alone(run: Path, declared: tuple[Any, Any, str], tmp_path: Path) -> None:
    own: Any = OmegaConf.create(declared[2])
    changed: Any = OmegaConf.merge
    require_same_run(own, run)
    require_same_run(own, tmp_path / "not begun")
    require_same_run(changed(own, {"schedule": {"evaluate_every": 7}}), run)
    with pytest.raises(ConfigError, match="contains a run with another config. To use that run with its own config, give run="):
        require_same_run(changed(own, {"privacy": {"delta": 1e-12}}), run)
    shutil.copytree(run / "release", tmp_path / "handed" / "release")
    require_same_run(own, tmp_path / "handed")


def test_a_config_is_written_whole_and_for_others(run: Path, declared: tuple[Any, Any, str]) -> None:
    assert (run / "private" / "config.yaml").read_text() == declared[2]
    assert (run / "release" / "config.yaml").read_text() == without_places(declared[2]) != declared[2]
    assert json.loads((run / "release" / "privacy.json").read_text())["guarantee"] == "dp"


def test_training_another_config_in_a_runs_folder_names_the_keys_and_a_command_that_branches(tmp_path: Path) -> None:
    experiment, _, text = composed("data=synthetic", "steps=4")
    run = tmp_path / "run"
    (run / "release").mkdir(parents=True)
    (run / "release" / "config.yaml").write_text(text)
    cfg = recipes.compose(["data=synthetic", "steps=4"])
    require_same_claim(experiment.claim_checksum, cfg, run, ())
    overrides = ("data=synthetic", "steps=8", "batch_schedule.size=8", f"hydra.run.dir={run}")
    other, cfg = composed(*overrides[:3])[0], recipes.compose(list(overrides[:3]))
    with pytest.raises(ConfigError, match=r"batch_schedule.size, steps differ\. Restore it, or give another hydra.run.dir"):
        require_same_claim(other.claim_checksum, cfg, run, overrides)
    (run / "private" / "checkpoints" / "2").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"branch into a new folder: python -m dpx data=synthetic steps=8 batch_schedule.size=8 fork=\S*run@2\.$"
    ):
        require_same_claim(other.claim_checksum, cfg, run, overrides)


def test_a_path_is_printed_as_the_next_command_can_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_printed(tmp_path / "outputs" / "main-0a1b") == as_printed(Path("outputs/main-0a1b")) == "outputs/main-0a1b"
    assert as_printed(Path("/elsewhere/main-0a1b")) == "/elsewhere/main-0a1b"
