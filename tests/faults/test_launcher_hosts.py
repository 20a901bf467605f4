"""Several hosts: what the environment says, and that all of them end together."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.faults.launched import launch, launch_hosts, two_free_ports
from tests.support.hangs import HANG_SECONDS
from uspft.launcher import watch
from uspft.launcher.hosts import Hosts, LaunchError, LocalRanks, carriers, hosts_from, interface_to
from uspft.launcher.processes import shared_environment

GOOD = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_hosts_as_torchrun_names_them() -> None:
    assert hosts_from(GOOD) == Hosts(2, 1, "127.0.0.1", 29500)
    ranks = LocalRanks(4, hosts_from(GOOD))
    assert (ranks.world, ranks.first) == (8, 4)


@pytest.mark.parametrize("one", [{}, {"MASTER_PORT": "1"}, {"NNODES": "1", "NODE_RANK": "x"}])
def test_one_host_needs_nothing(one: dict[str, str]) -> None:
    assert hosts_from(one) == Hosts()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NNODES", "two", "NNODES=two"),
        ("NNODES", "0", "NNODES=0"),
        ("NODE_RANK", "2", "NODE_RANK=2: must be a whole number from 0 to 1"),
        ("NODE_RANK", "-1", "NODE_RANK=-1"),
        ("NODE_RANK", "", "NODE_RANK is not set"),
        ("MASTER_PORT", "65535", "MASTER_PORT=65535"),
        ("MASTER_PORT", "", "MASTER_PORT is not set"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
        ("MASTER_ADDR", "no.such.host.invalid", "MASTER_ADDR=no.such.host.invalid"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, value: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        hosts_from({**GOOD, name: value})


def test_all_wrong_variables_at_once() -> None:
    with pytest.raises(LaunchError) as error:
        hosts_from({"NNODES": "2"})
    assert len(str(error.value).splitlines()) == 3


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None
    here = {name for _, name in socket.if_nameindex()}
    # An address of this host's own leads to the interface that carries it, not to lo.
    every = carriers()
    assert every["127.0.0.1"] == "lo"
    for address, name in every.items():
        if ":" in address:
            continue  # that of a link alone is on each of them
        assert interface_to(address) == name and name in here


def default_interfaces() -> set[str | None]:
    table = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return {fields[0] for fields in table if fields[1] == fields[7] == "00000000"} or {None}


def test_the_interface_of_the_default_route() -> None:
    assert interface_to("198.51.100.7") in default_interfaces()


@pytest.mark.parametrize("place", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_name_that_stands_for_loopback_is_reached_from_elsewhere(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    monkeypatch.setattr("uspft.launcher.hosts.resolve", lambda address: (family, place))
    for name in ("node0", "node0.cluster", "localhost7"):
        assert interface_to(name) in default_interfaces()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_loopback_that_is_asked_for_is_taken(address: str) -> None:
    ranks = LocalRanks(1, Hosts(2, 0, address, 29500))
    told = shared_environment(ranks, {})
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    own = shared_environment(ranks, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert (own["GLOO_SOCKET_IFNAME"], own["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")


def test_ranks_are_numbered_over_hosts_and_told_the_interface(tmp_path: Path) -> None:
    script = """
    mark("env", f'{os.environ["LOCAL_RANK"]} {os.environ["WORLD_SIZE"]} '
                f'{os.environ["GLOO_SOCKET_IFNAME"]} {os.environ["NCCL_SOCKET_IFNAME"]}')
    time.sleep(1.0 if rank == 0 else 0)
    mark("end", time.time())
    """
    hosts = launch_hosts(tmp_path, 2, script)
    assert [host.end()[0] for host in hosts] == [0, 0]
    told = {path.name: path.read_text() for path in tmp_path.glob("host*/env-*")}
    assert told == {f"env-{rank}": f"{rank % 2} 4 lo =lo" for rank in range(4)}


@pytest.mark.parametrize(("failing", "other"), [(0, 1), (1, 0)])
def test_a_failure_on_one_host_ends_all(tmp_path: Path, failing: int, other: int) -> None:
    script = f"""
    mark("ready")
    if rank == {failing * 2}:
        time.sleep(1.5)
        report(ValueError("boom"))
    time.sleep(600)
    """
    hosts = launch_hosts(tmp_path, 2, script)
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [1, 1]
    assert f"rank {failing * 2} failed: ValueError: boom" in ends[failing][1]
    assert "Traceback" in ends[failing][1] and "Traceback" not in ends[other][1]
    assert f"host {failing} ended the run" in ends[other][1]


def test_what_follows_on_another_host_is_not_the_cause(tmp_path: Path) -> None:
    script = """
    time.sleep(1.5)
    if rank == 0:
        report(RuntimeError("Connection closed by peer"))
    if rank == 3:
        time.sleep(0.5)
        report(ValueError("the cause"))
    time.sleep(600)
    """
    hosts = launch_hosts(tmp_path, 2, script)
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [1, 1]
    assert "host 1 ended the run (rank 3 failed: ValueError: the cause)" in ends[0][1]
    assert "Connection closed" not in ends[0][1] + ends[1][1]


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_signal_on_one_host_stops_all(tmp_path: Path, asked: int) -> None:
    hosts = launch_hosts(tmp_path, 1, "save_when_stopped()", count=3)
    for host in hosts:
        host.wait_for("ready", 1)
    time.sleep(1.5)  # the supervisors have found one another
    hosts[asked].send(signal.SIGINT)
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [130] * 3
    assert len(list(tmp_path.glob("host*/saved-*"))) == 3


def test_a_host_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    # Without a child of its own: only the rank itself is tied to a killed supervisor.
    script = """
    child.kill()
    mark("pid", os.getpid())
    mark("ready")
    time.sleep(600)
    """
    hosts = launch_hosts(tmp_path, 1, script)
    for host in hosts:
        host.wait_for("ready", 1)
    time.sleep(1.5)
    hosts[1].send(signal.SIGKILL)
    code, shown = hosts[0].end()
    assert code == 1 and "host 1 is gone" in shown
    assert hosts[1].end()[0] == -signal.SIGKILL


def test_hosts_that_do_not_fit_together(tmp_path: Path) -> None:
    port = str(two_free_ports())
    hosts = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = launch(tmp_path / "a", 1, "time.sleep(600)", **hosts, NODE_RANK="0")
    second = launch(tmp_path / "b", 2, "time.sleep(600)", **hosts, NODE_RANK="1")
    ends = [first.end(), second.end()]
    assert [code for code, _ in ends] == [2, 2]
    told = "host 1 starts 2 ranks, host 0 1: launch.processes must be the same on every host"
    assert all(told in shown for _, shown in ends)


@pytest.mark.parametrize("whose", ["MASTER_PORT, for the ranks", "MASTER_PORT + 1, for the hosts"])
def test_a_taken_port_is_refused(whose: str) -> None:
    port = two_free_ports()
    number = port + ("+ 1" in whose)
    told = re.escape(f"port {number} ({whose}") + ".*set another MASTER_PORT on every host"
    with socket.create_server(("", number)), pytest.raises(LaunchError, match=told):
        watch.Watch(Hosts(2, 0, "127.0.0.1", port))


def test_a_silent_host_is_lost_and_a_stranger_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.3)
    port = two_free_ports()
    here = watch.Watch(Hosts(2, 0, "127.0.0.1", port))
    stranger = socket.create_connection(("127.0.0.1", port + 1))
    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    stranger.close()
    silent = socket.create_connection(("127.0.0.1", port + 1))
    silent.sendall(json.dumps({"kind": "hello", "host": 1, "hosts": 2}).encode() + b"\n")
    until = time.monotonic() + HANG_SECONDS
    while not (alarm := here.news()) and time.monotonic() < until:
        time.sleep(0.02)
    assert alarm == watch.Alarm("failed", "host 1 has said nothing for 0 s", lost=True)
    silent.close()
    here.close()
