"""The notebooks of the docs run from their first cell to their last, and say what their last cells print."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import dpx

NOTEBOOKS = sorted((Path(dpx.__file__).parent / "docs" / "notebooks").glob("*.ipynb"))


def test_every_notebook_is_there_and_is_a_page():
    assert [path.stem for path in NOTEBOOKS] == ["equinox", "fine_tuning_by_config", "flax_nnx", "plain_jax"]
    listed = (Path(dpx.__file__).parent / "docs" / "notebooks.md").read_text().splitlines()
    assert [path.stem for path in NOTEBOOKS if f"notebooks/{path.stem}" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, capsys):
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), str(path), "exec"), names)
    said = capsys.readouterr().out
    assert ("dp {" if path.stem == "fine_tuning_by_config" else "dp_by_user_loop {}") in said
