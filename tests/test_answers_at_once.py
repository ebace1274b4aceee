"""A typing error, `--help` and `--cfg job` are answered with little more than Hydra itself."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dpx.config.hydra_version import VERSION_BASE
from tests.processes import environment

CONF = Path(__file__).parents[1] / "conf"
COMMANDS = {"a typing error": ["modle=tiny"], "help": ["--help"], "the config": ["--cfg", "job"]}
HEAVY = {"scipy", "jax", "jaxlib", "optax", "flax", "tensorboard", "tensorboardX", "dp_accounting", "beartype", "jaxtyping", "tokenizers"}


def _imported(arguments: list[str], folder: Path) -> set[str]:
    """The modules that `python -m dpx` imports, which Python itself lists."""
    line = [sys.executable, "-X", "importtime", "-m", "dpx", *arguments]
    told = subprocess.run(line, env=environment(), cwd=folder, capture_output=True, text=True).stderr
    return {line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_an_answer_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    imported = _imported(arguments, tmp_path)
    assert "hydra.main" in imported
    assert {name for name in imported if name.partition(".")[0] in HEAVY} == set()
    # The declarations, and with them whatever a job imports.
    assert not {"dpx.config.experiment", "dpx.job", "dpx.launch.sweep"} & imported
    assert list(tmp_path.iterdir()) == []


REFERENCE = f"""
import hydra, numpy, omegaconf
with hydra.initialize_config_dir({str(CONF)!r}, **{VERSION_BASE!r}):
    hydra.compose("config")
"""


def _processor_seconds(line: list[str], folder: Path) -> float:
    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = used()
    subprocess.run([sys.executable, *line], env=environment(), cwd=folder, capture_output=True)
    return used() - before


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_an_answer_takes_at_most_1_6_times_what_hydra_takes(arguments: list[str], tmp_path: Path) -> None:
    """Side by side, and the least of seven each: other processes only add."""
    pairs = [(_processor_seconds(["-m", "dpx", *arguments], tmp_path), _processor_seconds(["-c", REFERENCE], tmp_path)) for _ in range(7)]
    ours, reference = (min(times) for times in zip(*pairs, strict=True))
    print(f"{' '.join(arguments)}: {ours:.2f} s against {reference:.2f} s")
    assert ours <= 1.6 * reference
