"""Who reaches the store of a job without its key can end the job, as a lost peer, and nothing else."""

import json
import random
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dpx.declaration import ConfigError
from dpx.processes import Team, launch
from dpx.processes.place import Place
from dpx.processes.signing import DEFAULT_FILE, KEY, KEY_FILE, SHORTEST, Signer, job_key, require_own_folder
from dpx.processes.team import Forged, PeerLost
from dpx.training import follower

from ..processes import environment
from .test_team import Store

SECRET = b"k" * SHORTEST
PAGE = Path(__file__).parents[2] / "dpx" / "docs" / "processes.md"
BEGIN = {"name": "begin", "facts": {"config_yaml": "{}", "folder": "/", "fork": None}}


def _member(store: Store, index: int = 1, nonce: str = "now") -> Team:
    return Team(Place(index, 2, "a:1"), store, Signer(SECRET, nonce))


def _strange(draw: random.Random) -> str:
    """A message that a stranger could write as the first command: without a key, with another, or heard elsewhere."""
    begin = BEGIN | {"name": draw.choice(("begin", "end", "open", "step", "save", "export", "__init__"))}
    heard = Signer(SECRET, "now").signed("told/1", begin)
    signature, text = heard[:64], heard[64:]
    ways: tuple[Callable[[], str], ...] = (
        lambda: json.dumps(begin),
        lambda: text,
        lambda: heard[: draw.randrange(len(heard))],
        lambda: heard[1:],
        lambda: heard + " ",
        lambda: signature.upper() + text,
        lambda: signature[:-1] + ("0" if signature[-1] != "0" else "1") + text,
        lambda: signature + text.replace("facts", "fact"),
        lambda: signature[:10] + "\u00e9" + signature[11:] + text,
        lambda: signature + "9" * 2_000_000,
        lambda: Signer(draw.randbytes(32), "now").signed("told/1", begin),
        lambda: Signer(SECRET, "before").signed("told/1", begin),
        lambda: Signer(SECRET, "now").signed("told/2", begin),
        lambda: Signer(SECRET, "now").signed("all/1", begin),
        lambda: "[" * 100_000,
        lambda: "".join(map(chr, draw.choices(range(32, 1000), k=draw.randrange(300)))),
    )
    return draw.choice(ways)()


def test_of_200_messages_of_a_stranger_none_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, obeyed = random.Random(0), []
    monkeypatch.setattr(follower, "_Followed", lambda *given, **facts: obeyed.append(facts))
    for _ in range(200):
        store = Store()
        store.key_value_set("dpx/told/1", _strange(draw))
        with pytest.raises(Forged, match="message told/1: does not bear the signature of this job"):
            follower.follow(_member(store))
    assert not obeyed


def test_signed_commands_are_obeyed_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[Any] = []

    class Run:
        def __init__(self, team: Team, **facts: Any):
            done.append(facts)

        def _do_step(self, **facts: Any) -> None:
            done.append(facts)

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(follower, "_Followed", Run)
    store = Store()
    owner, other = _member(store, 0), _member(store)
    owner.tell("begin", **BEGIN["facts"])
    owner.tell("step", step=1)
    owner.tell("end", code=7)
    assert follower.follow(other) == 7 and done == [BEGIN["facts"], {"step": 1}, "closed"]
    for name in ("own", "close_", "__init__", "_own"):
        owner.tell("begin", **BEGIN["facts"])
        owner.tell(name)
        with pytest.raises(ConfigError, match=f"command {name}: is none that a process of a job obeys"):
            follower.follow(other)


def test_the_commands_are_methods_and_on_the_page() -> None:
    methods = {name.removeprefix("_do_") for name in vars(follower._Followed) if name.startswith("_do_")}
    told = {
        name
        for path in (PAGE.parents[1] / "training").glob("*.py")
        for name in re.findall(r"""team(?:\(\))?\.tell\(\s*"(\w+)\"""", path.read_text())
    }
    rows = PAGE.read_text().partition("obeys these commands")[2].partition("##")[0].splitlines()
    shown = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert methods == set(follower.COMMANDS) and shown == methods | {"begin", "close", "end"}
    assert told - {"begin", "close"} <= methods


def test_a_follower_writes_in_the_folder_of_its_run_alone(tmp_path: Path) -> None:
    run = object.__new__(follower._Followed)
    run._folder = tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/out").symlink_to(tmp_path)
    assert run._own(str(tmp_path / "run/private/checkpoints")) == tmp_path / "run/private/checkpoints"
    for elsewhere in ("", "run2", "run/../other", "run/out/other"):
        with pytest.raises(ConfigError, match="is not in the run's folder"):
            run._own(str(tmp_path / elsewhere))


def test_a_place_that_a_stranger_took_and_words_that_he_left() -> None:
    store = Store()
    owner, other = _member(store, 0), _member(store)
    for name in ("failed/1", "ended/1", "compiling/1"):
        store.key_value_set(f"dpx/{name}", json.dumps("\x1b[31mSend your password"))
    assert owner.failure() is None and not owner.is_compiling()
    store.key_value_set("dpx/told/1", "mine")
    with pytest.raises(Forged, match="message told/1: is there already"):
        owner.tell("begin", **BEGIN["facts"])
    store.key_value_set("dpx/of/1/1", "mine")
    with pytest.raises(PeerLost):
        other.gather({})


def _met(keys: list[bytes], store: Store, arguments: list[list[str]] | None = None) -> list[Any]:
    teams = [Team(Place(index, len(keys), "a:1"), store) for index in range(len(keys))]
    with ThreadPoolExecutor(len(keys)) as pool:
        given = zip(teams, keys, arguments or [[]] * len(keys), strict=True)
        ends = [pool.submit(team.meet, key, own) for team, key, own in given]
        errors = [end.exception() for end in ends]
    return errors if any(errors) else teams


def test_processes_with_one_key_meet_and_the_nonce_of_each_job_is_new() -> None:
    stores = [Store(), Store()]
    first, second = (_met([SECRET] * 3, store) for store in stores)
    first[0].tell("step", step=1)
    assert first[1].hear() == first[2].hear() == ("step", {"step": 1})
    second_store = stores[1]
    second_store.key_value_set("dpx/told/1", stores[0]._values["dpx/told/1"])
    with pytest.raises(Forged):
        second[1].hear()


@pytest.mark.parametrize(
    ("theirs", "how"),
    [
        (["a=1", "b=3"], "with b=3 where process 0 has b=2"),
        (["a=1", "b=2", "c=3"], "with c=3, and process 0 was not"),
        (["a=1"], "without b=2, which process 0 has"),
        (["b=2", "a=1"], "with the arguments of process 0 in another order"),
    ],
)
def test_a_process_with_another_command_line_ends_all_before_anything_is_done(theirs: list[str], how: str) -> None:
    own = ["a=1", "b=2"]
    errors = _met([SECRET] * 3, Store(), [own, own, theirs])
    line = f"process 2: was started {how}. Start all processes of a job with the same command line."
    assert [str(error) for error in errors] == [line] * 3
    assert all(isinstance(error, ConfigError) and not isinstance(error, PeerLost) for error in errors)


# What a process of an older dpx says first: its number alone, that and its arguments, or these and its version.
OLDER = ["0123", {"asked": "0123", "arguments": []}, {"asked": "0123", "arguments": [], "dpx": "0.0.1"}]


@pytest.mark.parametrize("hello", OLDER, ids=str)
def test_a_process_of_another_version_is_refused_in_one_line(hello: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, signer = Store(), Signer(SECRET)
    store.key_value_set("dpx/hello/1", signer.signed("hello/1", hello))
    # It does not say that it ended.
    monkeypatch.setattr(Team, "_have_all_ended", lambda *_: False)
    owner = Team(Place(0, 2, "a:1"), store)
    with pytest.raises(ConfigError) as refused:
        owner.meet(SECRET)
    line = "runs another version of dpx than the others. Install the same version for every process of a job."
    assert str(refused.value) == f"process 1: {line}"
    welcome = signer.value("welcome", store.blocking_key_value_get("dpx/welcome", 0))
    assert welcome["asked"] == ["0123"]
    store = Store()
    store.key_value_set("dpx/welcome", signer.signed("welcome", {"nonce": "n", "asked": [hello]}))
    with pytest.raises(ConfigError) as refused:
        Team(Place(1, 2, "a:1"), store).meet(SECRET)
    assert str(refused.value) == f"process 0: {line}"


def test_another_key_is_refused_in_one_line() -> None:
    store = Store()
    store.key_value_set("dpx/welcome", Signer(b"x" * SHORTEST).signed("welcome", {"nonce": "n", "asked": [], "refused": None}))
    owner, other = Team(Place(0, 2, "a:1"), Store()), Team(Place(1, 2, "a:1"), store)
    owner._client.key_value_set("dpx/hello/1", Signer(b"x" * SHORTEST).signed("hello/1", "n"))
    for one in (owner, other):
        with pytest.raises(ConfigError, match="the key of this job: is not the same in all processes") as refused:
            one.meet(SECRET)
        assert not isinstance(refused.value, PeerLost)


def test_a_welcome_of_an_earlier_job_is_no_answer() -> None:
    store = Store()
    store.key_value_set("dpx/welcome", Signer(SECRET).signed("welcome", {"nonce": "n", "asked": ["of before"], "refused": None}))
    with pytest.raises(ConfigError, match="or a stranger answers"):
        Team(Place(1, 2, "a:1"), store).meet(SECRET)


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: job_key({}), range(16)))
    assert len(keys) == 1 and len(next(iter(keys))) == 64
    assert stat.S_IMODE(DEFAULT_FILE.stat().st_mode) == 0o600 and [path.name for path in DEFAULT_FILE.parent.iterdir()] == [
        DEFAULT_FILE.name
    ]
    DEFAULT_FILE.chmod(0o640)
    with pytest.raises(ConfigError, match="others than its owner may read or write it"):
        job_key({})


def test_a_key_from_the_environment_or_a_file(tmp_path: Path) -> None:
    given = "g" * SHORTEST
    assert job_key({KEY: given}) == given.encode()
    with pytest.raises(ConfigError, match=f"{KEY}: has fewer than 32 characters"):
        job_key({KEY: given[1:]})
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read as the key of this job"):
        job_key({KEY_FILE: str(path)})
    path.touch(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="has fewer than 32 characters"):
        job_key({KEY_FILE: str(path)})


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("k" * SHORTEST)
    assert job_key({KEY_FILE: str(path)}) == SECRET
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="is the key of this job, and belongs to another user"):
        job_key({KEY_FILE: str(path)})


def test_a_socket_in_a_folder_that_others_reach_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Place(0, 2, f"unix:{tmp_path}/own/store")
    for made, said in (
        (lambda: None, "cannot hold the socket of this job"),
        (lambda: (tmp_path / "own").mkdir(0o755), "others than its owner can reach it"),
        (lambda: (tmp_path / "own").chmod(0o710), "others than its owner can reach it"),
        (lambda: (tmp_path / "own").rename(tmp_path / "o") and (tmp_path / "own").symlink_to(tmp_path / "o"), "is not a folder"),
    ):
        made()
        with pytest.raises(ConfigError, match=said):
            require_own_folder(own)
    (tmp_path / "own").unlink()
    (tmp_path / "own").mkdir(0o700)
    require_own_folder(own)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        require_own_folder(own)


def test_the_processes_of_one_machine_meet_in_a_folder_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Started:
        def __init__(self, arguments: Any, env: dict[str, str], process_group: int):
            folder = Path(env["JAX_COORDINATOR_ADDRESS"].removeprefix("unix:")).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(env["JAX_COORDINATOR_ADDRESS"]) < 100
            assert job_key(env) and KEY not in env
            seen.append(env)

        def wait(self) -> int:
            return 0

    monkeypatch.setenv(KEY, "of another job")
    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    assert launch.launch(2, []) == 0
    assert [env["JAX_PROCESS_ID"] for env in seen] == ["0", "1"] and len({env[KEY_FILE] for env in seen}) == 1
    assert not Path(seen[0][KEY_FILE]).parent.exists()


# The store of a job at a TCP port. A stranger joins it as process 0 and leaves the commands that he is given, one a line; then process 1
# hears them, and says how many it refused and what it obeyed.
REACHED = """
import json, sys, threading
from jaxlib import _jax
from dpx.processes import Team
from dpx.processes.place import Place
from dpx.processes.signing import Signer
from dpx.processes.team import Forged
from dpx.training import follower
address = sys.argv[1]
service = _jax.get_distributed_runtime_service(address, 2, heartbeat_timeout=60, shutdown_timeout=5)
stranger, client = (_jax.get_distributed_runtime_client(address, index, init_timeout=60, heartbeat_timeout=60) for index in range(2))
joining = threading.Thread(target=stranger.connect)
joining.start()
client.connect()
joining.join()
messages = [json.loads(line) for line in sys.stdin]
for number, message in enumerate(messages, 1):
    stranger.key_value_set(f"dpx/told/{number}", message)
obeyed, refused = [], 0
follower._Followed = lambda *given, **facts: obeyed.append(facts)
for number in range(len(messages)):
    team = Team(Place(1, 2, address), client, Signer(b"k" * 32, "now"))
    team._told = number
    try:
        follower.follow(team)
    except Forged:
        refused += 1
print(refused, obeyed, flush=True)
leaving = threading.Thread(target=stranger.shutdown)
leaving.start()
client.shutdown()
leaving.join()
service.shutdown()
"""


def test_of_200_messages_at_a_tcp_port_none_is_obeyed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    draw = random.Random(1)
    messages = "".join(json.dumps(_strange(draw)) + "\n" for _ in range(200))
    started = [sys.executable, "-c", REACHED, f"127.0.0.1:{port}"]
    done = subprocess.run(started, env=environment(), input=messages, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "200 []\n"), done.stderr[-2000:]
