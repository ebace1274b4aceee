"""Several recipes in one command: the points of each recipe's own sweep, without planning them."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from dpx.config import recipes
from dpx.config.with_hydra import register_resolvers, started
from dpx.declaration import ConfigError
from dpx.launch import recipe_sweeper
from tests.composed import point_at
from tests.papers.test_catalogue import NAMES


@pytest.fixture(scope="module")
def loader() -> Any:
    # Another test may have looked for plugins again, which makes the sweeper's base anew.
    importlib.reload(recipe_sweeper)
    register_resolvers()
    with started():
        return GlobalHydra.instance().config_loader()


def batches(loader: Any, *arguments: str, most: int | None = None) -> list[list[list[str]]]:
    """The batches of points of a command with `-m`, as Hydra hands them to the launcher."""
    master = loader.load_configuration("config", [*arguments, "hydra.mode=MULTIRUN"], run_mode=RunMode.MULTIRUN)
    sweeper: Any = recipe_sweeper.RecipeSweeper(max_batch_size=most)
    sweeper.hydra_context, sweeper.config = SimpleNamespace(config_loader=loader), master
    return sweeper.split_arguments(OverridesParser.create(config_loader=loader).parse_overrides(list(arguments)), most)


def test_each_recipe_has_the_points_of_its_own_sweep(loader: Any) -> None:
    """Of the second one the sweep is inherited and switched off; the third is in a folder."""
    names = ("anil_epsilon_sweep", "mckenna_clip_check", "laptop/anil_epsilon_sweep")
    (found,) = batches(loader, f"+experiment={','.join(names)}", "job=plan")
    assert found == [[f"+experiment={name}", *point, "job=plan"] for name in names for point in recipes.points(name)]
    assert [point[1] for point in found if point[0] == "+experiment=mckenna_clip_check"] == ["job=plan"]


def test_a_pattern_names_recipes_and_a_search_is_planned_at_its_own_values(loader: Any) -> None:
    (found,) = batches(loader, "+experiment=glob(anil_t*)", "job=plan")
    names = ["anil_table1_best", "anil_throughput", "anil_tune_32k"]
    assert list(dict.fromkeys(point[0] for point in found)) == [f"+experiment={name}" for name in names]
    assert found[-1] == ["+experiment=anil_tune_32k", "hydra/sweeper=basic", "job=plan"]
    (found,) = batches(loader, "+experiment/laptop=glob(anil_b*)", "job=plan")
    assert {point[0] for point in found} == {f"+experiment/laptop={name}" for name in ("anil_batch_schedule", "anil_batch_sweep")}


def test_the_command_s_values_take_the_place_of_an_axis_and_its_lists_are_one_more(loader: Any) -> None:
    names = "+experiment=anil_epsilon_sweep,anil_2m_batch"
    (found,) = batches(loader, names, "noise.epsilon=3.0", "replicate=0,1")
    given = [["noise.epsilon=3.0", f"replicate={replicate}"] for replicate in (0, 1)]
    assert found == [[f"+experiment={name}", *point] for name in ("anil_epsilon_sweep", "anil_2m_batch") for point in given]
    assert [len(batch) for batch in batches(loader, names, "noise.epsilon=3.0", "replicate=0,1", most=3)] == [3, 1]


def test_one_recipe_is_swept_as_by_hydra(loader: Any) -> None:
    assert batches(loader, "+experiment=anil_2m_batch", "steps=1,2") == [
        [["+experiment=anil_2m_batch", f"steps={steps}"] for steps in (1, 2)]
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+experiment=anil_2m_batch,anil_tune_32k"], r"\+experiment=anil_tune_32k: is a search, .* Launch it by itself"),
        (["+experiment=glob(nowhere_*)"], r"\+experiment=glob\(nowhere_\*\): no recipe has such a name"),
        (["+experiment=anil_2m_batch,anil_epsilon_sweep", "seed=range(0,20000)"], "180,000 points"),
    ],
)
def test_what_cannot_be_expanded_is_refused_by_name(loader: Any, arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        batches(loader, *arguments)


@pytest.mark.slow
def test_all_recipes_of_the_papers_expand_to_their_points(loader: Any) -> None:
    (found,) = batches(loader, f"+experiment={','.join(NAMES)}", "job=plan")
    assert len(NAMES) == 81 and len(found) == 921
    (found,) = batches(loader, "+experiment/laptop=glob(*)", "job=plan")
    assert len(found) == sum(len(recipes.points(name)) for name in recipes.names("laptop/*"))


def test_a_second_mesh_is_for_another_command_unless_the_job_computes_no_step(tmp_path) -> None:
    settings = SimpleNamespace(sweeper={"params": {"noise.epsilon": "1,2"}})

    def used_after(used: Any, job: str, mesh: str, *overrides: str) -> Any:
        cfg = recipes.compose(["model=micro", f"mesh={mesh}"])
        return point_at(tmp_path, job, *overrides, is_sweep=True, cfg=cfg).require_one_mesh(used, settings)

    used = None
    for job, mesh in (("plan", "single"), ("plan", "h200"), ("train", "h200"), ("analyse", "single"), ("train", "h200")):
        used = used_after(used, job, mesh)
    said = r"mesh=single: one process can use one mesh only, here h200\. .* another command: python -m dpx \+experiment=a steps=3\.$"
    with pytest.raises(ConfigError, match=said):
        used_after(used, "train", "single", "+experiment=a", "noise.epsilon=2", "steps=3")
