"""Every process of a job knows its number, how many there are and where process 0 is; where it cannot know, nothing starts."""

import contextlib
import re
import subprocess
from pathlib import Path

import jax
import pytest
import yaml

from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.train import Train
from dpx.launch import point
from dpx.processes import Team
from dpx.processes.mesh import Mesh
from dpx.processes.place import ALONE, Place, place, require_processes
from dpx.training import opening
from dpx.training.opening import open_run
from dpx.training.step import make_step

from ..composed import point_at
from ..training.conftest import declare, micro  # noqa: F401

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "5000"}
FOUND = [
    ({}, ALONE),
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ALONE),
    ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "1", "TPU_WORKER_HOSTNAMES": "host-0"}, ALONE),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1"}, ALONE),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, Place(1, 2, "a:1")),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JOB_COMPLETION_INDEX": "7"}, Place(7, 8, "a:1")),
    (SLURM | {"SLURM_STEP_NODELIST": "gpu[007-009,12]"}, Place(3, 4, "gpu007:62344")),
    (SLURM | {"SLURM_STEP_NODELIST": "gpu[7,12]"}, Place(3, 4, "gpu7:62344")),
    (SLURM | {"SLURM_STEP_NODELIST": "one,two[1-3]"}, Place(3, 4, "one:62344")),
    (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Place(3, 4, "a:1")),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "JAX_COORDINATOR_ADDRESS": "a:1"}, Place(0, 2, "a:1")),
    ({"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}, Place(1, 2, "host-0:8476")),
    ({"TPU_PROCESS_ADDRESSES": "host-0:90,host-1:90", "TPU_WORKER_ID": "0"}, Place(0, 2, "host-0:8476")),
]
REFUSED = [
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"},
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2"},
    {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
    {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"PMI_SIZE": "3"},
    {"WORLD_SIZE": "2", "RANK": "1"},
    {"TPU_WORKER_HOSTNAMES": "host-0,host-1,host-2"},
]


@pytest.mark.parametrize(("variables", "expected"), FOUND, ids=lambda value: ",".join(value) if isinstance(value, dict) else "")
def test_the_variables_of_each_launcher(variables, expected):
    assert place(variables) == expected and expected.is_owner == (expected.index == 0)


@pytest.mark.parametrize("variables", REFUSED, ids=lambda variables: ",".join(variables))
def test_a_process_that_cannot_know_its_place_is_refused_in_one_line(variables):
    with pytest.raises(ConfigError, match="Set JAX_COORDINATOR_ADDRESS=.*dpx-launch or srun") as caught:
        place(variables)
    assert "\n" not in str(caught.value) and str(caught.value).partition("=")[0] in variables


def mesh_of(**more):
    return Mesh(name="m", flops_per_s=1.0, memory_bytes=1, **more)


REFUSED_FOR_ONE = [
    ({"processes": 4}, r"^mesh.processes=4: this job has 1 process. Start it with dpx-launch -n 4"),
    ({"deadline_s": 60.0}, r"^mesh.deadline_s=60: one process alone"),
    ({"restarts": 2}, r"^mesh.restarts=2: one process alone"),
]


@pytest.mark.parametrize(("more", "reason"), REFUSED_FOR_ONE, ids=["number", "deadline", "restarts"])
def test_one_process_is_not_the_number_declared_and_is_not_supervised(more, reason):
    require_processes(mesh_of(), 3)
    require_processes(mesh_of(**more), 4)
    with pytest.raises(ConfigError, match=reason) as caught:
        require_processes(mesh_of(**more), 1)
    assert "\n" not in str(caught.value)


class Device:
    def __init__(self, process_index: int):
        self.process_index = process_index


def test_each_process_owns_as_many_devices_side_by_side():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    devices = [Device(number % 2) for number in range(10)]
    assert [one.process_index for one in mesh._used(devices, 2)] == [0] * 4 + [1] * 4
    assert mesh.simulated_here(2) is None and mesh_of(simulated_devices=8).simulated_here(2) == 4
    cases = ((3, [0, 1, 2] * 3, "cannot be shared equally by 3"), (8, range(8), "layers undivided"), (2, [0] * 7 + [1], "one has 1"))
    for processes, owners, reason in cases:
        with pytest.raises(ConfigError, match=reason):
            mesh._used([Device(owner) for owner in owners], processes)


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """A run folder that is not there yet, and data that must not be prepared."""
    monkeypatch.setattr(opening, "prepare", lambda *_: pytest.fail("the data was prepared"))
    yield RunFolder(tmp_path / "run", "name: micro\n")
    assert list(tmp_path.iterdir()) == []


def begin_in_every_way(experiment, folder):
    for begin in (lambda: Train()(experiment, folder), lambda: contextlib.ExitStack().enter_context(open_run(experiment, folder))):
        with pytest.raises(ConfigError, match="each process of one job .* Start the processes by dpx-launch") as caught:
            begin()
        assert "\n" not in str(caught.value)


def test_a_program_that_was_started_several_times_does_not_train(untouched, monkeypatch):
    for name, value in {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    begin_in_every_way(declare(), untouched)


def test_nor_one_that_connected_its_processes_by_itself(micro, untouched, monkeypatch):  # noqa: F811
    experiment, objective = micro
    devices = experiment.mesh.make()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"^jax.process_count\(\)=2: each process"):
        make_step(experiment.one_step, objective, devices, 4)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    begin_in_every_way(experiment, untouched)


def test_what_one_process_alone_does_is_refused_in_several(untouched, monkeypatch):
    both = Team(Place(0, 2, "a:1"))
    for name, value in {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    for module in (point, opening):
        monkeypatch.setattr(module, "team", lambda: both)
    for job in ("evaluate", "export", "predict", "audit", "benchmark"):
        with pytest.raises(ConfigError, match=f"^job={job}: is done by one process, and this job has 2. Start one process for it"):
            point_at(Path("run"), job).require_alone()


LAUNCH = Path(__file__).resolve().parents[2] / "experiments" / "launch"
SIZES = ("nodes", "ntasks-per-node", "gpus-per-node")


def devices_of(line: list[str]) -> int:
    """The devices of the mesh of a command line."""
    mesh = recipes.compose(line).mesh
    return mesh.data * mesh.fsdp * mesh.tensor


def test_the_examples_for_slurm_and_kubernetes_are_valid():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True)
    script = (LAUNCH / "slurm.sh").read_text()
    nodes, tasks, gpus = (int(re.findall(rf"^#SBATCH --{name}=(\d+)$", script, re.M)[0]) for name in SIZES)
    assert (
        script.rstrip().endswith('python -m dpx "$@"')
        and devices_of(re.findall(r"sbatch \S+slurm.sh (.+)", script)[0].split()) == nodes * gpus
    )
    assert tasks == 1
    pods = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    assert place(variables) == Place(1, pods["completions"], variables["JAX_COORDINATOR_ADDRESS"]) and pods["completionMode"] == "Indexed"
    assert container["command"][:3] == ["python", "-m", "dpx"]
    assert devices_of(container["command"][3:]) == pods["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
