"""Cross-checks of declarations stand in one place a room, and are tried in one order: of the root record, of a new run, of a claim."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dpx.config.experiment import Experiment
from dpx.config.instantiate import NODES_OF_JOBS

ROOT = Path(__file__).parent.parent / "dpx"
# What the rooms below name the checks of a declaration against others.
NAMES = ("require_fits", "require_usable", "check")
ORDER = {
    ("config/experiment.py", "__post_init__"): [
        "data.require_fits",
        "task.require_fits",
        "train.require_fits",
        "mechanism.require_fits",
        "profile.require_fits",
    ],
    ("config/experiment.py", "require_new"): ["lr_schedule.require_fits", "optimizer.require_usable", "logger.require_usable"],
    ("launch/point.py", "built"): ["logger.require_usable"],
    ("claim/claim_checks.py", "check_claim"): ["sampler.check", "mechanism.check"],
    ("claim/own_loop.py", "record"): ["sampler.check"],
}

# Where each room refuses two declarations beside each other, if not in a method of `NAMES`, which one of these lists calls.
PLACE = {
    "audit": "audit/canaries.py",
    "claim": "claim/claim_checks.py",
    "config": "config/experiment.py",
    "init": "init/start.py",
    "interop": "interop/written.py",
    "job": "job/chain_stages.py",
    "launch": "launch/point.py",
    "privacy": "privacy/events.py",
}
# What looks like such a check elsewhere, and why it stands there.
ELSEWHERE = {
    "one of the lists calls it": [
        ("data/length_buckets.py", "widths_of"),
        ("data/schema.py", "require_gives"),
    ],
    "only this job reads these keys": [("job/plan.py", "Plan.document"), ("job/released_jobs.py", "Predict.__call__")],
    "a loop of one's own gives a model and a task without a root record": [
        ("models/shape.py", "Bert.parameter_shapes"),
        ("models/shape.py", "RotaryDecoder.parameter_shapes"),
        ("task/objective.py", "objective_of_example"),
    ],
    "what a file holds decides it": [
        ("data/labelled.py", "Table.classes"),
        ("data/tokenizer.py", "of_path"),
        ("data/tokenizer.py", "require_read_elsewhere"),
        ("generation/completer.py", "_decoder"),
        ("init/parent.py", "_checkpoint"),
        ("models/checkpoint_shape.py", "written_out"),
    ],
    "measured runs decide it": [
        ("job/design.py", "Design.__call__"),
        ("job/design.py", "Design._designed"),
        ("job/design_fine_tuning.py", "designed"),
    ],
    "the source has no rows under any other declaration": [("data/sources.py", "open_source")],
    "the program that was traced decides it": [("clipping/op.py", "Op.of_units")],
    "devices of this machine decide it": [("processes/mesh.py", "Mesh._used"), ("training/step.py", "make_step")],
    "what a ledger holds decides it, whichever version wrote it": [
        ("claim/combined_ledgers.py", "together"),
        ("privacy/ledger.py", "_of_package"),
        ("privacy/ledger.py", "_of_rows"),
        ("privacy/ledger.py", "_release"),
        ("privacy/search_accounting.py", "zcdp"),
    ],
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


DECLARED = {*Experiment.__dataclass_fields__, *NODES_OF_JOBS, "job", "fork", "chain"} - {"name", "steps", "list"}
_KEY = re.compile(rf"(?<![\w.{{/])({'|'.join(sorted(DECLARED))})(?=[=.]\w|=\{{|=$|/\w+=)|\bwith ({'|'.join(sorted(DECLARED))})\b")


def _declarations(node: ast.AST) -> set[str]:
    """The groups of the config that code reads, or that its texts name as `group=` or `group.key`."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in one.values]
            found |= {name for names in _KEY.findall("".join(map(str, parts))) for name in names if name}
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            found |= {name for names in _KEY.findall(one.value) for name in names if name}
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            found |= {one.attr} & DECLARED if one.value.id in ("experiment", "declared", "self") else {one.value.id} & DECLARED
    return found


def _refusals(node: ast.AST, inside: tuple[str, ...] = (), function: ast.AST | None = None) -> Iterator[tuple[str, set[str]]]:
    """Each `require` and `ConfigError` with the declarations that its arguments, and what these were computed from, read or name."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        inside, function = (*inside, node.name), node if isinstance(node, ast.FunctionDef) else function
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("require", "ConfigError") and function:
        found = set().union(*(_declarations(one) for one in node.args))
        read = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for one in ast.walk(function):
            is_loop = isinstance(one, ast.For)
            targets, value = ([one.target], one.iter) if is_loop else (one.targets, one.value) if isinstance(one, ast.Assign) else ([], one)
            if read & {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}:
                found |= _declarations(value)
        yield ".".join(inside), found
    for child in ast.iter_child_nodes(node):
        yield from _refusals(child, inside, function)


def test_a_room_refuses_two_declarations_beside_each_other_in_one_place():
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for function, declarations in _refusals(ast.parse(path.read_text())):
            is_own = function.endswith(".__post_init__")
            if len(declarations) > 1 and not is_own and function.rpartition(".")[2] not in NAMES and file not in PLACE.values():
                found.add((file, function))
    elsewhere = {place for places in ELSEWHERE.values() for place in places}
    assert found == elsewhere, sorted(found ^ elsewhere)
