"""`dpx/docs/extending.md`: its code is the pond's, and its commands run."""

import os
import re
import shlex
import textwrap
from pathlib import Path

import pytest

import dpx
import dpx_papers
from tests.outside.made_up import POND, pond
from tests.processes import CHECKOUT, answers

# The paper whose items are made from rows.
PUDDLE = CHECKOUT / "tests" / "report" / "dpx_puddle"
PAGE = (Path(dpx.__file__).parent / "docs" / "extending.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("(")[0].split()[-1])
def test_its_code_is_the_ponds(code):
    """Or that of the papers, part by part, a docstring left out or not, and a line `...` for what is left out."""
    files = [*POND.glob("*.py"), *PUDDLE.glob("*.py"), *Path(str(dpx_papers.__file__)).parent.rglob("*.py")]
    written = [re.sub(r'\n +"""[^"]*"""(?=\n)', "", path.read_text()) for path in files]
    for part in re.split(r"\n\n+|\n +\.\.\.\n", re.sub(r'\n +"""[^"]*"""(?=\n)', "", code.strip())):
        places = (part, textwrap.indent(part, "    "))
        assert any(place in re.sub(r"\n\n+", "\n\n", text) for place in places for text in written), part


@pytest.mark.slow
def test_its_commands_run(tmp_path):
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    installing, *told = lines
    assert installing[:4] == ["python", "-m", "pip", "install"]
    assert all(line[:3] == ["python", "-m", "dpx"] for line in told)
    few = ("schedule.evaluation_rows=32",)
    given = [[*line[3:], *(few if "+experiment=pond" in line else ())] for line in told]
    found = f"{CHECKOUT}{os.pathsep}{pond(tmp_path / 'site')}"
    said = answers([(tmp_path, line) for line in given], trains_alike=True, PYTHONPATH=found)
    assert [answer.stderr for answer in said if answer.returncode] == []
    shown = {" ".join(line[3:]): answer.stdout for line, answer in zip(told, said, strict=True)}
    assert "dpx_pond 0.3.1" in shown["--help"] and "sampler=coins" in shown["job=list list.match=pond"]
    trained = [text for line, text in shown.items() if line.startswith("+experiment=pond")]
    assert len(trained) == 2 and all("dp_by_dpx_pond" in text for text in trained)
    assert "of each release" in shown["analysis=ripples job=analyse"]
