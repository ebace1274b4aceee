"""Functions take what they read: only code that assembles a run, launches it, or states its claim takes the whole experiment."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dpx
import dpx_papers

PACKAGES = [Path(one.__file__).parent for one in (dpx, dpx_papers) if one.__file__]
# Each mechanism whose proof has conditions adds one: its `check`. `require_planned` compares a run's plan with its ledger.
LIMIT = 35
# Where the whole experiment is the subject: jobs, launching, configs, the claim.
ITS_ROOMS = ("job/", "benchmark/job.py", "launch/", "config/", "chain/", "claim/calibration.py", "claim/statement.py")
# Its types: the class, and the part of it that a mechanism's proof may read.
TYPES = ("Experiment", "Declared")


def _names(annotation: ast.expr | None) -> set[str]:
    """Every name in an annotation, those in quotes too; of `dpx.config.experiment.Experiment` the last."""
    names: set[str] = set()
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\w+", node.value))
        names |= {node.id} if isinstance(node, ast.Name) else {node.attr} if isinstance(node, ast.Attribute) else set()
    return names


def _is_experiment(name: str, annotation: ast.expr | None) -> bool:
    names = _names(annotation)
    return bool(names & set(TYPES)) or (name in ("experiment", "exp") and names != {"str"})


def signatures(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each function, method and lambda that takes an experiment, and of each class with such a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            if any(_is_experiment(one.arg, one.annotation) for one in every):
                yield node.lineno, getattr(node, "name", "lambda")
        if isinstance(node, ast.ClassDef):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
            if any(_is_experiment(line.target.id, line.annotation) for line in fields if isinstance(line.target, ast.Name)):
                yield node.lineno, node.name


def test_few_functions_take_the_whole_experiment():
    found = []
    for package, path in ((one, path) for one in PACKAGES for path in sorted(one.rglob("*.py"))):
        place = path.relative_to(package).as_posix()
        if not place.startswith(ITS_ROOMS):
            found += [f"{place}:{line} {name}" for line, name in signatures(path.read_text())]
    assert 0 < len(found) <= LIMIT, f"{len(found)} signatures take an Experiment, {LIMIT} are allowed:\n" + "\n".join(found)


def test_every_way_to_take_one_is_counted():
    source = """
def bare(experiment): ...
def quoted(given: "Experiment | None"): ...
def dotted(*, given: dpx.config.experiment.Experiment): ...
def of_many(given: list[Experiment]): ...
def method(self, declared: Declared): ...
class Holding:
    held: Experiment
def named(experiment: str): ...
def other(experiments: list[str]): ...
"""
    assert [name for _, name in signatures(source)] == ["bare", "quoted", "dotted", "of_many", "method", "Holding"]
