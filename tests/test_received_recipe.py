"""A recipe from somebody else runs nothing: only the listed keys of Hydra's node, only the listed resolvers, and only listed variables."""

import copy
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

import dpx
from dpx import config, packages
from dpx.config import hydra_node, recipes, register_resolvers
from dpx.config.command_line import as_refused
from dpx.config.declared_chain import declared
from dpx.config.hydra_node import GROUPS, KEYS, RESOLVERS, ClosedLoader
from dpx.config.hydra_version import IS_NEXT, VERSION_BASE
from dpx.config.with_hydra import set_up_hydra
from dpx.declaration import ConfigError
from dpx.launch import command, search
from tests.processes import environment

# The words of Hydra 1.4 and OmegaConf 2.4, or those of this version.
PARENT = "Parent traversal ('..') in Defaults List" if IS_NEXT else "is outside the folders of configs"
MERGED = "incompatible container types" if IS_NEXT else "DictConfig with ListConfig"
NOT_THE_RECIPES = "a recipe may not set this key of Hydra"


class Received:
    """A folder of YAML from somebody else, as `--config-dir` names it, and a file that nothing may make."""

    def __init__(self, folder: Path):
        self.folder, self.sentinel = folder / "received", folder / "sentinel"

    def put(self, path: str, node: Any, header: str = "_global_") -> None:
        file = self.folder / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package {header}\n{yaml.safe_dump(node, sort_keys=False)}")

    def composed(self, *overrides: str) -> Any:
        return recipes.compose([f"hydra.searchpath=[file://{self.folder}]", *overrides], with_hydra=True)

    def refused(self, node: Any, *overrides: str) -> str:
        self.put("experiment/evil", node)
        try:
            self.composed("+experiment=evil", *overrides)
        except Exception as error:
            known = as_refused(error)
            assert known is not None, error
            return str(known)
        raise AssertionError(f"composed: {node}")


@pytest.fixture
def received(tmp_path: Path) -> Received:
    return Received(tmp_path)


def _calls(sentinel: Path) -> list[Any]:
    """Nodes that Hydra or the logging module would call, or hand to a plugin that does."""
    touch = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": [str(sentinel)]}}
    return [
        touch,
        {"_target_": "dpx.durable.write_durably", "path": {"_target_": "pathlib.Path", "_args_": [str(sentinel)]}, "data": "x"},
        {"_target_": "dpx.processes.launch.launch", "module": "timeit"},
        {"()": "pathlib.Path.touch", "self": str(sentinel)},
        {"class": "logging.FileHandler", "filename": str(sentinel)},
        {"class": "logging.StreamHandler", "stream": "ext://os.environ"},
        {"filename": str(sentinel), "delay": False},
        f"touch {sentinel}",
        [f"touch {sentinel}"],
        str(sentinel),
        "${oc.env:HOME}",
        {"_partial_": True},
    ]


PLACES = tuple(
    """
    callbacks callbacks.x callbacks.note_folders hydra_logging.handlers.x job_logging.handlers.x job_logging.handlers.file
    job_logging.formatters.simple hydra_logging.filters.x job.env_set.HYDRA_FULL_ERROR job.env_set.X job.env_copy launcher launcher.setup
    launcher.additional_parameters.x launcher.partition launcher.submitit_folder launcher.pre_dispatch launcher.temp_folder launcher.x
    sweeper sweeper.x sweeper.storage sweeper.study_name sweeper.custom_search_space sweeper.search_space.x sweeper.sampler
    sweeper.sampler.x run.dir sweep.dir sweep.subdir output_subdir searchpath job.name job.id job.chdir
    job.config.override_dirname.kv_sep runtime.output_dir runtime.choices.job overrides.task help.template hydra_help.template verbose
    sweeper.params.hydra.callbacks.x sweeper.params.+hydra.job.env_set.X
    """.split()
)


def _nodes(sentinel: Path) -> list[tuple[str, Any]]:
    """60 nodes: each place once, the rest drawn, two in three with a `_target_`, `()` or `class`."""
    drawn, calls = random.Random(0), _calls(sentinel)
    places = [*PLACES, *drawn.choices(PLACES, k=60 - len(PLACES))]
    return [(place, calls[number % len(calls)]) for number, place in enumerate(drawn.sample(places, 60))]


def _nested(key: str, value: Any) -> Any:
    """A mapping of mappings; the names below `params` hold dots."""
    start, params, rest = key.partition("sweeper.params.")
    parts = ["sweeper", "params", rest] if params and not start else key.split(".")
    for part in reversed(["hydra", *parts]):
        value = {part: value}
    return value


def test_sixty_drawn_nodes_are_refused_by_name_and_run_nothing(received: Received) -> None:
    nodes = _nodes(received.sentinel)
    assert len(nodes) == 60 and {place for place, _ in nodes} == set(PLACES)
    for place, value in nodes:
        line = received.refused(_nested(place, value))
        named = [f"hydra.{place}", place.partition("params.")[2].lstrip("+")]
        assert any(line.startswith(name) for name in named if name) and " in experiment/evil.yaml: a recipe may not" in line, line
    assert not received.sentinel.exists() and not any(received.folder.parent.glob("sentinel*"))


def test_what_is_listed_is_composed(received: Received) -> None:
    sweep = {"params": {"optimizer.eps": "1e-7,1e-8", "replicate": 3}, "max_batch_size": 4}
    received.put("experiment/grid", {"hydra": {"mode": "MULTIRUN", "sweeper": sweep}})
    cfg = received.composed("+experiment=grid")
    assert OmegaConf.to_container(cfg.hydra.sweeper.params) == {"optimizer.eps": "1e-7,1e-8", "replicate": "3"}
    assert cfg.hydra.sweeper.max_batch_size == 4 and len(recipes.points_of(cfg)) == 2
    chosen = {"defaults": [{"override /hydra/callbacks": "search"}, "_self_"]}
    received.put("experiment/chooses", chosen)
    assert "study" in received.composed("+experiment=chooses").hydra.callbacks


@pytest.mark.parametrize(
    "node",
    [
        {"defaults": [{"override /logger": "mlflow"}, "_self_"], "logger": {"mlflow": {"tracking_uri": "http://theirs"}}},
        {"logger": {"wandb": {"_target_": "dpx.config.declared_loggers.Wandb", "entity": "theirs"}}},
        {"logger": {"_target_": "heron.Loggers"}},
    ],
)
def test_a_recipe_does_not_choose_what_leaves_the_machine(received: Received, node: Any) -> None:
    assert received.refused(node).startswith("logger: a recipe may not choose what leaves this machine, or who gets it. Set it on your own")


def test_a_recipe_does_not_widen_what_the_user_sends(received: Received) -> None:
    received.put("experiment/good", {"steps": 3})
    assert received.composed("+experiment=good", "logger=[wandb,csv]").logger.wandb.project == "dpx"
    assert "a recipe may not choose" in received.refused({"logger": {"send_protected": True}}, "logger=wandb")
    params = {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"logger": "wandb,mlflow"}}}}
    assert received.refused(params).startswith("logger in experiment/evil.yaml: only your own command line says what leaves this machine")
    with pytest.raises(ConfigError, match="a recipe does not choose what leaves this machine"):
        declared({"stages": {"one": {"options": {"logger": "mlflow"}}}})


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"sweeper": {"max_batch_size": "4"}}, "hydra.sweeper.max_batch_size=4"),
        ({"sweeper": {"max_batch_size": True}}, "a recipe may set it to a whole number only"),
        ({"sweeper": {"max_batch_size": "${steps}"}}, "a recipe may not compute a value of Hydra"),
        ({"sweeper": {"params": {"steps": "${point}"}}}, "a recipe may not compute a value of Hydra"),
        (
            {"sweeper": {"params": {"steps": {"_target_": "pathlib.Path"}}}},
            "hydra.sweeper.params.steps._target_ in experiment/evil.yaml: a",
        ),
        ({"sweeper": {"params": {"hydra/launcher@hydra.callbacks.x": "basic"}}}, "hydra/launcher"),
        ({"sweeper": {"sampler": {"_target_": 1}}}, NOT_THE_RECIPES),
        ({"mode": "OTHER"}, "hydra.mode=OTHER in experiment/evil.yaml: a recipe may set it to RUN or MULTIRUN only"),
        ("${steps}", "hydra in experiment/evil.yaml: a recipe may not set this key"),
        (None, "hydra in experiment/evil.yaml: a recipe may not set this key"),
        ([1], "hydra in experiment/evil.yaml: a recipe may not set this key"),
    ],
)
def test_other_values_of_listed_keys_are_refused(received: Received, node: Any, said: str) -> None:
    assert said in received.refused({"hydra": node})


def _touching(sentinel: Path) -> dict[str, Any]:
    return {"_target_": "pathlib.Path.touch", "self": str(sentinel)}


def test_no_side_road_of_hydra_leads_to_its_node(received: Received) -> None:
    """Packages of files and defaults, options of Hydra's groups in the folder, files outside of it, and its other groups."""
    touch = _touching(received.sentinel)
    received.put("experiment/by_header", touch, header="hydra.callbacks.x")
    received.put("experiment/by_brackets", touch, header="hydra[callbacks][x]")
    received.put("job/touch", touch, header="job")
    received.put("hydra/launcher/mine", touch, header="hydra.launcher")
    outside = received.folder.parent / "outside.yaml"
    outside.write_text("# @package hydra.callbacks.x\n_target_: pathlib.Path\n")
    up = "../" * len(packages.conf_directory().parts)
    expected = {
        "+experiment=by_header": "hydra.callbacks.x._target_ in experiment/by_header.yaml",
        "+experiment=by_brackets": "hydra.callbacks.x._target_ in experiment/by_brackets.yaml",
    }
    for line, said in expected.items():
        with pytest.raises(Exception) as error:
            received.composed(line)
        assert said in str(as_refused(error.value))
    for default, said in (
        ({"/job@hydra.callbacks.x": "plan"}, "hydra.callbacks.x.analysis in job/plan.yaml"),
        ({"/job@hydra.callbacks.x": "touch"}, "hydra.callbacks.x._target_ in job/touch.yaml"),
        ({"/hydra/callbacks@hydra.launcher": "search"}, "hydra.launcher.study._target_ in hydra/callbacks/search.yaml"),
        ({"/hydra/job_logging@hydra.hydra_logging": "none"}, "hydra.hydra_logging"),
        ({"override /hydra/launcher": "mine"}, "options of Hydra's own groups come from Hydra"),
        ({"override /hydra/job_logging": "disabled"}, "hydra/job_logging=disabled: a recipe may not choose"),
        ({"override /hydra/hydra_logging": "hydra_debug"}, "hydra/hydra_logging=hydra_debug: a recipe may not choose"),
        (f"/{up}{str(outside)[1:-5]}", PARENT),
        (f"/{str(outside)[:-5]}", "outside"),
        ({f"/{up}{str(outside.parent)[1:]}@hydra.callbacks.x": "outside"}, PARENT),
    ):
        assert said in received.refused({"defaults": [default, "_self_"]})
    received.put("hydra/sweeper/basic", touch, header="hydra.sweeper")
    assert "options of Hydra's own groups come from Hydra" in received.refused({"steps": 3})
    assert not received.sentinel.exists()


def test_the_folder_shadows_no_option_of_dpx_and_no_main_config(received: Received) -> None:
    received.put("clip/flat", {"clipping_norm": 1e9}, header="clip")
    received.put("config", {"hydra": {"callbacks": {"x": _touching(received.sentinel)}}})
    assert received.composed().clip.clipping_norm == recipes.compose([]).clip.clipping_norm


class _AddsFolders(SearchPathPlugin):
    """As `--config-dir` adds one."""

    folders: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: Any) -> None:
        for folder in self.folders:
            search_path.append("command-line", f"file://{folder}")


def test_a_main_config_of_the_folder_adds_no_folder_and_imports_no_package(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    received.put("mine", {"defaults": ["config", "_self_"], "hydra": {"searchpath": ["pkg://antigravity"]}})
    monkeypatch.setattr(_AddsFolders, "folders", (received.folder,))
    set_up_hydra()
    register_resolvers()
    Plugins.instance().register(_AddsFolders)
    with hydra.initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE):
        with pytest.raises(ConfigError, match=r"hydra\.searchpath in mine\.yaml: a recipe may not set"):
            hydra.compose("mine")
        received.put("mine", {"defaults": ["config", "_self_"], "steps": 7})
        assert hydra.compose("mine").steps == 7
    assert "antigravity" not in sys.modules


def test_a_recipe_gives_no_overrides_of_hydra_to_a_point_or_a_stage() -> None:
    set_up_hydra()
    register_resolvers()
    given = ("hydra.job.env_set.X=1", "+hydra.callbacks.x._target_=y", "+hydra={callbacks:{x:{_target_:y}}}", "~hydra.callbacks")
    for override in (
        *given,
        "hydra.searchpath=[pkg://antigravity]",
        "job@hydra.callbacks.x=plan",
        "hydra/launcher@hydra.callbacks.x=basic",
    ):
        with pytest.raises(ConfigError, match=r"hydra.* in a recipe: a recipe may not set this key"):
            search.composed(["steps=3", override])
        with hydra.initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE):
            master = hydra.compose("config", return_hydra_config=True)
            # As launchers of other processes have it.
            loader = copy.deepcopy(GlobalHydra.instance().config_loader())
            with pytest.raises(ConfigError, match="a recipe may not set this key"):
                loader.load_sweep_config(master, ["steps=3", override])
            assert loader.load_sweep_config(master, ["steps=3"]).steps == 3
    for part in ({"values": {"hydra": {}}}, {"options": {"hydra/launcher": "basic"}}, {"sweep": {"hydra.run.dir": ["x"]}}):
        with pytest.raises(ConfigError, match="Hydra's node belongs to the command"):
            declared({"stages": {"one": part}})
    with pytest.raises(ConfigError, match=r"chain\.common: \+hydra\.x"):
        declared({"stages": {"one": {}}, "common": {"values": {"+hydra.x": 1}}})


def test_a_point_is_composed_once_for_the_check_before_a_sweep_and_for_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_hydra()
    register_resolvers()
    with hydra.initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE):
        master = hydra.compose("config", return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        checked = loader.load_sweep_config(master, ["steps=3"])
        copied = copy.deepcopy(loader)
        monkeypatch.setattr(
            ClosedLoader, "_load_configuration" if IS_NEXT else "load_configuration", lambda *_, **__: pytest.fail("composed again")
        )
        run = loader.load_sweep_config(master, ["steps=3"])
        assert run is not checked and run == checked and OmegaConf.is_struct(run)
        # Neither a third time nor for other overrides nor in another process is it taken from there.
        for own, steps in ((loader, "steps=3"), (loader, "steps=4"), (copied, "steps=3")):
            with pytest.raises(pytest.fail.Exception, match="composed again"):
                own.load_sweep_config(master, [steps])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("${now:%S}", "now"),
        ("a ${python_version:} b", "python_version"),
        ("${hydra:runtime.cwd}", "hydra"),
        ("${oc.decode:'\\${oc.env:HOME}'}", "oc.decode"),
        ("${oc.create:{a: 1}}", "oc.create"),
        ("${oc.select:steps,'${now:%S}'}", "now"),
        ("${oc.${name}:HOME}", "oc.${name}"),
        ("${search_storage:}", "search_storage"),
        ("${trials_left:}", "trials_left"),
    ],
)
def test_other_resolvers_are_refused_by_name(received: Received, text: str, name: str) -> None:
    for node in ({"name": text}, {"point": {"a": [1, {"b": text}]}}):
        assert f"a recipe may not use the resolver {name}, only oc.select" in received.refused(node)


def test_a_text_that_reads_as_an_interpolation_where_it_is_composed_again_is_refused(received: Received) -> None:
    """An escaped one is a text in the recipe, and would be resolved in the config of a stage, of a trial, or of another process."""
    for part in ({"values": {"name": "\\${now:%S}"}}, {"options": {"model": "\\${now:}"}}, {"sweep": {"point.a": [{"b": ["\\${now:}"]}]}}):
        received.put("experiment/evil", {"chain": {"stages": {"one": part}}})
        with pytest.raises(
            ConfigError, match=r"chain\.stages\.one\..*\$\{now:.*would be read as an interpolation where this config is read"
        ):
            config.resolved(received.composed("+experiment=evil"))
    register_resolvers()
    for override in ("name=${now:%S}", "name='${now:%S}'", "+point.a=[${hydra:runtime.cwd}]"):
        with pytest.raises(ConfigError, match="a recipe may not use the resolver"):
            search.composed(["steps=3", override])


def test_every_resolver_of_dpxs_own_recipes_may_be_used() -> None:
    conf = packages.conf_directory()
    files = [path for path in conf.rglob("*.yaml") if path.relative_to(conf).parts[0] not in ("hydra", "config.yaml", "local")]
    used = {name for path in files for line in path.read_text().splitlines() for name in re.findall(r"\$\{([a-z_.]+):", line)}
    assert {"oc.env", "oc.select"} < used <= set(RESOLVERS)


def test_a_config_reads_only_listed_variables(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    received.put("experiment/reads", {"name": "a${oc.env:MY_TOKEN}", "replicate": "${oc.env:ABSENT,1}"})
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.delenv("DPX_ENV", raising=False)
    cfg = received.composed("+experiment=reads")
    with pytest.raises(Exception) as error:
        assert cfg.name
    line = str(as_refused(error.value))
    assert line.startswith("${oc.env:MY_TOKEN}: a config may read only DPX_DATA") and "DPX_ENV=MY_TOKEN" in line and "secret" not in line
    with pytest.raises(Exception, match="ABSENT"):
        assert cfg.replicate
    monkeypatch.setenv("DPX_ENV", "ABSENT, MY_TOKEN")
    assert (cfg.name, cfg.replicate) == ("asecret", "1")
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(Exception) as error:
        assert cfg.name
    assert "this environment variable is not set" in str(as_refused(error.value))
    monkeypatch.delenv("DPX_DATA", raising=False)
    default = OmegaConf.create({"a": "${oc.env:DPX_DATA,data}", "b": "${oc.env:DPX_DATA,null}"})
    assert (default.a, default.b) == ("data", None)


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB.encode(), "becomes more than 100,000 values"),
        (b"x: &a [*a]\n", "is nested too deeply, or an alias in it leads to itself"),
        (b"x: " + b"{a: " * 400 + b"1" + b"}" * 400, "is nested too deeply"),
        (b"x: " + b"[" * 5000 + b"]" * 5000, "is nested too deeply"),
        (b"x: '" + b"y" * 2**20 + b"'\n", "has more than 1,048,576 bytes"),
        (b"steps: " + b"9" * 5000, "holds a number with too many digits"),
        (b"name: \xff\xfe\n", "byte 7 is not UTF-8"),
        (b'name: "a\x00b"\n', "is not YAML (special characters are not allowed)"),
        (b"- 1\n", "is not a mapping of keys to values"),
        (b"5\n", "is not a mapping of keys to values"),
        (b"defaults: 5\n", "has defaults that are not a list"),
        (b"defaults:\n- [1]\n", "evil.yaml:2: is not a default"),
        (b"defaults: [{/model: {a: 1}}]\n", "evil.yaml:1: is not a default"),
        (b"a: ${b\n", "a: no viable alternative at input '${b'. Correct the value"),
        (b"# @package _global_\nmodel: [1]\n", f"experiment/evil.yaml: Cannot merge {MERGED}. Correct the file"),
        (b"defaults: [/experiment/evil]\n", "a list of defaults leads to itself, or a value is nested too deeply"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else value,
)
def test_a_file_that_is_no_config_or_would_become_too_large_is_one_line(received: Received, text: bytes, said: str) -> None:
    received.put("experiment/evil", {})
    (received.folder / "experiment/evil.yaml").write_bytes(text)
    with pytest.raises(Exception) as refused:
        received.composed("+experiment=evil")
    assert said in str(as_refused(refused.value)) and "\n" not in str(as_refused(refused.value))
    (received.folder / "experiment/evil.yaml").write_bytes(b"a: &a [1, 2]\nb: *a\n")
    assert received.composed("+experiment=evil").experiment.b == [1, 2]


@pytest.mark.parametrize("name", ["a${hydra.job.name}", "a${hydra.overrides.task}", "a${oc.select:hydra.job.name}"])
def test_the_name_of_a_run_reads_nothing_of_hydras_node(received: Received, name: str) -> None:
    received.put("experiment/evil", {"name": name})
    cfg = received.composed("+experiment=evil")
    if "select" in name:
        # It reads the config alone, in which there is no such key.
        assert cfg.hydra.run.dir.startswith("outputs/aNone-")
        return
    with pytest.raises(Exception) as refused:
        str(cfg.hydra.run.dir)
    assert "Interpolation key 'hydra." in str(as_refused(refused.value))


def test_hydra_makes_its_loader_under_the_name_that_is_replaced() -> None:
    """`dpx.config.with_hydra` replaces `hydra._internal.hydra.ConfigLoaderImpl`, and `ClosedLoader` overrides three methods that start with
    an underscore; none of the four is public in Hydra."""
    set_up_hydra()
    with hydra.initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE):
        assert type(GlobalHydra.instance().config_loader()) is ClosedLoader
    own = [name for name in vars(ClosedLoader) if name.startswith("_") and not name.startswith("__") and callable(vars(ClosedLoader)[name])]
    assert [name for name in own if hasattr(ClosedLoader.__mro__[1], name)] == [
        "_process_config_searchpath",
        "_load_single_config",
        "_compose_config_from_defaults_list",
    ]


def test_another_hydra_program_of_the_process_loads_as_before(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("hydra: {job: {env_set: {X: y}}}\n")
    set_up_hydra()
    with hydra.initialize_config_dir(str(tmp_path), **VERSION_BASE):
        assert hydra.compose("theirs", return_hydra_config=True).hydra.job.env_set == {"X": "y"}


FLAGS = (("job=plan",), ("-m", "job=plan"), ("--cfg", "all"), ("--info", "config"), ("--info", "defaults"), ("--help",), ("--hydra-help",))


def _run(folder: Path, received: Received, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["dpx", "--config-dir", str(received.folder), *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(folder)
    before = Singleton.get_state()
    try:
        with pytest.raises(SystemExit) as ended:
            command._run()
    finally:
        Singleton.set_state(before)
    return int(str(ended.value.code))


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_every_way_to_compose_refuses_it_in_one_line(
    received: Received, monkeypatch: pytest.MonkeyPatch, capfd: Any, flags: tuple[str, ...], tmp_path: Path
) -> None:
    node = {"hydra": {"hydra_logging": {"handlers": {"x": {"()": "pathlib.Path.touch", "self": str(received.sentinel)}}}}}
    received.put("experiment/evil", node)
    if flags[-1] == "defaults":
        # It lists files and loads none of their values.
        received.put("mine", {"defaults": ["config"], "hydra": {"searchpath": ["pkg://antigravity"]}})
        flags = (*flags, "--config-name", "mine")
    assert _run(tmp_path, received, monkeypatch, *flags, "+experiment=evil") == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and NOT_THE_RECIPES in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["received"] and not received.sentinel.exists()


def test_the_flags_that_run_another_config_or_a_pickle_are_refused() -> None:
    for flag in ("--config-path", "-cp", "--experimental-rerun", "--exp"):
        with pytest.raises(ConfigError, match="^--(config-path|experimental-rerun): "):
            command._require_own_config([flag, "x", "steps=1"])
    command._require_own_config(["--config-dir", "x", "-m", "steps=1"])


def test_the_page_lists_what_the_code_allows() -> None:
    page = (Path(dpx.__file__).parent / "docs" / "received_files.md").read_text()
    assert hydra_node.PAGE == "dpx/docs/received_files.md"
    rows = dict(re.findall(r"^\| `([\w./*<>-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert {key for key in rows if key.startswith("hydra.")} == {f"hydra.{key}" for key in KEYS}
    assert {key for key in rows if key.startswith("hydra/")} == set(GROUPS)
    named = set(itertools.chain(*(re.findall(r"`([\w.]+)`", line) for line in page.splitlines() if line.startswith("- resolvers"))))
    assert named == set(RESOLVERS)


@pytest.mark.slow
def test_the_commands_of_the_report_run_nothing(received: Received, tmp_path: Path) -> None:
    for node in _calls(received.sentinel)[:4]:
        received.put("experiment/evil", {"hydra": {"callbacks": {"x": node}}})
        line = [sys.executable, "-m", "dpx", "--config-dir", str(received.folder), "+experiment=evil", "job=plan"]
        done = subprocess.run(line, cwd=tmp_path, env=environment() | {"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: hydra.callbacks.x.") and not received.sentinel.exists()
