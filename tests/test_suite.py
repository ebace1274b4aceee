"""What a test is called, and what it is given, must not depend on the clock or on chance: workers collect separately and must agree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# A call of one of these gives another value at each time or in each process; `gzip.compress` writes the time unless told which.
CHANGING = ("time.time", "time.time_ns", "datetime.now", "datetime.today", "os.urandom", "uuid.uuid1", "uuid.uuid4", "hash")
UNSEEDED = ("random.Random", "np.random.default_rng", "numpy.random.default_rng")


def _calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _is_fault(name: str, call: ast.Call) -> bool:
    if name == "gzip.compress":
        return "mtime" not in {keyword.arg for keyword in call.keywords}
    if name in UNSEEDED:
        return not call.args
    module, _, function = name.rpartition(".")
    return name in CHANGING or module == "secrets" or (module == "random" and function != "Random")


@pytest.mark.parametrize(
    "path", [path for path in sorted(Path(__file__).parent.rglob("*.py")) if path.stat().st_size], ids=lambda path: path.stem
)
def test_no_value_comes_from_the_clock_or_from_chance(path: Path):
    faults = [f"{path.name}:{call.lineno} {name}" for name, call in _calls(path) if _is_fault(name, call)]
    assert faults == []
