"""Hydra's own errors, said as value, reason and fix."""

import contextlib
import errno
import importlib
import logging.config
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.config.hydra_version import IS_NEXT
from dpx.declaration import ConfigError
from dpx.durable import sync
from dpx.launch import command
from dpx.launch.point import _check_noise

from .composed import composed


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["stepz=3"], "stepz: unknown key. Did you mean steps?"),
        (["modle=tiny"], "modle: unknown key. Did you mean model?"),
        (["privacy.dleta=1e-6"], "privacy.dleta: unknown key. Did you mean privacy.delta?"),
        (["model=tinyy"], "model=tinyy: no such option. Did you mean model=tiny? The options are base,"),
        (["model=zzz"], "model=zzz: no such option. The options are base,"),
        (["+experiment=anil_2m"], "experiment=anil_2m: no such recipe. Did you mean +experiment=anil_2m_batch?"),
        (["experiment=anil_2m_batch"], "experiment: is not in the default config. Write +experiment=anil_2m_batch."),
        (["data=null"], "command line: a config group is set to a value that is not the name of an option."),
        (["model=7"], "command line: a config group is set to a value that is not the name of an option."),
        (["steps"], "steps: is not of the form key=value. Quote values"),
        (["plan"], "plan: is not of the form key=value. Write job=plan."),
        (["name=a=b"], """name=a=b: is not of the form key=value. Write 'name="a=b"', with both quotes."""),
        (["name=\u00fc"], """name=\u00fc: is not of the form key=value. Write 'name="\u00fc"', with both quotes."""),
        (
            ["data.source.paths=~/a.csv"],
            """data.source.paths=~/a.csv: is not of the form key=value. Write 'data.source.paths="~/a.csv"', with""",
        ),
        (["data.source.paths=[a"], "data.source.paths=[a: is not of the form key=value."),
    ],
)
def test_composition_errors(overrides: list[str], line: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        recipes.compose(overrides)
    assert str(as_refused(raised.value)).startswith(line)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.job_logging=null", "hydra.job_logging=null: field 'hydra.job_logging' is not Optional."),
        ("hydra.hydra_logging=null", "hydra.hydra_logging=null: field 'hydra.hydra_logging' is not Optional."),
        ("hydra.job=5", "hydra.job=5: Invalid type assigned: int is not a subclass of JobConf. value: 5."),
        ("hydra.run.dir=[1]", "hydra.run.dir=[1]: Cannot convert 'list' to string: '[1]'."),
        ("hydra.mode=x", "hydra.mode=x: Invalid value 'x', expected one of [RUN, MULTIRUN]."),
        ("hydra.job_logging={a:1}", "hydra.job_logging: Key 'a' is not in struct."),
        ("hydra.jbo.name=x", "hydra.jbo.name: Key 'jbo' not in 'HydraConf'."),
        ("~hydra.launcher", "~hydra.launcher: HydraConf (DictConfig) does not support deletion."),
        ("hydra/job_logging=null", "hydra/job_logging=null: null is not the name of an option."),
        ("hydra=[1]", "hydra: "),
        ("hydra.job.env_copy=[DPX_MISSING]", "hydra.job.env_copy=[DPX_MISSING]: Hydra cannot use this ('DPX_MISSING')."),
        (
            "hydra.sweeper.params={a:1}",
            "hydra.sweeper.params: Key 'a'" if IS_NEXT else "hydra.sweeper.params={a:1}: Hydra cannot use this (",
        ),
    ],
)
def test_a_key_of_hydra_with_another_kind_of_value_has_a_fix(override: str, said: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        recipes.compose([override])
    line = str(as_refused(raised.value, [override]))
    assert line.startswith(said) and line.endswith(
        "Remove it, or set a key that python -m dpx --cfg hydra prints to a value of the same kind."
    )


def test_what_hydra_makes_of_its_keys_is_the_users_and_a_defect_of_dpx_is_not() -> None:
    for error in (_of(lambda: configure_log(cast(Any, None), cast(Any, 5))), _of(lambda: logging.config.dictConfig({"version": 5}))):
        assert str(as_refused(error, ["steps=3", "hydra.verbose=5"])).startswith("hydra.verbose=5: Hydra cannot use this (")
        assert as_refused(error, ["steps=3"]) is None
    assert as_refused(_of(lambda: cast(Any, None).no_such), ["hydra.verbose=5"]) is None


def _of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011
        call()
    return raised.value


@pytest.mark.parametrize("override", ["hydra.callbacks.note_folders=null", "~hydra.callbacks.note_folders"])
def test_the_callback_that_notes_folders_stays(override: str) -> None:
    with pytest.raises(ConfigError, match="hydra.callbacks.note_folders: dpx needs this callback"):
        recipes.compose([override])


def test_the_name_of_a_run_alone_is_answered_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "letters-0a1b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for word in ("letters", "outputs/letters-0a1b"):
        with pytest.raises(Exception) as raised:  # noqa: B017, PT011
            recipes.compose([word])
        assert str(as_refused(raised.value)) == f"{word}: is not of the form key=value. Write run={word}."


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "20"], "--steps: is not a flag. Write steps=20."),
        (["--noise.epsilon=2", "job=plan"], "--noise.epsilon: is not a flag. Write noise.epsilon=2."),
        (["job=plan", "--batch-size", "model=micro"], "--batch-size: is not a flag. Write batch_size=...."),
        (["--seed"], "--seed: is not a flag. Write seed=...."),
    ],
)
def test_a_key_that_is_written_as_a_flag_is_answered_with_its_form(arguments: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line[:-1])):
        command._require_flags(arguments)


def test_the_flags_of_hydra_are_known() -> None:
    parser = importlib.import_module("hydra._internal.utils").get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    assert sorted(flags) == sorted(command.FLAGS)
    command._require_flags([*flags, "--multi", "-m", "-cp", "steps=3", "~tune", "noise.epsilon=-1"])


def test_a_refusal_is_found_below_what_wraps_it() -> None:
    try:
        try:
            raise ConfigError("x=1", "wrong", "Use 2")
        except ConfigError as inner:
            raise RuntimeError("around it") from inner
    except RuntimeError as outer:
        assert str(as_refused(outer)) == "x=1: wrong. Use 2."


def test_a_defect_is_not_the_users() -> None:
    assert as_refused(KeyError("inside")) is None
    assert as_refused(OSError("without a file")) is None


@pytest.mark.parametrize("folder", ["file/below", "missing/parent", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as raised:  # noqa: PT011
        (tmp_path / folder).mkdir()
    answer = str(as_refused(raised.value))
    assert answer.startswith(str(tmp_path / folder)) and answer.endswith("Name a folder that can be made and written to.")


def test_a_broken_yaml_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nsteps: [1\nmodel: tiny\n")
    with pytest.raises(Exception, match="flow sequence") as raised:
        OmegaConf.load(path)
    # OmegaConf 2.4 reads with the C loader, which has other words.
    found = "did not find expected ',' or ']'" if IS_NEXT else "expected ',' or ']', but got ':'"
    assert str(as_refused(raised.value)) == f"{path}:3: is not YAML ({found}). Correct it."


def test_a_comma_list_names_both_things_it_could_be() -> None:
    error = HydraException("Ambiguous value for argument 'data.source.paths=a.txt,b.txt'\n1. To use it as a list ...")
    assert str(as_refused(error)) == (
        "data.source.paths=a.txt,b.txt: could be one list or several values. "
        "Write one list as 'data.source.paths=[a.txt,b.txt]', or launch a sweep with -m."
    )


@pytest.mark.parametrize(("overrides", "refused"), [(["noise.epsilon=2"], True), (["noise=multiplier"], True), (["steps=3"], False)])
def test_noise_beside_a_mechanism_without_noise_is_refused(overrides: list[str], refused: bool) -> None:
    with pytest.raises(ConfigError, match="mechanism=none adds no noise") if refused else contextlib.nullcontext():
        _check_noise(composed("mechanism=none", *overrides)[0].mechanism, ("mechanism=none", *overrides))
    _check_noise(composed(*overrides)[0].mechanism, tuple(overrides))


def test_paths_with_two_dots_survive() -> None:
    assert str(ConfigError("../a.txt", "no such file.", "Name a file that exists.")) == "../a.txt: no such file. Name a file that exists."


@pytest.mark.parametrize(
    ("number", "file", "line"),
    [
        (errno.ENOLCK, "a/.lock", "a/.lock: no locks available. Name a folder on a file system that has locks."),
        (errno.EINVAL, "a", "a: invalid argument. Its file system cannot put it on disk safely (fsync); name a folder on another one."),
        (errno.EMFILE, None, "this machine: too many open files. Raise the limit of open files, as with ulimit -n 4096, and run the same"),
        (errno.ENFILE, "a", "a: too many open files in system. Close other programs"),
    ],
)
def test_what_the_system_refuses_is_a_line_with_its_fix(number: int, file: str | None, line: str) -> None:
    assert str(as_refused(OSError(number, os.strerror(number), file))).startswith(line)


def test_an_invalid_argument_of_no_file_is_a_defect() -> None:
    assert as_refused(OSError(errno.EINVAL, "Invalid argument")) is None


def test_a_folder_that_is_not_put_on_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError) as raised:
        sync(tmp_path)
    assert str(as_refused(raised.value)).startswith(f"{tmp_path}: invalid argument. ")


def test_a_working_folder_that_reads_as_an_interpolation_or_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("$x {y}", "${x}"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "$x {y}")
    command._require_plain_place()
    monkeypatch.chdir(tmp_path / "${x}")
    with pytest.raises(ConfigError, match="is read as an interpolation. Start from another folder"):
        command._require_plain_place()
    (tmp_path / "${x}").rmdir()
    with pytest.raises(ConfigError, match="the working folder: does not exist any more"):
        command._require_plain_place()
