"""A run is trained by one process: every road to its rows and its noise is closed in one of several, before anything is written."""

import contextlib
import socket
import subprocess
import sys

import jax
import pytest

from dpx.declaration import ConfigError
from dpx.job.train import Train
from dpx.one_process import require_one_process
from dpx.run_folder import RunFolder
from dpx.training import opening
from dpx.training.opening import open_run
from dpx.training.step import make_step
from tests.processes import environment

from .conftest import declare

SEVERAL = [
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"},
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2"},
    {"JAX_NUM_PROCESSES": "2"},
    {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2"},
    {"PMI_SIZE": "3"},
    {"WORLD_SIZE": "2", "RANK": "1"},
    {"TPU_WORKER_HOSTNAMES": "host-0,host-1,host-2,host-3,host-4"},
]
# One task of a larger allocation, and launchers that start one process.
ONE = [
    {},
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    {"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "1", "TPU_WORKER_HOSTNAMES": "host-0"},
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "1"},
]


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """A run folder that is not there yet, and data that must not be prepared."""
    monkeypatch.setattr(opening, "prepare", lambda *_: pytest.fail("the data was prepared"))
    yield RunFolder(tmp_path / "run", "name: micro\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variables", SEVERAL, ids=lambda variables: ",".join(variables))
def test_a_launcher_of_several_processes_is_refused_in_one_line(variables, untouched, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for begin in (lambda: Train()(declare(), untouched), lambda: contextlib.ExitStack().enter_context(open_run(declare(), untouched))):
        with pytest.raises(ConfigError, match=r"each process of one job .* Start one process, such as srun --ntasks=1") as caught:
            begin()
        assert "\n" not in str(caught.value) and str(caught.value).partition("=")[0] in variables


@pytest.mark.parametrize("variables", ONE, ids=lambda variables: ",".join(variables))
def test_one_process_may_begin_whatever_the_allocation(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    require_one_process()


def test_whatever_draws_rows_or_noise_is_refused_where_jax_runs_in_several(micro, untouched, monkeypatch):
    """Also in a program that starts `jax.distributed` by itself, which no variable tells."""
    experiment, objective = micro
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"^jax.process_count\(\)=2: each process"):
        make_step(experiment, objective, experiment.mesh.make(), 4)
    with pytest.raises(ConfigError, match=r"^jax.process_count\(\)=2: "), open_run(experiment, untouched):
        pass
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"^jax.process_count\(\)=2: "):
        Train()(experiment, untouched)


PROGRAM = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from dpx.declaration import ConfigError
from dpx.run_folder import RunFolder
from dpx.job.train import Train
from dpx.training.opening import open_run
from pathlib import Path
from tests.training.conftest import declare
for begin in (lambda folder: Train()(declare(), folder), lambda folder: open_run(declare(), folder).__enter__()):
    try:
        begin(RunFolder(Path(sys.argv[3]) / "run", ""))
    except ConfigError as refused:
        print(refused)
"""


@pytest.mark.slow
def test_two_processes_of_jax_are_both_refused(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, address]
    started = [
        subprocess.Popen([*command, str(number), str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True) for number in (0, 1)
    ]
    for one in started:
        told, _ = one.communicate(timeout=300)
        assert one.returncode == 0 and told.splitlines() == [told.splitlines()[0]] * 2
        assert told.startswith("jax.process_count()=2: each process of one job")
    assert list(tmp_path.iterdir()) == []
