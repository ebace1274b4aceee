"""Where the processes of a job listen, and whole jobs at a TCP port: on one machine, and on two hosts of their own networks."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dpx.processes import signing
from dpx.processes.place import Place
from dpx.processes.signing import KEY, SHORTEST
from tests.processes import environment, micro_run

from .test_two_processes import TWO, ended, outcome, several

STEPS = 4
NAMES = {"debian": "127.0.1.1", "localhost": "127.0.0.1", "node": "192.0.2.7"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.BIND, raising=False)

    def found(host: str, port: object, type: int) -> list[tuple]:
        number = NAMES.get(host, host)
        if not number[0].isdigit():
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, type, 0, "", (number, port or 0))]

    monkeypatch.setattr(signing.socket, "getaddrinfo", found)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "node", "nowhere"])
def test_a_name_that_leads_to_no_loopback_needs_no_word(host: str) -> None:
    assert signing.warning(Place(0, 2, f"{host}:5000")) is None


def test_process_0_says_that_its_own_name_leads_to_loopback_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, 2, "debian:5000")
    assert (said := signing.warning(place)) is not None
    assert said.startswith(
        "debian leads to 127.0.1.1 on this host, so that processes on this host alone can meet here. If some run on other"
    )
    assert "set JAX_COORDINATOR_BIND_ADDRESS=<address of this host>:5000 here" in said
    assert signing.warning(Place(1, 2, "debian:5000")) is None and signing.warning(Place(0, 2, "unix:/tmp/a")) is None
    monkeypatch.setenv(signing.BIND, "192.0.2.7:5000")
    assert signing.warning(place) is None


def test_process_0_meets_the_others_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(index, 2, "debian:5000") for index in range(2)]
    assert [signing.coordinator(one) for one in places] == [("debian:5000", "debian:5000")] * 2
    for listens, found in (("192.0.2.7:5000", "192.0.2.7:5000"), ("0.0.0.0:5000", "debian:5000"), ("[::]:5000", "debian:5000")):
        monkeypatch.setenv(signing.BIND, listens)
        assert [signing.coordinator(one)[0] for one in places] == [found, "debian:5000"]
        assert signing.coordinator(places[0])[1] == listens


def test_the_side_of_this_host_is_that_on_the_way_to_the_coordinator() -> None:
    assert signing._own_side("localhost:5000") == "127.0.0.1"
    assert signing._own_side("nowhere:5000") is None and signing._own_side("localhost") is None


# A whole job, started as on several hosts.


class Host(NamedTuple):
    """What starts a process on a host, and the numbers at which it alone may listen."""

    starts: tuple[str, ...]
    number: str


def over_tcp(folder: Path, hosts: list[Host], coordinator: str, *more: tuple[str, ...], **variables: str) -> list["subprocess.Popen[str]"]:
    """Starts the process of each host with its command line."""
    folder.mkdir(exist_ok=True)
    common = [*micro_run(STEPS), "seed=1", "mesh=data_fsdp", "microbatch=2", *TWO, "seed=1"]
    started = []
    for index, (host, own) in enumerate(zip(hosts, more or [()] * len(hosts), strict=True)):
        place = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(len(hosts)), "JAX_PROCESS_ID": str(index)}
        env = environment(COLUMNS="160", **place, **{KEY: "k" * SHORTEST}, **variables)
        line = [*host.starts, sys.executable, "-m", "dpx", *common, *own]
        started.append(subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return started


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def require_the_run_of_one(folder: Path) -> None:
    """The run of the job is that of one process, to float32's rounding."""
    ended(several(folder / "alone", 1, *TWO, "seed=1"))
    (one, *_), (two, *_) = outcome(folder / "alone"), outcome(folder / "job")
    assert one.keys() == two.keys()
    for path in one:
        np.testing.assert_allclose(two[path], one[path], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["127.0.0.1", "127.0.1.1"])
def test_a_whole_job_at_a_tcp_port_is_the_run_of_one(tmp_path: Path, number: str) -> None:
    """127.0.1.1 is where Debian leads the name of its own host."""
    said = [ended(one) for one in over_tcp(tmp_path / "job", [Host((), number)] * 2, f"{number}:{free_port()}")]
    assert f"2 processes meet at {number}:" in said[0] and "Let a firewall close all ports between these hosts to others" in said[0]
    require_the_run_of_one(tmp_path)


@pytest.mark.slow
def test_processes_with_other_command_lines_end_in_one_line(tmp_path: Path) -> None:
    run = over_tcp(
        tmp_path / "job", [Host((), "")] * 2, f"127.0.0.1:{free_port()}", ("optimizer.learning_rate=0.1",), ("optimizer.learning_rate=1",)
    )
    differs = "with optimizer.learning_rate=1 where process 0 has optimizer.learning_rate=0.1"
    line = f"error: process 1: was started {differs}. Start all processes of a job with the same command line."
    for one in run:
        assert ended(one, 2).splitlines() == [line]
    assert not list((tmp_path / "job").glob("outputs/*"))


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two networks with a wire between them. The name `first` leads to 127.0.1.1 on the first host, as on Debian."""
    names, numbers = [f"dpx{os.getpid()}{side}" for side in "ab"], ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        wire = ["ip", "link", "add", "dpx0", "netns", names[0], "type", "veth", "peer", "name", "dpx0", "netns", names[1]]
        subprocess.run(wire, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        remove(names)
        pytest.skip("this machine cannot make networks: it needs root and ip netns")
    hosts = []
    try:
        for name, number, leads in zip(names, numbers, ("127.0.1.1", numbers[0]), strict=True):
            for line in (f"address add {number}/24 dev dpx0", "link set dpx0 up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *line.split()], check=True)
            table = tmp_path / f"hosts{number}"
            table.write_text(f"127.0.0.1 localhost\n{leads} first {socket.gethostname()}\n")
            mounted = f'mount --bind {table} /etc/hosts; exec "$@"'
            hosts.append(Host(("ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", mounted, "sh"), number))
        yield hosts
    finally:
        remove(names)


def remove(networks: list[str]) -> None:
    for name in networks:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def listening(host: Host) -> set[str]:
    """The numbers at which something listens on a host."""
    lines = subprocess.run([*host.starts, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True).stdout
    found = [line.split()[1].partition(":")[0] for line in lines.splitlines() if line.split()[3] == "0A"]
    # The last four bytes are the number, also where it is written as one of IPv6.
    return {".".join(str(part) for part in bytes.fromhex(one[-8:])[::-1]) for one in found}


@pytest.mark.slow
def test_a_whole_job_on_two_hosts_is_the_run_of_one_and_listens_at_their_own_addresses_alone(tmp_path: Path, two_hosts: list[Host]) -> None:
    run = over_tcp(tmp_path / "job", two_hosts, "first:5555", **{signing.BIND: "10.77.0.1:5555"})
    seen: list[set[str]] = [set(), set()]
    while any(one.poll() is None for one in run):
        for numbers, host in zip(seen, two_hosts, strict=True):
            numbers |= listening(host)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run[0].wait(0.5)
    said = [ended(one) for one in run]
    assert "2 processes meet at 10.77.0.1:5555: dpx signs its messages" in said[0]
    assert seen == [{host.number} for host in two_hosts]
    require_the_run_of_one(tmp_path)
