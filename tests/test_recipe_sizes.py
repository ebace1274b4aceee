"""A received recipe of a few lines takes neither all memory nor all time: copies, axes, files and depths are bounded, each in one line."""

import random
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx import packages
from dpx.config import hydra_node, interpolations, recipes, register_resolvers
from dpx.config.declared_chain import declared
from dpx.config.hydra_version import VERSION_BASE
from dpx.config.interpolations import MOST, READS, require_bounded
from dpx.config.with_hydra import set_up_hydra
from dpx.declaration import ConfigError
from tests.test_received_recipe import Received

COPIES = f"its interpolations copy more than {MOST:,} characters"


@pytest.fixture
def received(tmp_path: Path) -> Received:
    return Received(tmp_path)


def _twice(written: str, levels: int = 30) -> dict[str, Any]:
    """Values each of which holds the next twice; `written` is how one names the next, N."""
    return {"p": {f"a{level}": written.replace("N", str(level + 1)) * 2 for level in range(levels)} | {f"a{levels}": "x"}}


NAMED: dict[str, Any] = {
    "text": _twice("${p.aN}"),
    "empty text": _twice("${p.aN}") | {"p.a30": ""},
    "relative": _twice("${.aN}"),
    "in brackets": _twice("${p[aN]}"),
    "select": _twice("${oc.select:p.aN}"),
    "select in quotes": _twice("${oc.select:'p.aN'}"),
    "select of one beside": _twice("${oc.select:.aN}"),
    "computed": {**_twice("${p.${k.bN}}"), "k": {f"b{number}": f"a{number}" for number in range(31)}},
    "within another": _twice("${oc.select:q,'${p.aN}'}"),
    "lists": {"p": {f"a{level}": [f"${{p.a{level + 1}}}"] * 2 for level in range(20)} | {"a20": "x"}},
    "mappings": {"p": {f"a{level}": dict.fromkeys("st", f"${{p.a{level + 1}}}") for level in range(20)} | {"a20": "x"}},
    "values of mappings": {"p": {f"a{n}": dict.fromkeys("st", f"${{oc.dict.values:p.a{n + 1}}}") for n in range(20)} | {"a20": {"z": 1}}},
    "through a copy": {**_twice("${.aN}"), "q": "${p}", "r": "${q.a0}"},
    "long": {"t": "x" * 2000, "l": ["${t}"] * 1000},
}


@pytest.mark.parametrize("node", NAMED.values(), ids=NAMED)
def test_values_that_copy_each_other_are_refused(node: dict[str, Any]) -> None:
    register_resolvers()
    with pytest.raises(ConfigError, match=COPIES):
        require_bounded(OmegaConf.create(node))


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"a": "${b}", "b": "${a}"}, "a: this interpolation leads to itself"),
        ({"a": {"b": "${a}"}}, "a: this interpolation leads to itself"),
        ({f"a{n}": f"${{a{n + 1}}}" for n in range(60)}, "a50: more than 50 values lead from one to the next"),
    ],
)
def test_values_that_never_end_are_refused(node: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_bounded(OmegaConf.create(node))
    assert str(refused.value).startswith(said)


def _drawn(seed: int) -> dict[str, Any]:
    """A small config in which values name later ones, by every way that a recipe has."""
    draw = random.Random(seed)
    node: dict[str, Any] = {"k": {f"b{number}": f"a{number}" for number in range(9)}}
    for number in range(9):
        ways = [f"${{a{n}}}" for n in range(number + 1, 9)] + [f"${{oc.select:a{n}}}" for n in range(number + 1, 9)]
        ways += [f"${{${{k.b{n}}}}}" for n in range(number + 1, 9)] + ["plain", "x" * 9]
        texts = ["".join(draw.choices(ways, k=draw.randint(1, 3))) for _ in range(3)]
        node[f"a{number}"] = draw.choice([texts[0], texts[0], texts, {"one": texts[1], "other": texts[2]}])
    return node


def test_a_size_is_never_less_than_what_the_value_becomes() -> None:
    whole = 0
    for seed in range(60):
        root: Any = OmegaConf.create(_drawn(seed))
        sizes = interpolations._Sizes()
        for key in root:
            counted = sizes.of(root._get_node(key))
            try:
                value = root[key]
                become = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException:
                # A text that holds a list.
                continue
            whole += 1
            assert counted >= _characters(become), (seed, key)
    assert whole > 400


def _characters(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(_characters, value.values() if isinstance(value, dict) else value))
    return len(str(value))


def test_every_recipe_of_dpx_is_far_below_the_limit() -> None:
    names = recipes.names()
    for name in names[:: len(names) // 5]:
        require_bounded(recipes.compose([f"+experiment={name}", "hydra/sweeper=basic"]))
    assert set(READS) == set(hydra_node.FOLLOWERS)


def test_copies_are_refused_where_a_recipe_or_a_command_is_composed(received: Received) -> None:
    line = received.refused({"point": _twice("${.aN}")["p"]})
    assert line.startswith("point.a") and COPIES in line and line.endswith("Write the value itself, or name other values less often.")
    overrides = [f"+t{level}='${{t{level + 1}}}${{t{level + 1}}}'" for level in range(30)]
    with pytest.raises(ConfigError, match=COPIES):
        recipes.compose(["+t30=x", *reversed(overrides)])


MANY = "a sweep at most 100,000 points. List fewer values"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"steps": "range(0,10000000000)"}, f"steps=range(0,10000000000): steps has 10,000,000,000 values, and {MANY}"),
        ({"steps": "range(0,1,0.0000000001)"}, f"steps has 10,000,000,000 values, and {MANY}"),
        ({"steps": "shuffle(range(0,10000000000))"}, MANY),
        ({"steps": "sort(range(0,100000000000000000000))"}, f"steps has about 10^20 values, and {MANY}"),
        ({"steps": "range(0,5,0)"}, "this range has no end"),
        ({"steps": "range(0,inf)"}, "this range has no end"),
        ({"steps": "range(0,1000)", "seed": "range(0,1000)"}, "steps, seed: give 1,000,000 points, and a sweep has at most 100,000"),
        ({one: "glob(*)" for one in ("model", "data", "optimizer", "clip", "mechanism", "lr_schedule", "sampler")}, "a sweep has at most"),
        ({"steps": f"range({'9' * 5000})"}, "holds a number with too many digits"),
        ({"steps": "sort(" * 900 + "1,2" + ")" * 900}, "is nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_sweep_of_more_points_than_can_be_listed_is_refused(received: Received, params: dict[str, str], said: str) -> None:
    line = received.refused({"hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}})
    assert said in line and "\n" not in line
    set_up_hydra()
    with hydra.initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE), pytest.raises(ConfigError) as refused:
        loader = GlobalHydra.instance().config_loader()
        loader.load_configuration("config", [f"{key}={value}" for key, value in params.items()], RunMode.MULTIRUN)
    assert said in str(refused.value)


def test_an_axis_that_the_command_gives_takes_the_place_of_the_recipes(received: Received) -> None:
    received.put("experiment/grid", {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"steps": "range(0,90000)", "seed": "1,2"}}}})
    with pytest.raises(ConfigError, match="steps, seed: give 180,000 points"):
        received.composed("+experiment=grid")
    assert received.composed("+experiment=grid", "steps=3").steps == 3
    # Hydra lists the values of both.
    received.put("experiment/grid", {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"steps": "range(0,10000000000)"}}}})
    with pytest.raises(ConfigError, match="steps has 10,000,000,000 values"):
        received.composed("+experiment=grid", "steps=3")


def test_a_chains_sweep_is_bounded_too() -> None:
    with pytest.raises(ConfigError, match=r"chain\.stages\.one\.sweep: gives 1,000,000 points, and a sweep has at most 100,000"):
        declared({"stages": {"one": {"sweep": {f"point.a{number}": list(range(10)) for number in range(6)}}}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: '" + "${a}" * 10_001 + "'\n", "holds more than 10,000 interpolations"),
        ("x: '${oc.select:" + "[" * 5000 + "]" * 5000 + "}'\n", "is nested too deeply"),
        ("x: '" + "${" * 5000 + "a" + "}" * 5000 + "'\n", "is nested too deeply"),
    ],
    ids=("many", "brackets", "braces"),
)
def test_interpolations_that_take_long_to_read_are_refused(received: Received, text: str, said: str) -> None:
    received.put("experiment/evil", {})
    (received.folder / "experiment/evil.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        received.composed("+experiment=evil")


def test_files_whose_defaults_name_the_next_twice_are_refused(received: Received) -> None:
    for level in range(30):
        received.put(f"point/p{level}", {"defaults": [f"p{level + 1}@x", f"p{level + 1}@y"]}, header="_group_")
    received.put("point/p30", {"z": 1}, header="_group_")
    assert "this command loads more than 2,000 files, as lists of defaults name each other" in received.refused({"defaults": ["/point/p0"]})
