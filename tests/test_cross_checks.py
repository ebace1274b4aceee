"""Cross-checks of declarations stand in one place a room, and are tried in one order: of the root record, of a new run, of a claim."""

import ast
from pathlib import Path

from dpx.config.experiment import Experiment

ROOT = Path(__file__).parent.parent / "dpx"
# What the rooms below name the checks of a declaration against others.
NAMES = ("require_fits", "require_usable", "check")
ORDER = {
    ("config/experiment.py", "__post_init__"): [
        "data.require_fits",
        "task.require_fits",
        "mechanism.require_fits",
        "profile.require_fits",
    ],
    ("config/experiment.py", "require_new"): ["lr_schedule.require_fits", "optimizer.require_usable"],
    # A part of the list in `__post_init__`, for runs with an audit.
    ("config/experiment.py", "_require_audit_fits"): ["audit.require_fits"],
    ("claim/calibration.py", "check_claim"): ["sampler.check", "mechanism.check"],
}


def _called(function: ast.AST) -> list[str]:
    """The checks of parts of the root record that a function calls, in order, as `<field>.<check>`."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls.sort(key=lambda found: (found.lineno, found.col_offset))
    named = [(ast.unparse(found.value).rpartition(".")[2], found.attr) for found in calls if found.attr in NAMES]
    return [f"{field}.{check}" for field, check in named if field in Experiment.__dataclass_fields__]


def test_the_checks_of_each_room_are_called_from_one_list_once_and_in_order():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            if called := _called(function):
                found[str(path.relative_to(ROOT)), function.name] = called
    assert found == ORDER


def test_no_check_of_the_root_record_is_left_out_of_the_list():
    tree = ast.parse((ROOT / "config/experiment.py").read_text())
    root = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Experiment")
    methods = {node.name: node for node in root.body if isinstance(node, ast.FunctionDef)}
    listed = [
        node.func.attr
        for node in ast.walk(methods["__post_init__"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
    ]
    own = [name for name in methods if name.startswith("_require_")]
    assert sorted(listed) == sorted(own) and len(set(listed)) == len(listed)
