"""--hostfile: what it may say, and a command on each of its hosts by an ssh that stays here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from tests.faults.launched import two_free_ports
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT
from uspft.launcher.hosts import LaunchError
from uspft.launcher.remote import read_hostfile, run_on_hosts


def written(folder: Path, text: str) -> Path:
    file = folder / "hosts"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "names", "slots"),
    [
        ("a slots=8\nb slots=8\n", ["a", "b"], 8),
        ("# two\n\na slots=4 max_slots=8  # first\nb slots=4\n", ["a", "b"], 4),
        ("b:2\na:2\n", ["b", "a"], 2),
        ("a\nb\nc", ["a", "b", "c"], None),
        ("a\na\nb\nb\n", ["a", "b"], 2),  # PBS names a host for each of its slots
        ("10.0.0.7 slots=1", ["10.0.0.7"], 1),
    ],
)
def test_what_a_hostfile_says(
    tmp_path: Path, text: str, names: list[str], slots: int | None
) -> None:
    file = written(tmp_path, text)
    assert read_hostfile(file) == (names, slots)
    if "slots" in text:
        assert dict(fetch_hostfile(str(file))) == dict.fromkeys(names, slots)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a slots=8\nb slots=4\n", r"hosts:2: b has 4 slots and a 8; write as many for every host"),
        ("a slots=2\nb slots\n", r"hosts:2: `b slots` is no host"),
        ("a slots=eight\n", r"hosts:1: `a slots=eight` is no host; write `name slots=8`"),
        ("a slot=8\n", r"hosts:1: `a slot=8` is no host; write `name slots=8`"),
        ("a\nb slots=0\n", r"hosts:2: `b slots=0` is no host; write `name slots=8`"),
        ("# none\n", "names no host"),
    ],
)
def test_a_hostfile_that_cannot_be_read(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        read_hostfile(written(tmp_path, text))


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--hostfile: `.*/none`: No such file"):
        read_hostfile(tmp_path / "none")


def test_hosts_that_the_environment_names_too(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="NNODES is set together with --hostfile"):
        run_on_hosts(written(tmp_path, "a\n"), [], {"NNODES": "2"}, ["true"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["r.yaml", "--hostfile"], "--hostfile: names no file; write --hostfile FILE"),
        (["check", "r.yaml", "--hostfile=h"], "--hostfile: check starts nothing on hosts"),
        (["--hostfile", "h"], "--hostfile: the command starts nothing on hosts"),
    ],
)
def test_a_wrong_command(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    from uspft.__main__ import main

    assert main(words) == 2
    assert told in capsys.readouterr().err


SSH = f"""#!{sys.executable}
import os, pathlib, sys
words = sys.argv[1:]
while words[0] == "-o":
    del words[:2]
name, command = words
if name == "unreachable":
    sys.exit(255)
with open(pathlib.Path(sys.argv[0]).with_name("called"), "a") as calls:
    calls.write(" ".join(sys.argv) + "\\n")
kept = {{key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}}
os.execve("/bin/sh", ["sh", "-c", command], kept)
"""

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
place, words = Path(os.environ["USPFT_TEST"]), sys.argv[1:]
names = "NODE_RANK NNODES MASTER_ADDR MASTER_PORT HF_TOKEN".split()
rank = os.environ["NODE_RANK"]
told = " ".join([os.getcwd(), *words, *(os.environ[name] for name in names)])
(place / f"told-{rank}").write_text(told)
print("out of", rank, flush=True)
print("err of", rank, file=sys.stderr, flush=True)
if "fail" in words and rank == "1":
    sys.exit(3)
if "wait" in words or "fail" in words:
    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append("asked"))
    signal.signal(signal.SIGHUP, lambda *_: got.append("lost"))
    (place / f"ready-{rank}").touch()
    while not got:
        time.sleep(0.02)
    (place / f"ended-{rank}").write_text(got[0])
    sys.exit(130)
"""

START = """
import os, sys
from pathlib import Path
from uspft.launcher import remote
remote.END_SECONDS = 1.0
program = [sys.executable, sys.argv[2]]
sys.exit(remote.run_on_hosts(Path(sys.argv[1]), sys.argv[3:], os.environ, program))
"""


def start(folder: Path, hosts: str, *words: str) -> subprocess.Popen[str]:
    """Start a program on hosts that an ssh of our own reaches."""
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(SSH)
    (folder / "bin/ssh").chmod(0o755)
    (folder / "a place").mkdir()
    (folder / "program.py").write_text(PROGRAM)
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own |= {"USPFT_TEST": str(folder), "HF_TOKEN": "it's secret", "MASTER_PORT": "29512"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NNODES")}
    file = written(folder, hosts)
    return subprocess.Popen(
        [sys.executable, "-c", START, str(file), str(folder / "program.py"), *words],
        cwd=folder / "a place",
        env={**kept, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(folder: Path, *names: str) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until, f"no {names}"
        time.sleep(0.02)


def test_a_command_runs_on_every_host(tmp_path: Path) -> None:
    running = start(tmp_path, "n0 slots=4\nn1 slots=4\n", "train", "a b.yaml")
    out, err = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 0, err
    words = "train a b.yaml launch.processes=4"
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told == f"{tmp_path}/a place {words} {rank} 2 n0 29512 it's secret"
    assert out == "out of 0\n"
    assert set(err.splitlines()) == {"err of 0", "[n1] out of 1", "[n1] err of 1"}
    assert "secret" not in (tmp_path / "bin/called").read_text()


def test_what_the_user_says_of_processes_stays(tmp_path: Path) -> None:
    running = start(tmp_path, "localhost slots=4\n", "r.yaml", "launch.processes=2")
    assert running.communicate(timeout=HANG_SECONDS)[0] == "out of 0\n"
    assert " r.yaml launch.processes=2 0 1 localhost" in (tmp_path / "told-0").read_text()
    assert not (tmp_path / "bin/called").exists()  # this host needs no ssh


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_every_host_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    running = start(tmp_path, "n0\nn1\n", "wait")
    wait_for(tmp_path, "ready-0", "ready-1")
    running.send_signal(number)
    running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 130
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["asked"] * 2


def test_a_killed_start_leaves_no_host_running(tmp_path: Path) -> None:
    running = start(tmp_path, "n0\nn1\n", "wait")
    wait_for(tmp_path, "ready-0", "ready-1")
    running.kill()
    wait_for(tmp_path, "ended-0", "ended-1")
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["lost"] * 2
    running.communicate(timeout=HANG_SECONDS)


def test_a_failure_ends_the_other_hosts(tmp_path: Path) -> None:
    running = start(tmp_path, "n0\nn1\n", "fail")
    running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 3 and (tmp_path / "ended-0").read_text() == "asked"


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    running = start(tmp_path, "n0\nunreachable\n", "wait")
    _, err = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 1
    assert "unreachable: ssh did not reach this host, or has lost it" in err


def test_two_hosts_of_a_file_meet(tmp_path: Path) -> None:
    """The whole way: main, the file, the hosts' supervisors."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    file = written(tmp_path, "n0\nn1\n")
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "USPFT_PYTHON": sys.executable}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(two_free_ports())}
    done = subprocess.run(
        [sys.executable, "-m", "uspft", "none.yaml", "--hostfile", str(file)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **own, **place},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 2 and "none.yaml" in done.stderr
