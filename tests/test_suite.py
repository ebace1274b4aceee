"""What a test is called, and what it is given, must not depend on the clock, on chance or on which tests its worker ran before: workers
collect separately and must agree, and take tests from one another."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

# A call of one of these gives another value at each time or in each process; `gzip.compress` writes the time unless told which.
CHANGING = ("time.time", "time.time_ns", "datetime.now", "datetime.today", "os.urandom", "uuid.uuid1", "uuid.uuid4", "hash")
UNSEEDED = ("random.Random", "np.random.default_rng", "numpy.random.default_rng")


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.rglob("*.py"))}


def _calls() -> Iterator[tuple[Path, str, ast.Call]]:
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), node


def _is_fault(name: str, call: ast.Call) -> bool:
    if name == "gzip.compress":
        return "mtime" not in {keyword.arg for keyword in call.keywords}
    if name in UNSEEDED:
        return not call.args
    module, _, function = name.rpartition(".")
    return name in CHANGING or module == "secrets" or (module == "random" and function != "Random")


def test_no_value_comes_from_the_clock_or_from_chance():
    assert [f"{path.name}:{call.lineno} {name}" for path, name, call in _calls() if _is_fault(name, call)] == []


def _outlasts_its_module(function: ast.FunctionDef) -> bool:
    """Whether it is a fixture that sets something up for longer than a module, and undoes it then."""
    scopes = [word.value for call in function.decorator_list if isinstance(call, ast.Call) for word in call.keywords if word.arg == "scope"]
    lasts = any(isinstance(scope, ast.Constant) and scope.value in ("session", "package") for scope in scopes)
    return lasts and any(isinstance(node, ast.Yield) for node in ast.walk(function))


def test_nothing_is_replaced_for_longer_than_a_module():
    functions = ((path, node) for path, tree in _trees().items() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert [f"{path.name}:{node.lineno} {node.name}" for path, node in functions if _outlasts_its_module(node)] == []
