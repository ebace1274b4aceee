"""Who may import whom: read from the source, imports inside functions included."""

import ast
import builtins
import dis
import functools
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpx
import dpx_papers

PACKAGE = Path(dpx.__file__).parent


@functools.cache
def modules() -> dict[str, Path]:
    found = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def _imported(tree: ast.AST) -> Iterator[str]:
    """Modules by their full names; `from a import b` is both `a.b`, where that is a module, and `a`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in names)


@functools.cache
def arrows() -> dict[str, frozenset[str]]:
    """What every module of dpx imports, its own package's `__init__` not counted."""
    return {name: frozenset(_imported(ast.parse(path.read_text()))) - {name} for name, path in modules().items()}


def _is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def _reached(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in arrows().get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("dpx.privacy", ("jax", "hydra", "orbax", "flax")),
        ("dpx.statement", ("jax", "hydra", "orbax", "flax")),
        ("dpx.config.experiment", ("hydra",)),
        ("dpx.mechanism", ("hydra",)),
        ("dpx.clipping", ("hydra",)),
        ("dpx.models", ("hydra",)),
        ("dpx.data", ("hydra",)),
    ],
)
def test_a_room_reaches_nothing_that_it_must_not_know(room, forbidden):
    wrong = [
        f"{start} reaches {name}"
        for start in arrows()
        if _is_in(start, (room,))
        for name in sorted(_reached(start))
        if _is_in(name, forbidden)
    ]
    assert not wrong, "\n".join(wrong)
    assert {"jax", "dpx.clipping.clipped_sum"} <= _reached("dpx.training.opening"), "imports are followed through other modules"


def line_of_rooms() -> list[str]:
    """The rooms from the highest to the lowest, as the page names them."""
    page = (PACKAGE / "docs" / "architecture.md").read_text()
    drawn = page.split("```text\n", 1)[1].split("```", 1)[0]
    return [line.split()[0] for line in drawn.splitlines()]


def test_a_room_imports_only_from_rooms_below_it():
    rooms = line_of_rooms()
    place = {name: len(rooms) - number for number, name in enumerate(rooms)} | {"__init__": 0, "__main__": len(rooms) + 1}
    room_of = lambda name: (name.split(".") + ["__init__"])[1]  # noqa: E731
    assert {room_of(name) for name in modules()} == set(place), "every room has its place, and every place is a room"
    against = [
        f"{name} imports {other}"
        for name, imported in arrows().items()
        for other in sorted(imported)
        if other in modules() and room_of(name) != room_of(other) and place[room_of(name)] <= place[room_of(other)]
    ]
    assert not against, "\n".join(against)
    packages = [name for name in rooms if (PACKAGE / name).is_dir()]
    assert len(packages) <= 22 and len(place) - len(packages) <= 8


def test_only_configuration_and_launching_know_hydra():
    knowing = {name for name, imported in arrows().items() if any(_is_in(one, ("hydra",)) for one in imported)}
    assert knowing
    assert {name for name in knowing if not _is_in(name, ("dpx.__main__", "dpx.config", "dpx.launch"))} == set()


def test_dpx_imports_nothing_of_the_package_of_the_papers():
    """Its jobs and analyses are named in YAML, and what a core job shows of a paper comes through the entry point."""
    assert [name for name, imported in arrows().items() if any(_is_in(one, ("dpx_papers",)) for one in imported)] == []
    naming = [path.relative_to(PACKAGE).as_posix() for path in modules().values() if "dpx_papers" in path.read_text()]
    assert naming == [], "not by a name in a string either"


def test_no_analysis_needs_the_tables_of_pages_to_be_planned():
    """pandas and jinja2 are imported where a page is made, not where an analysis or a job is declared."""
    papers = Path(str(dpx_papers.__file__)).parent
    for path in (
        path for path in papers.rglob("*.py") if path.parent.name != "report" and path.name not in ("rules.py", "figures.py", "supplied.py")
    ):
        wanted = {f"{name}.py" for name in re.findall(r"^from dpx_papers\.report(?:\.| import )(\w+)", path.read_text(), re.MULTILINE)}
        assert wanted <= {"shape.py", "rows.py"}, path
    for name in ("shape.py", "rows.py"):
        assert not re.search(r"^(import|from) (pandas|jinja2)", (papers / "report" / name).read_text(), re.MULTILINE)


def test_no_files_import_each_other_in_a_circle():
    circles = sorted(name for name in arrows() if name in _reached(name))
    assert not circles, circles


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def test_a_module_has_every_name_that_its_functions_read_from_it():
    """Ruff cannot say so: it would read the shapes of arrays in annotations as names."""
    missing = []
    for name, path in modules().items():
        read, given = dict[str, str](), {*dir(builtins), "__file__", "__name__", "__spec__", "__path__", "__package__"}
        for code in _codes(compile(path.read_text(), str(path), "exec")):
            for step in dis.get_instructions(code):
                if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                    given.add(step.argval)
                elif step.opname == "LOAD_GLOBAL":
                    read.setdefault(step.argval, code.co_qualname)
        missing += [f"{name}.{place}: {one}" for one, place in read.items() if one not in given]
    assert missing == []


def test_the_page_names_files_and_functions_that_exist():
    page = (PACKAGE / "docs" / "architecture.md").read_text()
    sources = {name: PACKAGE / name for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page)}
    sources = {name: path for name, path in sources.items() if name.partition("/")[0] in line_of_rooms()}
    assert len(sources) > 40 and [name for name, path in sources.items() if not path.is_file()] == []
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)` \(`([\w.]+)`", page)
    gone = [
        (name, one)
        for name, one in named
        if not re.search(rf"\b(?:def|class) {one.rpartition('.')[2]}\b|^{one}\b", sources[name].read_text(), re.M)
    ]
    assert gone == [], "write what they are called now"


def test_the_page_says_what_every_file_decides():
    """So a question "where is it decided that ..." is answered by the page, for a file that is added too."""
    page = (PACKAGE / "docs" / "architecture.md").read_text().split("## Where it is decided", 1)[1]
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert [name for name in files if f"`{name}`" not in page] == [], "add a row, or name the file in the row of its subject"
