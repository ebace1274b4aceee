"""The table of mutants is true of the source as it stands; `-m slow` runs every one of them."""

import ast
import dataclasses
import functools

import pytest

from .mutants import MUTANTS, ROOT, TABLE, WITHOUT_CODE, Mutant, fails

NAMES = [mutant.name for mutant in MUTANTS]


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_edit_fits_and_its_test_exists(mutant: Mutant):
    assert ast.dump(ast.parse(mutant.of((ROOT / mutant.file).read_text()))) != ast.dump(parsed(mutant.file))
    file, _, function = mutant.test.partition("::")
    assert function.partition("[")[0] in [node.name for node in parsed(file).body if isinstance(node, ast.FunctionDef)]


def test_every_mutant_is_caught_by_a_test_of_the_suite_that_runs(request):
    """Of the files that this run collects whole: in the default suite all, of which no test may have become slow."""
    option, ids = request.config.option, [item.nodeid for item in request.session.items]
    is_whole = not option.keyword and not any("::" in argument for argument in request.config.args)
    files = {one.partition("::")[0] for one in ids} if is_whole else ()
    known = [mutant.test for mutant in MUTANTS if mutant.test.partition("::")[0] in files]
    assert [test for test in known if not any(one == test or one.startswith(f"{test}[") for one in ids)] == []


def test_the_written_table_holds_every_mutant_as_caught():
    lines = TABLE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == NAMES + [name for name, _ in WITHOUT_CODE]
    for row, mutant in zip(rows, MUTANTS, strict=False):
        assert row[1:] == [f"`{mutant.file}`", f"`{mutant.test}`", "yes"], f"run python -m tests.audit.mutants '{mutant.name}'"


def test_a_mutant_whose_symbol_or_code_is_gone_is_an_error_that_names_it():
    source = (ROOT / MUTANTS[0].file).read_text()
    for change in ({"symbol": "_finish.gone"}, {"old": "drawn + deviation"}):
        mutant = dataclasses.replace(MUTANTS[0], **change)
        with pytest.raises(ValueError, match=f"{mutant.name}: {mutant.file}: .*{next(iter(change.values())).replace('+', '.')}"):
            mutant.of(source)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_mutant_is_caught(mutant: Mutant):
    assert fails(mutant)[0]
