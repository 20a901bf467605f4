"""Hosts before their ranks start: who is waited for is told by name, and a refusal ends all."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launched import two_free_ports
from tests.support.forked import Forked, play
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records, write_recipe
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe
from uspft.launcher.meeting import HEARD_SECONDS

HOST = f"""
import os, signal, sys, time
from uspft.commands import arguments, main
from uspft.config.problems import InputError, RunFailed
from uspft.launcher import meeting as module, watch
from uspft.launcher.hosts import hosts_from
from uspft.launcher.meeting import Meeting
module.PATIENCE_SECONDS, module.AGAIN_SECONDS, module.LEAVE_SECONDS = 0.2, 0.2, 0.4
watch.BEAT_SECONDS, watch.RETRY_SECONDS = 0.1, 0.1
def convene(ranks=1, device="cpu", gpus=0, limit={HANG_SECONDS}):
    watch = meeting.convene(ranks, device, gpus, limit)
    print("met", flush=True)
    time.sleep(0.3)
    watch.tell("done")
    return 0
def up():
    while not meeting.watch.called:
        time.sleep(0.01)
    print("up", flush=True)
class Told(InputError):
    def __str__(self):
        first = not said
        said.append(1)
        first and self.args[0]()
        return "r.yaml:3: model.nam: unknown key"
said = []
arguments.command_of = lambda words, meeting, losses: lambda: run(meeting, convene)
with Meeting(hosts_from(environment)) as meeting:
    code = main._command(["train"], meeting, ())
sys.exit(code)
"""

READY = "return convene()"
SHORT = "module.HEARD_SECONDS = 0.2; return convene(limit=2.0)"
WAITS = "up(); time.sleep(600)"
REFUSES = 'raise InputError("r.yaml:3: model.nam: unknown key")'
NAME = socket.gethostname()


class Host(Forked):
    """A host whose whole work before its ranks is the body of a function."""

    def __init__(self, body: str, index: int, port: int, count: int = 2) -> None:
        program = "def run(meeting, convene):\n" + f"    import time\n    {body}\n" + HOST
        own = {"NNODES": str(count), "NODE_RANK": str(index), "MASTER_ADDR": "127.0.0.1"}
        before = partial(play, program, {**own, "MASTER_PORT": str(port)})
        self._folder = tempfile.TemporaryDirectory()
        super().__init__([], Path(self._folder.name), before=before)

    def up(self) -> Host:
        """Return when it has another host on the line, or is past the start of its own."""
        until = time.monotonic() + HANG_SECONDS
        shown = Path(self._folder.name) / "stdout"
        while not (shown.exists() and "up\n" in shown.read_text()):
            assert time.monotonic() < until and self.poll() is None, self.communicate()
            time.sleep(0.01)
        return self

    def end(self) -> tuple[int, str, str]:
        out, err = self.communicate()
        assert self.returncode is not None
        return self.returncode, out, err


def meet(*bodies: str, late: float = 0.0) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each host; the last one starts late."""
    port, hosts = two_free_ports(), []
    for index, body in enumerate(bodies):
        if index == len(bodies) - 1:
            time.sleep(late)
        hosts.append(Host(body, index, port, len(bodies)))
    return [host.end() for host in hosts]


def test_hosts_begin_together() -> None:
    slow = 'meeting.says("tokenising"); time.sleep(1); return convene()'
    ends = meet(READY, slow, READY)
    assert [(code, out) for code, out, _ in ends] == [(0, "met\n")] * 3
    for index in (0, 2):
        assert f"waiting for host 1 ({NAME}): tokenising\n" in ends[index][2]
        assert ends[index][2].endswith("all hosts are ready\n")
    assert ends[1][2] == ""


def test_hosts_choose_by_what_is_least_of_all() -> None:
    """Each waits until all have given their number; one that has left is not waited for."""
    bodies = [
        f'print(meeting.least("memory", {mine}, {HANG_SECONDS}), flush=True); return convene()'
        for mine in (70, 90, 60)
    ]
    ends = meet(*bodies[:2], "time.sleep(1); " + bodies[2])
    assert [(code, out) for code, out, _ in ends] == [(0, "60\nmet\n")] * 3
    (_, out, err), _ = meet(bodies[0], "return 0")
    assert out == "" and "host 1 has nothing left to do, and this host has" in err


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("others", [READY, WAITS])
def test_a_refusal_ends_all_at_once(refusing: int, others: str) -> None:
    bodies = [others] * 3
    bodies[refusing] = REFUSES
    ends = meet(*bodies)
    assert [code for code, _, _ in ends] == [2] * 3
    told = "r.yaml:3: model.nam: unknown key\n"
    for index, (_, _, err) in enumerate(ends):
        assert err.endswith(told if index == refusing else f"host {refusing} ({NAME}): {told}")
        assert err.count("unknown key") == 1


@pytest.mark.parametrize("bodies", [(REFUSES, READY), (READY, REFUSES), (REFUSES, READY, READY)])
def test_a_host_that_comes_late_hears_of_it(bodies: tuple[str, ...]) -> None:
    ends = meet(*bodies, late=0.5)
    assert [code for code, _, _ in ends] == [2] * len(bodies)
    assert all("unknown key" in err for _, _, err in ends)


def test_who_has_not_called_is_named() -> None:
    port = two_free_ports()
    first, other = Host(SHORT, 0, port, 3), Host(SHORT, 2, port, 3)
    for host in (first, other):
        code, _, err = host.end()
        assert code == 1 and "waiting for host 1: has not called\n" in err
        assert "waited 0.0333 min (launch.timeout_minutes) for host 1: has not called" in err


def test_a_first_host_that_does_not_answer_is_named() -> None:
    port = two_free_ports()
    code, _, err = Host(SHORT, 1, port).end()
    told = f"host 0 (127.0.0.1, port {port + 1}): no answer"
    assert code == 1 and f"waiting for {told}\n" in err
    assert f"waited 0.0333 min (launch.timeout_minutes) for {told}" in err


def test_a_host_without_a_gpu_is_named() -> None:
    ends = meet('return convene(8, "cuda", 8)', READY)
    assert [code for code, _, _ in ends] == [2, 2]
    told = "host 1 computes on cpu, host 0 on cuda: launch.device must be the same on every host"
    assert all(f"{told} (host 1 sees 0 GPUs, host 0 8)" in err for _, _, err in ends)


def test_a_host_with_nothing_left_to_do() -> None:
    assert [code for code, _, _ in meet("return 0", "return 0")] == [0, 0]
    for bodies in (("return 0", READY), (READY, "return 0")):
        ends = meet(*bodies)
        waits = bodies.index(READY)
        assert ends[waits][0] == 2 and "name an output_dir that both see" in ends[waits][2]


@pytest.mark.parametrize("body", [WAITS, 'print("up", flush=True); return convene()'])
def test_a_host_that_is_stopped_stops_the_others(body: str) -> None:
    port = two_free_ports()
    stopped, other = Host(body, 0, port, 3), Host(WAITS, 1, port, 3).up()
    stopped.up().send_signal(signal.SIGINT)
    last = Host(READY, 2, port, 3)
    assert stopped.end()[0] == 130
    for host in (other, last):
        code, _, err = host.end()
        assert code == 130 and f"host 0 ({NAME}): stopped" in err


def test_a_refusal_stays_what_it_is_when_another_host_fails_meanwhile() -> None:
    """While the first host tells its error, it hears of the second's: each ends with its own."""
    slow = "up(); raise Told(lambda: time.sleep(1.2))"
    quick = "up(); time.sleep(0.4); raise RunFailed('no disk')"
    ends = [(code, err) for code, _, err in meet(slow, quick)]
    assert ends == [(2, "r.yaml:3: model.nam: unknown key\n"), (1, "no disk\n")]


def test_a_stop_ends_the_wait_to_be_heard() -> None:
    port, began = two_free_ports(), time.monotonic()
    alone = Host("raise Told(lambda: os.kill(os.getpid(), signal.SIGINT))", 0, port)
    code, _, err = alone.end()
    assert (code, err) == (2, "r.yaml:3: model.nam: unknown key\n")
    assert time.monotonic() - began < HEARD_SECONDS


def test_a_killed_host_is_missed() -> None:
    port = two_free_ports()
    killed, other = Host(WAITS, 1, port), Host(WAITS, 0, port)
    for host in (killed, other):
        host.up()
    killed.kill()
    code, _, err = other.end()
    assert code == 1 and err.endswith("host 1 is gone\n")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks, one on each host."""
    folder = tmp_path_factory.mktemp("meeting")
    make_model(folder / "model", "qwen2", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", [30, 32, 11], masked=[0.0])
    shared = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
    return small_recipe(
        folder / "model", data.path, 32, parallel_config=shared, training={"steps": 2}
    )


SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,node7",
}


def trains(recipe: dict[str, Any], folder: Path, index: int, port: int, *words: str) -> Forked:
    """Start a recipe as `srun` would on one of two hosts; all hosts share folder/out."""
    own = {**SRUN, "SLURM_NODEID": str(index)}
    place = folder / f"host{index}"
    place.mkdir()
    path = write_recipe({**recipe, "output_dir": str(folder / "out")}, place)
    return Forked([str(path), *words], place, **own, MASTER_PORT=str(port))


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.full), 1])
def test_two_hosts_train_into_one_folder(recipe: dict[str, Any], tmp_path: Path, late: int) -> None:
    """The later host finds what the earlier one has written there, which is nothing of its ranks
    yet."""
    port = two_free_ports()
    early = trains(recipe, tmp_path, 1 - late, port)
    shown, sign = tmp_path / "host1/stderr", tmp_path / "out"
    until = time.monotonic() + HANG_SECONDS
    while not (sign.exists() if late else shown.exists() and "waiting for" in shown.read_text()):
        assert time.monotonic() < until and early.poll() is None, early.communicate()
        time.sleep(0.02)
    assert not (tmp_path / "out/logs").exists()
    hosts = [early, trains(recipe, tmp_path, late, port)]
    ends = [host.communicate(timeout=HANG_SECONDS) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], ends
    assert [one["step"] for one in records(tmp_path)] == [1, 2]
    logs = {path.name for path in (tmp_path / "out/logs").iterdir()}
    assert logs == {"rank-0.log", "rank-1.log"}


def test_a_misspelt_key_on_one_host_ends_both(recipe: dict[str, Any], tmp_path: Path) -> None:
    port = two_free_ports()
    first = trains(recipe, tmp_path, 0, port)
    second = trains(recipe, tmp_path, 1, port, "model.nam=x")
    ends = [host.communicate(timeout=HANG_SECONDS) for host in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2], ends
    assert f"host 1 ({NAME}): command line: model.nam: " in ends[0][1]
    assert not (tmp_path / "out/logs").exists()
