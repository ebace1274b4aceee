"""`job=audit`: what it writes and where, when it fails, and that it is not rolled again."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.mechanism import noise

ROOT = Path(__file__).parents[2]


def audit(path, *overrides):
    experiment, job = config.build(recipes.compose(["job=audit", *overrides]))
    job(experiment, RunFolder(path))


def test_a_sound_mechanism_passes_and_its_coins_stay_private(tmp_path, capsys):
    audit(tmp_path)
    released = json.loads((tmp_path / "release" / "audit.json").read_text())
    private = json.loads((tmp_path / "private" / "audit.json").read_text())
    assert released["passes"] and released["noise"]["passes"] and released["setting"]["canaries"] == 20_000
    assert set(private) - set(released) == {"scores"}
    assert np.load(tmp_path / "private" / "audit_coins.npy").dtype == bool
    assert sorted(path.name for path in (tmp_path / "release").iterdir()) == ["audit.json"]
    assert "lower bounds on epsilon" in capsys.readouterr().out


def test_the_same_audit_again_is_the_same(tmp_path):
    for _ in range(2):
        audit(tmp_path)
        (tmp_path / "private" / "audit.json").rename(tmp_path / f"{len(list(tmp_path.glob('*.json')))}.json")
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()


def test_half_the_noise_fails_in_one_line_after_writing(tmp_path, monkeypatch):
    sound = noise.add_noise
    monkeypatch.setattr(noise, "add_noise", lambda total, keys, deviation: sound(total, keys, deviation * jnp.float32(0.5)))
    with pytest.raises(ConfigError, match=r"^audit: the lower bound .* exceeds the claim") as caught:
        audit(tmp_path, "seed=1")
    assert "\n" not in str(caught.value)
    assert not json.loads((tmp_path / "release" / "audit.json").read_text())["passes"]


def test_noise_of_another_variance_fails(tmp_path, monkeypatch):
    sound = noise.add_noise
    monkeypatch.setattr(noise, "add_noise", lambda total, keys, deviation: sound(total, keys, deviation * jnp.float32(1.2)))
    with pytest.raises(ConfigError, match="^audit: the released noise does not have the stated variance"):
        audit(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        ["clip=per_layer"],
        pytest.param(["clip=normalised"], marks=pytest.mark.slow),
        pytest.param(["clipping_method=ghost"], marks=pytest.mark.slow),
        pytest.param(["clipping_method=vmap", "mesh=data_fsdp"], marks=pytest.mark.slow),
    ],
)
def test_other_clips_and_methods_pass(tmp_path, overrides):
    audit(tmp_path, "seed=2", *overrides)


def test_plain_training_has_nothing_to_audit(tmp_path):
    with pytest.raises(ConfigError, match="^mechanism=none"):
        audit(tmp_path, "mechanism=none")


def test_an_odd_number_of_guesses_is_refused():
    with pytest.raises(ConfigError, match="guesses=3"):
        config.build(recipes.compose(["job=audit", "job.guesses=3"]))


def test_more_guesses_than_canaries_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="^job.guesses=400: there are only 100 canaries"):
        config.build(recipes.compose(["job=audit", "job.canaries=100"]))


@pytest.mark.slow
def test_a_failed_audit_leaves_with_code_2(tmp_path):
    """A claim of epsilon 2 for data that gives every coin away: the primary is fed the coins through a clip that is off."""
    code = (
        "import sys, jax.numpy as jnp\n"
        "from dpx.mechanism.clip import Flat\n"
        "Flat.weights = lambda *_: jnp.ones_like\n"
        f"sys.argv = ['dpx', 'job=audit', 'hydra.run.dir={tmp_path}/run']\n"
        "from dpx.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: audit: the lower bound")
