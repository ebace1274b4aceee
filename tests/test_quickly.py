"""Each thing that tests replace in Hydra and OmegaConf gives the answer that they give without it."""

from pathlib import Path
from typing import Any

import jax
import pytest
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from yaml import YAMLError

from dpx import config
from dpx.config import recipes
from dpx.config.hydra_version import IS_NEXT
from tests import conftest, quickly

if IS_NEXT:
    pytest.skip("nothing is replaced in Hydra 1.4", allow_module_level=True)

CONF = Path(__file__).parents[1] / "conf"
# Groups, recipes of recipes, an option chosen by an interpolation, lists, infinities, sweeps and values given twice.
LINES = [
    ("+experiment=laptop/anil_batch_schedule", "hydra/sweeper=basic"),
    ("job=analyse", "analysis=mckenna_fig3c_token_ratio", "analysis.epsilons=[1,.inf,inf]"),
    ("data=ledgar", "task=classification", "tune=search", "tune.shape=.inf", "++optimizer.beta1=0.5", "~optimizer.eps"),
    # The files of the line before, with other values.
    ("data=ledgar", "seed=3", "task=classification", "tune=search", "optimizer={beta1: 0.25}", "seed=4", "+tune.name=x"),
]


def _composed(line: tuple[str, ...]) -> tuple[str, str]:
    """The config as text, with Hydra's own, and what dpx builds from."""
    cfg = recipes.compose(list(line), with_hydra=True)
    written = OmegaConf.to_yaml(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return written, repr(config.resolved(cfg))


# The first two are slow: the last two take every road of theirs but recipes and analyses, which tests/test_config.py holds to its files.
@pytest.mark.parametrize(
    "line", [*(pytest.param(line, marks=pytest.mark.slow) for line in LINES[:2]), *LINES[2:]], ids=[" ".join(line) for line in LINES]
)
def test_a_config_is_composed_as_without_any_of_it(line):
    with quickly.only():
        expected = _composed(line)
    for name in quickly.PATCHES:
        with quickly.only(name):
            assert _composed(line) == expected, name
    # What was kept the first time is what this time gets.
    assert _composed(line) == expected


def test_files_of_dpx_are_read_once(monkeypatch):
    recipes.compose(["model=micro", "seed=1"])
    for name in ("_read_config", "_list_defaults", "_merge_files"):
        monkeypatch.delattr(quickly, name)
    assert recipes.compose(["model=micro", "seed=2"]).seed == 2


@pytest.mark.parametrize("line", [("model=mikro",), ("steps=[1",)])
def test_a_refusal_is_the_one_without_any_of_it(line):
    def refused() -> str:
        with pytest.raises(HydraException) as error:
            recipes.compose(list(line))
        return str(error.value)

    with quickly.only():
        expected = refused()
    for name in quickly.PATCHES:
        with quickly.only(name):
            assert refused() == expected, name


def _repository() -> ConfigRepository:
    path = ConfigSearchPathImpl()
    for provider, place in (("hydra", "pkg://hydra.conf"), ("main", f"file://{CONF}"), ("schema", "structured://")):
        path.append(provider, place)
    return ConfigRepository(path)


FILES = [path.relative_to(CONF).with_suffix("").as_posix() for path in sorted(CONF.rglob("*.yaml"))][::4]


def test_a_file_is_read_as_without_it_also_after_what_was_read_has_been_changed():
    patch, repository = quickly.PATCHES["config_files"], _repository()
    for file in [*FILES, "hydra/output/default", "not_there"]:
        expected = patch.original(repository, file)
        for _ in range(2):
            found = patch.replacement(repository, file)
            assert found == expected
            if found is not None:
                assert OmegaConf.to_yaml(found.config) == OmegaConf.to_yaml(expected.config)
                assert found.defaults_list == expected.defaults_list
                found.defaults_list.clear()
                found.config = None


def test_a_folder_of_other_config_is_read_anew(tmp_path):
    path = ConfigSearchPathImpl()
    path.append("main", f"file://{tmp_path}")
    for steps in (1, 2):
        (tmp_path / "config.yaml").write_text(f"steps: {steps}\n")
        read = quickly.PATCHES["config_files"].replacement(ConfigRepository(path), "config")
        assert read is not None and read.config.steps == steps


def test_a_text_is_read_as_without_it_also_after_what_was_read_has_been_changed():
    patch = quickly.PATCHES["text"]
    for text in ("a: {b: [1, .inf]}\nc: ${a.b}\n", "", "word", "[1, two]"):
        for _ in range(2):
            found, expected = patch.replacement(text), patch.original(text)
            assert found == expected and OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected) and type(found) is type(expected)
            OmegaConf.update(found, "[0]" if isinstance(found, ListConfig) else "a", "other")
    with pytest.raises(YAMLError):
        patch.replacement("a: [")


def test_choices_are_put_together_where_a_default_has_an_interpolation():
    patch, overrides = quickly.PATCHES["choices"], Overrides(_repository(), OverridesParser.create().parse_overrides(["model=micro"]))
    within: Any = {"parent_base_dir": "", "parent_package": ""}
    plain: list[Any] = [ConfigDefault(path="_self_", **within), GroupDefault(group="model", value="tiny", **within)]
    interpolated = [*plain, GroupDefault(group="data", value="${model}", **within)]
    for self_added in (False, True):
        assert patch.replacement(overrides, interpolated, self_added) == patch.original(overrides, interpolated, self_added)
    # Nobody reads them here.
    assert patch.replacement(overrides, plain, False) is None


def _tree(node: Any) -> Any:
    return (type(node).__name__, node.getText(), [_tree(child) for child in getattr(node, "children", None) or ()])


@pytest.mark.parametrize("text", ["${steps}", "a ${b.c} d", "${oc.env:HOME,'x'}", "${add:${a},[1,2]}", "${.x}", "${..x[0]}"])
def test_an_interpolation_is_parsed_as_without_it(text):
    patch = quickly.PATCHES["interpolations"]
    trees = [_tree(parse(text)) for parse in (patch.original, patch.replacement, patch.replacement)]
    assert trees[1:] == trees[:1] * 2


def _parents(node: Any, place: str = "") -> dict[str, int]:
    content = node._content if isinstance(node, (DictConfig, ListConfig)) else None
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = {place: id(node._parent)}
    for key, child in children:
        found |= _parents(child, f"{place}/{key}")
    return found


def test_every_node_gets_the_parent_that_it_gets_without_it():
    patch = quickly.PATCHES["parents"]
    cfg = OmegaConf.create(
        {"a": {"b": [1, {"c": None}], "d": "${a.b}"}, "e": None, "f": "???", "g": ListConfig(None), "h": DictConfig(None)}
    )
    expected = _parents(cfg)
    for broken in ([cfg.a], [cfg.a.b], [cfg.a.b, cfg.a.b[1]], [cfg._get_node("e"), cfg.a]):
        for function in (patch.original, patch.replacement):
            for node in broken:
                node._set_parent(OmegaConf.create({}))
            assert _parents(cfg) != expected
            function(cfg)
            assert _parents(cfg) == expected


def test_no_other_test_reaches_into_hydra_and_omegaconf_to_replace_something():
    internal = ("from hydra._internal", "import hydra._internal", "omegaconf._utils", "omegaconf.base", "omegaconf import base")
    internal += ("HydraConfig.get", "GlobalHydra.get", "setattr(HydraConfig", "setattr(GlobalHydra", "setattr(OmegaConf", "setattr(hydra")
    internal += ('setattr("hydra', 'setattr("omegaconf')
    others = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in ("quickly.py", "test_quickly.py")]
    assert [path.name for path in others if any(name in path.read_text() for name in internal)] == []


def test_a_program_is_compiled_once_for_each_that_differs(monkeypatch):
    compiled = []
    once = conftest._compile
    monkeypatch.setattr(conftest, "_compile", lambda *arguments: compiled.append(arguments) or once(*arguments))
    added = [float(jax.jit(lambda x, number=number: x * 3 + number)(2.0)) for number in (0.3125, 0.4375, 0.3125)]
    assert (added, len(compiled)) == ([6.3125, 6.4375, 6.3125], 2)
