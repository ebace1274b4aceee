"""One run in two processes is the run of one: the same draws, noise and charges, and the same parameters to float32's rounding."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from dpx.audit.canaries import COINS
from dpx.audit.in_run import VERDICT
from dpx.files import weights
from dpx.files.orbax_checkpoints import on_host, released
from dpx.files.results import read_results
from dpx.privacy.hash_chain import Chain
from dpx.privacy.ledger import Ledger
from tests.chain.conftest import node
from tests.processes import environment, micro_run

STEPS = 4


def several(folder: Path, count: int, *more: str, steps: int = STEPS, module: str = "dpx", **variables: str) -> "subprocess.Popen[str]":
    """Starts `count` processes of one run; `module` takes the place of dpx."""
    overrides = [*micro_run(steps), "seed=1", "mesh=data_fsdp", "microbatch=2", *more]
    return launched(folder, count, *overrides, module=module, **variables)


def launched(folder: Path, count: int, *overrides: str, module: str = "dpx", **variables: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    started = [sys.executable, "-m", "dpx.processes.launch", "-n", str(count)]
    if module != "dpx":
        code = f"import sys; from dpx.processes.launch import launch; sys.exit(launch({count}, sys.argv[1:], '{module}'))"
        started = [sys.executable, "-c", code]
    variables = environment(COLUMNS="160", **variables)
    return subprocess.Popen([*started, *overrides], cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(run: "subprocess.Popen[str]", code: int = 0, within_s: float = 1200) -> str:
    try:
        out, errors = run.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        run.terminate()
        raise
    assert run.returncode == code, out[-2000:] + errors[-3000:]
    return errors + out


def outcome(folder: Path, name: str = "main") -> tuple[dict[str, np.ndarray], dict, Ledger, Path]:
    (run,) = (path for path in (folder / "outputs").glob(f"{name}-*"))
    stated = json.loads((run / "release/privacy.json").read_text())
    return weights.by_path(released(run / "release/params")), stated, Ledger(run / "private/ledger"), run


# Other meshes are slow: they compile longer.
FOUR_DEVICES = ("mesh.data=2", "mesh.simulated_devices=4")


def test_two_processes_train_the_run_of_one(tmp_path):
    for count in (1, 2):
        # Process 1 of two is watched, and their steps are measured.
        more = ["profile=steps"] if count > 1 else []
        run = several(tmp_path / str(count), count, *more, *FOUR_DEVICES, module="tests.several.faulty", DPX_FAULT="watched")
        ended(run)
    (one, one_stated, one_ledger, other), (two, two_stated, two_ledger, run) = (outcome(tmp_path / str(count)) for count in (1, 2))
    assert one.keys() == two.keys()
    for path in one:
        np.testing.assert_allclose(two[path], one[path], atol=1e-6)
    assert charges(two_ledger) == charges(one_ledger) and len(charges(two_ledger)) == STEPS
    assert two_stated.keys() == one_stated.keys() and two_stated["reasons"] == one_stated["reasons"]
    require_same_draws(run, other, STEPS)
    two_results, one_results = (read_results(folder / "private") for folder in (run, other))
    assert two_results.heldout == pytest.approx(one_results.heldout, abs=1e-5) and two_results.baselines == one_results.baselines
    shares = [{name: share for name, share in line.items() if name.startswith("profile/")} for line in measured(run)]
    assert [sum(each.values()) - each["profile/seconds"] for each in shares] == pytest.approx([1] * STEPS)
    assert max(each["profile/collectives"] for each in shares) > 0 < max(each["profile/agreement"] for each in shares)
    places = [run / "private" / "checkpoints", run / "release" / "params"]
    changed = [Path(line) for line in (tmp_path / "2" / "changed").read_text().splitlines()]
    inside = [path for path in changed if path.is_relative_to(tmp_path)]
    assert inside and all(any(path.is_relative_to(place) for place in places) for path in inside)


def charges(ledger: Ledger) -> list:
    return [(step, dataclasses.replace(entry, epoch_name="")) for step, entry in ledger.entries()]


def measured(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "private/metrics.jsonl").read_text().splitlines()]


def require_same_draws(run: Path, other: Path, steps: int, counted: tuple[str, ...] = ("train/examples", "train/tokens")) -> None:
    """Each step drew as many examples and tokens in both runs, with one mean loss to float32's rounding."""
    lines = [measured(folder) for folder in (run, other)]
    found, expected = ([[line[name] for name in ("step", *counted)] for line in each] for each in lines)
    assert found == expected and len(found) == steps
    losses = [[line["train/loss"] for line in each] for each in lines]
    assert losses[0] == pytest.approx(losses[1], abs=5e-5)


def worker_of(launcher: int, index: int) -> int:
    """The process that works as number `index`, below its supervisor, below `launcher`."""
    for supervisor in children(launcher):
        if f"JAX_PROCESS_ID={index}" in Path(f"/proc/{supervisor}/environ").read_text().split("\0"):
            return next(iter(children(supervisor)), 0)
    return 0


def children(parent: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def wait_for_step(folder: Path, step: int, name: str = "main") -> None:
    until = time.monotonic() + 1200
    while not any(f'"step": {step},' in path.read_text() for path in folder.glob(f"outputs/{name}-*/private/metrics.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)


BANDED = ["mechanism=banded", "sampler=cyclic_poisson", "accountant=pld", "privacy.adjacency=zero_out"]
LENT = {"module": "tests.several.faulty", "DPX_FAULT": "without_library"}
VARIANTS = {
    "tensor": ["mesh=data_fsdp_tensor"],
    "data": ["mesh=cpu8"],
    "adapters": ["train=lora"],
    "per layer": ["clip=per_layer"],
    "adaptive": ["clip=quantile"],
    "units": ["privacy.unit=document", "privacy.unit_mode=sample_units", "privacy.rows_per_unit_max=2"],
    "fixed size": ["sampler=fixed_size", "privacy.adjacency=replace_one"],
    "shuffled": ["sampler=shuffled", "accountant=deterministic"],
    # Each process holds a part of each parameter, and draws its noise alone.
    "integers": ["mechanism=discrete_gaussian", "mesh.data=1", "mesh.fsdp=8"],
    "low rank": ["mechanism=rgp", "mechanism.rank=2"],
    "canaries": [
        *("audit=canaries", "audit.gradients=40", "audit.sequences=8", "audit.masks=2", "audit.primary.guesses=20"),
        *("accountant=pld", "train=lora"),
    ],
    "banded": BANDED,
    "forward": [
        *("data=synthetic_labels", "data.source.examples=400", "task=classification", "train=last_layer", "batch_schedule.size=24"),
        *("mechanism=dp_fp", "mechanism.micro_batches=3", "accountant=pld", "privacy.adjacency=zero_out_text"),
    ],
}


def trained(folder: Path, count: int, name: str) -> Path:
    """The folder in which `count` processes made a run of this kind."""
    lent = LENT if name == "banded" else {}
    ended(several(folder, count, "batch_schedule.size=64", *VARIANTS[name], steps=20, **lent))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of each kind in one process, made when it is first asked for."""
    return functools.cache(lambda name: trained(tmp_path_factory.mktemp("alone"), 1, name))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_is_the_same_in_several_processes(tmp_path, alone, name, count):
    folders = (alone(name), trained(tmp_path, count, name))
    (one, _, one_ledger, other), (two, _, two_ledger, run) = map(outcome, folders)
    assert one.keys() == two.keys() and charges(two_ledger) == charges(one_ledger)
    # One process that trains the last layer alone reads the body's outputs, and no tokens.
    require_same_draws(run, other, 20, *([("train/examples",)] if name == "forward" else []))
    for path in one:
        np.testing.assert_allclose(two[path], one[path], atol=1e-5)
    if name == "banded":
        require_same_noise(run, other)
    if name == "canaries":
        found = [[json.loads((folder / "private" / file).read_text()) for file in (COINS, VERDICT)] for folder in (run, other)]
        assert found[0] == found[1] and "one_run" in json.dumps(found[0])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_correlated_noise_goes_on_where_a_killed_run_in_two_processes_had_left_it(tmp_path):
    keep = [*BANDED, *TWO, "seed=1", "schedule.checkpoint_every=5"]
    ended(several(tmp_path / "1", 1, *keep, steps=20, **LENT))
    run = several(tmp_path / "2", 2, *keep, steps=20, **LENT)
    wait_for_step(tmp_path / "2", 12)
    os.kill(worker_of(run.pid, 1), signal.SIGKILL)
    ended(run, 75)
    assert "resuming from step 10" in ended(several(tmp_path / "2", 2, *keep, steps=20, **LENT))
    (*_, other), (*_, ledger, run_folder) = (outcome(tmp_path / count) for count in "12")
    assert [epoch.number for epoch in ledger.noise_epochs] == [0]
    require_same_noise(run_folder, other)


def require_same_noise(run: Path, other: Path) -> None:
    """The noise of the last steps, which correlated noise keeps, is the same to the bit in both runs."""
    found, expected = (weights.by_path(on_host(folder / "private/checkpoints/20", "noise")) for folder in (run, other))
    assert found.keys() == expected.keys() and all(leaf.any() and leaf.shape[0] == 3 for leaf in found.values())
    assert all(np.array_equal(found[path], expected[path]) for path in found)


# Two devices are enough for a fault, and their programs are over sooner.
TWO = ["mesh=cpu8", "mesh.data=2", "mesh.simulated_devices=2", "seed=null"]


@pytest.mark.slow
def test_a_signal_to_any_process_stops_all(tmp_path):
    run = several(tmp_path, 2, *TWO, steps=4000)
    wait_for_step(tmp_path, 5)
    os.kill(worker_of(run.pid, 1), signal.SIGTERM)
    assert "interrupted after step" in ended(run, 143)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_ends_all_in_one_line_and_the_same_command_resumes(tmp_path, index):
    """With a secret seed, so that a wrong key would show: the ledger says whether a step was charged again."""
    keep = ["seed=null", "schedule.checkpoint_every=5", "model.layers=2"]
    run = several(tmp_path, 2, *keep, steps=400)
    wait_for_step(tmp_path, 20)
    os.kill(worker_of(run.pid, index), signal.SIGKILL)
    errors = ended(run, 75)
    assert "error: process lost" in errors and "Traceback" not in errors
    again = several(tmp_path, 2, *keep, steps=400)
    wait_for_step(tmp_path, 60)
    again.send_signal(signal.SIGTERM)
    assert "interrupted after step" in ended(again, 143)
    folder = next((tmp_path / "outputs").glob("main-*"))
    ledger = Ledger(folder / "private/ledger")
    assert [epoch.number for epoch in ledger.noise_epochs] == [0], "another sum under the first key opens a new epoch"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_process_zero_measures_the_microbatch_of_all(tmp_path):
    """The other process cannot measure; before the first step both compare what they use."""
    keep = {"module": "tests.several.faulty", "DPX_FAULT": "no_microbatch", "DPX_CACHE": str(tmp_path / "cache")}
    ended(several(tmp_path, 2, *TWO, "microbatch=auto", **keep))
    *_, ledger, run = outcome(tmp_path)
    found = json.loads((run / "private/microbatch.json").read_text())["microbatch"]
    assert ledger.noise_epochs[0].fingerprint["microbatch"] == found and len(charges(ledger)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], BANDED], ids=["dp_sgd", "banded"])
def test_a_process_that_holds_another_sum_meets_a_fresh_key_and_another_draw(tmp_path, more):
    run = several(tmp_path, 2, *TWO, *more, module="tests.several.faulty", DPX_FAULT="another_sum,without_library")
    assert "fresh noise from there on, charged in addition" in ended(run)
    _, stated, ledger, _ = outcome(tmp_path)
    assert [(epoch.number, epoch.from_step) for epoch in ledger.noise_epochs] == [(0, 0), (1, 2)]
    assert ledger.noise_epochs[1].why == "step 3: devices hold different sums"
    assert [(step, entry.epoch) for step, entry in ledger.entries()] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1)]
    first, second = ledger.noise_epochs
    assert first.secret_tag != second.secret_tag and ledger.sum_of(first.name, 2) is None and ledger.sum_of(second.name, 2) is not None
    assert stated["spent"]["charged_steps"] == STEPS + 1


@pytest.mark.slow
def test_a_process_of_another_version_is_refused_before_the_first_step(tmp_path):
    errors = ended(several(tmp_path, 2, *TWO, module="tests.several.faulty", DPX_FAULT="another_version"), 2)
    assert "error: process 1: opened another run than process 0: its version of dpx" in errors and "Traceback" not in errors
    assert not list((tmp_path / "outputs").glob("main-*/private/ledger"))


@pytest.mark.slow
def test_a_process_that_finds_other_canaries_is_refused_before_the_first_step(tmp_path):
    audit = ["audit=canaries", "audit.gradients=40", "audit.primary.guesses=20"]
    errors = ended(several(tmp_path, 2, *TWO, *audit, module="tests.several.faulty", DPX_FAULT="other_canaries"), 2)
    assert "error: process 1: starts otherwise than process 0" in errors and "Traceback" not in errors
    (found,) = tmp_path.glob("outputs/main-*/private/ledger")
    assert not list(Ledger(found).entries())


@pytest.mark.slow
def test_a_slow_process_is_waited_for_and_a_stopped_one_is_ended_at_its_deadline(tmp_path):
    """The peers of a stopped one find it gone after a heartbeat; its own supervising process ends it at the deadline."""
    run = several(tmp_path, 2, *TWO, "mesh.deadline_s=30", steps=4000)
    wait_for_step(tmp_path, 5)
    worker = worker_of(run.pid, 1)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(worker, number)
        time.sleep(5)
    wait_for_step(tmp_path, len(measured(next(tmp_path.glob("outputs/main-*")))) + 5)
    os.kill(worker, signal.SIGSTOP)
    errors = ended(run, 75)
    assert "error: no progress: this process did nothing for 30 s (mesh.deadline_s), so it was ended. Run the same command" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_job_that_lost_a_process_starts_again_by_itself(tmp_path):
    run = several(tmp_path, 2, *TWO, "mesh.restarts=1", "schedule.checkpoint_every=5", steps=60)
    wait_for_step(tmp_path, 12)
    os.kill(worker_of(run.pid, 1), signal.SIGKILL)
    errors = ended(run)
    assert errors.count("starting again from the last checkpoint: restart 1 of 1") == 2 and "resuming from step" in errors
    _, stated, ledger, _ = outcome(tmp_path)
    assert [step for step, _ in ledger.entries()] == list(range(60)) and stated["spent"]["charged_steps"] == 60


@pytest.mark.slow
def test_a_supervising_process_that_is_killed_ends_the_job(tmp_path):
    run = several(tmp_path, 2, *TWO, steps=4000)
    wait_for_step(tmp_path, 5)
    workers = [worker_of(run.pid, index) for index in (0, 1)]
    supervisor = next(one for one in children(run.pid) if workers[1] in children(one))
    os.kill(supervisor, signal.SIGKILL)
    assert "error: process lost" in ended(run, 75)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def chain_of_two(folder: Path, count: int) -> "subprocess.Popen[str]":
    """Starts the chain of tests/chain, private pre-training and a classifier, in `count` processes."""
    stages = node()
    stages["common"]["options"]["mesh"] = "cpu8"
    stages["common"]["values"] |= {"mesh": {"data": 2, "simulated_devices": 2}, "seed": 1}
    # Without noise some gradients are rounding alone (the bias of attention's keys moves no output); a tiny eps would make steps of them.
    stages["stages"]["classify"]["values"] |= {"steps": 20, "optimizer": {"eps": 1.0e-3}}
    recipe = {"defaults": [{"override /job": "chain"}, "_self_"], "name": "two", "chain": stages}
    (folder / "mine" / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "mine" / "experiment" / "two.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    return launched(folder, count, "+experiment=two", "--config-dir", str(folder / "mine"))


def require_same_stages(folder: Path) -> None:
    for stage in ("two_pretrain", "two_classify"):
        (one, stated, *_), (two, two_stated, *_) = (outcome(folder / count, stage) for count in "12")
        assert one.keys() == two.keys() and two_stated["guarantee"] == stated["guarantee"]
        for path in one:
            np.testing.assert_allclose(two[path], one[path], atol=1e-6, rtol=0, err_msg=f"{stage}: {path}")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_chain_in_two_processes_is_that_of_one_and_goes_on_after_a_loss(tmp_path):
    ended(chain_of_two(tmp_path / "1", 1))
    run = chain_of_two(tmp_path / "2", 2)
    wait_for_step(tmp_path / "2", 3, "two_classify")
    os.kill(worker_of(run.pid, 1), signal.SIGKILL)
    told = ended(run, 75)
    assert "error: process lost" in told and "Traceback" not in told
    assert "stage pretrain: finished before" in ended(chain_of_two(tmp_path / "2", 2))
    require_same_stages(tmp_path)
    claims = [json.loads(next(tmp_path.glob(f"{count}/outputs/two-*/release/chain.json")).read_text())["claim"] for count in "12"]
    assert claims[0] == claims[1]


FSDP = [*TWO, "mesh.data=1", "mesh.fsdp=2"]
RESUMED = {"1 to 2": (1, TWO, 2, TWO), "2 to 1": (2, TWO, 1, TWO), "another mesh": (2, TWO, 2, FSDP), "alone on it": (1, TWO, 1, FSDP)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_in_another_number_of_processes_or_on_another_mesh(tmp_path, name):
    """Where a repeated step has the same sum, it has the same key; where it has another one, everything after it has a fresh key."""
    first, mesh, then, other = RESUMED[name]
    run = several(tmp_path, first, *mesh, "schedule.checkpoint_every=5", steps=24)
    wait_for_step(tmp_path, 12)
    os.kill(worker_of(run.pid, 0) if first > 1 else children(run.pid)[0], signal.SIGKILL)
    run.communicate(timeout=1200)
    harmed = None
    if name == "2 to 1":
        harmed = damage_a_shard(next(tmp_path.glob("outputs/main-*/private/checkpoints")))
    told = ended(several(tmp_path, then, *other, "schedule.checkpoint_every=5", steps=24))
    _, stated, ledger, folder = outcome(tmp_path)
    one_sum_a_key(folder)
    charged = [(step, entry.epoch) for step, entry in ledger.entries()]
    begins = [epoch.from_step for epoch in ledger.noise_epochs]
    assert begins[0] == 0 and all("another sum than before" in epoch.why for epoch in ledger.noise_epochs[1:])
    assert [step for step, epoch in charged if epoch == len(begins) - 1] == list(range(begins[-1], 24))
    assert {step for step, _ in charged} == set(range(24)) and stated["spent"]["charged_steps"] == len(charged)
    assert len({epoch.secret_tag for epoch in ledger.noise_epochs}) == len(begins)
    assert harmed is None or (harmed.is_dir() and f"moved to {harmed.name}" in told)


def damage_a_shard(checkpoints: Path) -> Path:
    """Flips a bit of what process 1 wrote to the newest checkpoint; returns the checkpoint's place once it is moved aside."""
    newest = max((path for path in checkpoints.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    shard = max(newest.rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return checkpoints / f"damaged-{newest.name}"


def one_sum_a_key(run: Path) -> int:
    """The number of keys of noise that were used in `run`; each one, by its noise epoch and step, had its noise added to one sum alone."""
    sums = [line for line in Chain(run / "private/ledger").lines if line["kind"] == "sum"]
    keys = [(line["epoch_name"], line["step"]) for line in sums]
    assert len(keys) == len(set(keys))
    return len(keys)
