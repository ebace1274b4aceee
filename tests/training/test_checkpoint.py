"""Checkpoints are loaded only where they hold what was saved: every byte of one is changed in turn, or cut, or lost."""

import json
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx.files import orbax_checkpoints
from dpx.files.orbax_checkpoints import Checkpoints, Damaged, State, export, on_host, released
from dpx.files.weights import METADATA, facts

FACTS = {"ledger": {"chain": "a", "position": 3, "digest": "00"}, "epoch": "b"}
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state_of(step: int) -> State:
    """One of every part and width that a run's state may hold."""
    draw = np.random.default_rng(step)
    params = {"kernel": draw.normal(size=(3, 5)).astype(np.float32), "half": jnp.asarray(draw.normal(size=7), jnp.bfloat16)}
    moments = (np.int32(step), {"kernel": np.ones((3, 5), np.float32)}, np.arange(6, dtype=np.int8), np.asarray([True, False]), ())
    return jax.device_put(State(params, moments, np.float32(step), {"kernel": np.full((2, 3, 5), step, np.float32)}), DEVICE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, 3)
    for step in (2, 4):
        checkpoints.save(step, state_of(step), FACTS)
    checkpoints.close()
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def are_equal(first: State, second: State) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in leaves)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_saved_is_loaded_with_its_facts(saved):
    found, damaged = Checkpoints(saved, 3).newest_whole(state_of(0))
    assert found is not None and (found.steps_done, damaged) == (4, []) and are_equal(found.state, state_of(4))
    assert {name: found.facts[name] for name in FACTS} == FACTS
    assert Checkpoints(saved, 3).parts(4) == set(state_of(4).saved())


def test_a_flipped_bit_in_any_file_is_found_before_the_file_is_read_as_anything(saved, tmp_path, capfd):
    draw = np.random.default_rng(0)
    for number, file in enumerate(files_of(saved / "4")):
        copy, content = shutil.copytree(saved, tmp_path / str(number)), bytearray(file.read_bytes())
        content[int(draw.integers(0, len(content)))] ^= 1 << int(draw.integers(0, 8))
        (copy / file.relative_to(saved)).write_bytes(content)
        found, damaged = Checkpoints(copy, 3).newest_whole(state_of(0))
        assert found is not None and (found.steps_done, damaged) == (2, [4]), file
        assert are_equal(found.state, state_of(2))
    assert capfd.readouterr() == ("", ""), "no reader saw the damaged file"


@pytest.mark.parametrize("has_checksums_of_files", [True, False])
def test_values_are_held_against_their_own_checksum(copied, monkeypatch, has_checksums_of_files):
    """Also after a kill between the commit and the checksums of files; an example of bits that a file format does not check."""
    if not has_checksums_of_files:
        (copied / "4" / orbax_checkpoints.FILES).unlink()
        found, damaged = Checkpoints(copied, 3).newest_whole(state_of(0))
        assert found is not None and (found.steps_done, damaged) == (4, []) and are_equal(found.state, state_of(4))
    whole = orbax_checkpoints.ocp.load

    def other(place, abstract):
        found = whole(place, abstract)
        found["params"]["half"] = found["params"]["half"].at[3].multiply(-1) if place.endswith("4") else found["params"]["half"]
        return found

    monkeypatch.setattr(orbax_checkpoints.ocp, "load", other)
    found, damaged = Checkpoints(copied, 3).newest_whole(state_of(0))
    assert found is not None and (found.steps_done, damaged) == (2, [4])


@pytest.mark.parametrize(
    "harm", ["metadata lost", "metadata cut", "facts edited", "facts removed", "file lost", "file cut", "emptied", "of another step"]
)
def test_a_damaged_checkpoint_is_passed_over_moved_aside_and_saved_again(copied, harm):
    metadata, largest = copied / "4" / METADATA, max(files_of(copied / "4" / "state"), key=lambda path: path.stat().st_size)
    if harm == "metadata lost":
        metadata.unlink()
    elif harm == "metadata cut":
        metadata.write_bytes(metadata.read_bytes()[:-40])
    elif harm.startswith("facts"):
        held = json.loads(metadata.read_text())
        held["custom_metadata"] = None if harm == "facts removed" else held["custom_metadata"] | {"epoch": "c"}
        metadata.write_text(json.dumps(held))
    elif harm == "file lost":
        largest.unlink()
    elif harm == "file cut":
        largest.write_bytes(largest.read_bytes()[:-9])
    elif harm == "emptied":
        shutil.rmtree(copied / "4")
        (copied / "4").mkdir()
    else:
        for name in ("state", orbax_checkpoints.FILES):
            source, target = copied / "2" / name, copied / "4" / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            shutil.copytree(source, target) if source.is_dir() else None
    checkpoints = Checkpoints(copied, 3)
    found, damaged = checkpoints.newest_whole(state_of(0))
    assert found is not None and (found.steps_done, damaged) == (2, [4])
    with pytest.raises(Damaged, match=r"checkpoints/4: this checkpoint is damaged\. Use one of \[2\]\.$"):
        checkpoints.load(4, state_of(0))
    with pytest.raises(ConfigError, match=r"checkpoints/4: this checkpoint is damaged\. Use one of \[2\]\.$"):
        on_host(copied / "4", "params")
    assert checkpoints.set_aside(4) == copied / "damaged-4" and checkpoints.steps == [2]
    checkpoints.save(4, state_of(4), FACTS)
    checkpoints.wait()
    assert checkpoints.steps == [2, 4] and are_equal(checkpoints.load(4, state_of(0)).state, state_of(4))
    assert checkpoints.set_aside(4) == copied / "damaged-4-2", "one that was moved aside before stays"
    checkpoints.close()
    assert (copied / "damaged-4").is_dir()


def test_where_the_machine_is_the_cause_no_checkpoint_is_called_damaged(copied, monkeypatch):
    def refused(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(orbax_checkpoints.ocp, "load", refused)
    with pytest.raises(ConfigError, match="checkpoints/4: could not be read") as caught:
        Checkpoints(copied, 3).newest_whole(state_of(0))
    assert not isinstance(caught.value, Damaged)


@pytest.fixture
def files_of_64_kib_at_most():
    """The operating system then answers a larger write as it answers where the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_told_in_one_line(tmp_path, files_of_64_kib_at_most):
    noise = np.random.default_rng(0).random((500, 500), np.float32)
    with pytest.raises(ConfigError, match="params: the disk is full, so the checkpoint was not written"):
        export(tmp_path / "params", {"kernel": noise}, {})


def test_a_device_without_memory_is_not_called_a_full_disk(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")

    monkeypatch.setattr(orbax_checkpoints.ocp, "save", refused)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        export(tmp_path / "params", {}, {})


def test_a_whole_checkpoint_of_another_form_is_not_called_damaged(saved):
    form = State({"kernel": np.zeros((3, 5), np.float32)}, state_of(0).moments, np.float32(0), state_of(0).noise)
    with pytest.raises(ConfigError, match="checkpoints/4: does not contain a state with the structure that this run needs") as caught:
        Checkpoints(saved, 3).newest_whole(jax.device_put(form, DEVICE))
    assert not isinstance(caught.value, Damaged)


def test_exported_parameters_are_held_against_their_checksums(tmp_path):
    params = {"layers": {"kernel": np.arange(6, dtype=np.float32)}}
    export(tmp_path / "frozen", params, facts(params, ()))
    for read in (released, on_host):
        assert np.array_equal(read(tmp_path / "frozen")["layers"]["kernel"], params["layers"]["kernel"])
    export(tmp_path / "frozen", {"layers": {"kernel": params["layers"]["kernel"] + 1}}, facts(params, ()))
    export(tmp_path / "bare", params, {})
    for place in ("frozen", "bare"):
        for read in (released, on_host):
            with pytest.raises(ConfigError, match=f"{place}: contains other weights than the run released in this folder"):
                read(tmp_path / place)
