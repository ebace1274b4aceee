"""The root secret is durable, never shown, and its keys do not collide."""

import hashlib
import itertools
import os
import pickle
import stat

import numpy as np
import pytest

from dpx import randomness
from dpx.declaration import ConfigError
from dpx.randomness import BitStream, RootSecret


def test_created_secret_is_private_and_loads_back(tmp_path):
    created = RootSecret.create(tmp_path / "root_secret")
    assert stat.S_IMODE(os.stat(tmp_path / "root_secret").st_mode) == 0o600
    assert np.array_equal(RootSecret.load(tmp_path / "root_secret").key("noise", 3), created.key("noise", 3))
    assert os.listdir(tmp_path) == ["root_secret"]


def test_runs_of_tests_draw_secrets_of_their_folders(tmp_path):
    keys = []
    for name in ("one", "other", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        keys.append(tuple(RootSecret.create(tmp_path / name / "root_secret").key("x")))
        (tmp_path / name / "root_secret").unlink()
    assert len(set(keys)) == 3
    drawn = hashlib.sha256(f"{tmp_path.name.rstrip('0123456789')}/other/root_secret:1".encode()).digest()
    assert keys[1] == tuple(RootSecret(drawn).key("x"))


def test_a_secret_is_256_bits_of_the_operating_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(randomness.secrets, "token_bytes", lambda count: bytes(range(100, 100 + count)))
    RootSecret.create(tmp_path / "root_secret")
    assert (tmp_path / "root_secret").read_bytes() == bytes(range(100, 132))


def test_every_byte_of_the_secret_reaches_every_key():
    secrets = [RootSecret(bytes(32))] + [RootSecret(bytes(i) + b"\1" + bytes(31 - i)) for i in range(32)]
    for derive in (lambda s: s.key("x"), lambda s: s.generator("x").integers(1 << 60, size=2), lambda s: s.stream("x").words(2)):
        assert len({tuple(derive(secret)) for secret in secrets}) == 33


def test_a_secret_is_never_replaced(tmp_path):
    before = RootSecret.create(tmp_path / "root_secret").key("x")
    with pytest.raises(ConfigError, match="already has a root secret"):
        RootSecret.create(tmp_path / "root_secret")
    assert np.array_equal(RootSecret.load(tmp_path / "root_secret").key("x"), before)
    assert os.listdir(tmp_path) == ["root_secret"]


def test_missing_or_short_secret_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no root secret"):
        RootSecret.load(tmp_path / "root_secret")
    (tmp_path / "root_secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes instead of 32"):
        RootSecret.load(tmp_path / "root_secret")


def test_file_and_directory_are_synced_before_return(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(stat.S_ISDIR(os.fstat(handle).st_mode)), fsync(handle)))
    RootSecret.create(tmp_path / "root_secret")
    assert synced == [False, True]


def test_secret_is_hidden_and_not_pickled():
    secret = RootSecret(bytes(range(32)))
    assert repr(secret) == str(secret) == "RootSecret(hidden)"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)


def test_distinct_uses_have_distinct_keys():
    secret = RootSecret.from_seed(0)
    parts = ["", "a", "ab", "b", "1", 1, 12, -1, "1:2"]
    tuples = [t for n in range(4) for t in itertools.product(parts, repeat=n)]
    keys = {tuple(secret.key("noise", *t)) for t in tuples} | {tuple(secret.key("noisea", *t)) for t in tuples}
    assert len(keys) == 2 * len(tuples)


def test_keys_are_stable_across_platforms_and_differ_by_seed():
    key = RootSecret.from_seed(0).key("noise", 1, "layer/kernel", 2)
    assert key.dtype == np.uint32 and key.shape == (2,)
    assert key.tolist() == [3345282378, 3380516767]
    assert not np.array_equal(key, RootSecret.from_seed(1).key("noise", 1, "layer/kernel", 2))


def test_generators_follow_their_parts():
    secret = RootSecret.from_seed(0)
    first, same, other = (secret.generator("sampling", step, 0).integers(1 << 60, size=4) for step in (1, 1, 2))
    assert np.array_equal(first, same) and not np.array_equal(first, other)


def test_generators_and_streams_are_stable_across_platforms():
    secret = RootSecret.from_seed(0)
    assert secret.generator("sample", 1, 0).integers(1 << 60, size=2).tolist() == [1123725947920407815, 617989920085739606]
    assert secret.stream("noise", 1, 0).words(2).tolist() == [14143861399704263452, 11445162445925512855]


def test_every_request_of_a_stream_is_shake_256_of_the_key_and_its_number():
    stream, expected = BitStream(bytes(range(32))), []
    for request, count in enumerate([3, 1, 200]):
        data = hashlib.shake_256(bytes(range(32)) + request.to_bytes(8, "big")).digest(8 * count)
        expected += [int.from_bytes(data[start : start + 8], "big") for start in range(0, 8 * count, 8)]
    words = np.concatenate([stream.words(count) for count in (3, 1, 200)])
    assert words.dtype == np.uint64 and words.tolist() == expected and len(set(expected)) == 204


def test_strength_is_that_of_one_key_and_nothing_for_a_seed(tmp_path):
    secrets = [RootSecret(bytes(32)), RootSecret.create(tmp_path / "s"), RootSecret.load(tmp_path / "s"), RootSecret.from_seed(0)]
    assert [secret.strength_bits for secret in secrets] == [64, 64, 64, 0]


def test_a_boolean_is_not_a_key_part():
    with pytest.raises(TypeError, match="str or an int"):
        RootSecret.from_seed(0).key("noise", True)
