"""install.py: which state .venv is in, what is installed from where, one at a time."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.hangs import HANG_SECONDS
from tests.support.sandbox import ROOT, Sandbox, install, make_sandbox, path_without_python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """A sandbox that launch.sh has installed, to be copied."""
    sandbox = make_sandbox(tmp_path_factory.mktemp("installed"))
    done = sandbox.run("--install")
    assert done.returncode == 0, done.stderr
    return sandbox


@pytest.fixture
def sandbox(installed: Sandbox, tmp_path: Path) -> Sandbox:
    """A complete .venv of one's own."""
    shutil.copytree(installed.root, tmp_path / "project", symlinks=True)
    return Sandbox(tmp_path / "project", installed.wheels)


def test_every_dependency_has_a_pin_within_its_range() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    versions = {name.lower().replace("_", "-"): v for name, v in (p.split("==") for p in pins)}
    wanted = [Requirement(text) for text in install.requirements(ROOT, dev=True)]
    assert len(wanted) == 25
    for requirement in wanted:
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_an_installation_from_nothing(installed: Sandbox, tmp_path: Path) -> None:
    venv = installed.root / ".venv"
    assert (venv / ".uspft-stamp").exists() and not (venv / ".uspft-installing").exists()
    assert (installed.root / "uspft/__pycache__").is_dir()
    # Nothing to do: no Python is looked for.
    done = installed.run("train", "a.yaml", PATH=str(path_without_python(tmp_path / "bin")))
    assert done.returncode == 0 and done.stderr == ""
    words, own = [venv / "bin/uspft", "plan"], installed.environment()
    command = subprocess.run(words, env=own, stdout=-1, text=True, check=True)
    assert '"plan"' in command.stdout


def test_a_complete_environment_costs_no_time(sandbox: Sandbox) -> None:
    def seconds() -> float:
        start = time.monotonic()
        assert sandbox.run("--install").returncode == 0
        return time.monotonic() - start

    assert min(seconds() for _ in range(20)) < 0.05


def change(sandbox: Sandbox, name: str = "constraints.txt") -> None:
    """Change one of the files that say what is to be installed."""
    with (sandbox.root / name).open("a") as changed:
        changed.write("# changed\n")


def break_off(venv: Path) -> None:
    (venv / ".uspft-installing").touch()
    (venv / ".uspft-stamp").unlink()


def break_python(venv: Path) -> None:
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/no/such/python")


def replace_python(venv: Path) -> None:
    (venv / "bin/python").unlink()
    (venv / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (venv / "bin/python").chmod(0o755)


def make_anothers(venv: Path) -> None:
    (venv / ".uspft-stamp").unlink()


@pytest.mark.parametrize(
    ("damage", "told", "kept"),
    [
        (break_off, "did not end: making .venv anew", []),
        (break_python, "does not run any more: making .venv anew", []),
        (replace_python, "does not run any more: making .venv anew", []),
        (make_anothers, "was not made by launch.sh: moving it to .venv-", [".venv-*"]),
    ],
)
def test_a_damaged_environment_makes_room(
    *,
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    told: str,
    kept: list[str],
) -> None:
    venv, ran = sandbox.root / ".venv", []
    (venv / "precious").touch()
    damage(venv)
    monkeypatch.setattr(install, "run", lambda command, name: ran.append(command[1:]))
    assert not install.is_complete(sandbox.root, dev=False)
    install.prepare(sandbox.root)
    assert ran == [["-m", "venv", str(venv)]] and told in capsys.readouterr().err
    assert [path.name for path in venv.iterdir()] == [".uspft-installing"]
    found = [path.parent for path in sandbox.root.rglob("precious")]
    assert found == [path for name in kept for path in sandbox.root.glob(name)]


@pytest.mark.full  # the same damage is above, without an installation
def test_an_installation_that_did_not_end_is_made_anew(sandbox: Sandbox) -> None:
    venv = sandbox.root / ".venv"
    (venv / "half-copied").touch()
    break_off(venv)
    done = sandbox.run("train", "a.yaml")
    assert done.returncode == 0 and '"a.yaml"' in done.stdout
    assert "did not end: making .venv anew" in done.stderr
    assert not (venv / "half-copied").exists()


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "install.py"])
def test_changed_pins_are_noticed(sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    """By launch.sh, which then looks for a Python, and by install.py."""
    change(sandbox, name)
    done = sandbox.run("--install", PATH=str(path_without_python(tmp_path / "bin")))
    assert done.returncode == 2 and "needs Python" in done.stderr
    assert not install.is_complete(sandbox.root, dev=False)


def test_changed_pins_are_installed_over(sandbox: Sandbox) -> None:
    (sandbox.root / ".venv/kept").touch()
    change(sandbox)
    done = sandbox.run("--install")
    assert done.returncode == 0 and "installed in" in done.stderr
    assert (sandbox.root / ".venv/kept").exists()
    assert sandbox.run("--install").stderr == ""


def test_the_tests_packages_have_a_stamp_of_their_own(sandbox: Sandbox) -> None:
    done = sandbox.run("--install", "--dev")
    assert done.returncode == 0 and "installing 2 packages" in done.stderr
    assert sandbox.run("--install", "--dev").stderr == ""
    assert sandbox.run("--install").stderr == ""


def test_a_moved_project_still_runs(sandbox: Sandbox) -> None:
    moved = sandbox.root.with_name("moved here")
    sandbox.root.rename(moved)
    done = Sandbox(moved, sandbox.wheels).run("train", "a.yaml")
    assert done.returncode == 0 and done.stderr == "" and '"a.yaml"' in done.stdout


def test_what_pip_refuses_is_shown_with_the_command(sandbox: Sandbox) -> None:
    project = sandbox.root / "pyproject.toml"
    project.write_text(project.read_text().replace('"uspft-sandbox"', '"no-such-package-here"'))
    done = sandbox.run("train", "a.yaml")
    assert done.returncode == 1 and done.stdout == ""
    assert "No matching distribution found for no-such-package-here" in done.stderr
    assert re.search(r"to see it again: DS_BUILD_OPS=0 '?/.* -m pip .*no-such-package", done.stderr)
    assert "Traceback" not in done.stderr


def test_two_at_once_install_once(sandbox: Sandbox) -> None:
    change(sandbox)
    both = [sandbox.start("train", "a.yaml") for _ in range(2)]
    ends = [process.communicate(timeout=HANG_SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all('"a.yaml"' in out for out, _ in ends)
    shown = ends[0][1] + ends[1][1]
    assert shown.count("installing 1 packages") == 1
    assert shown.count("waiting for the installation by") == 1


HANGING_PIP = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_an_installation_that_is_killed_takes_pip_along(sandbox: Sandbox, tmp_path: Path) -> None:
    """And leaves the mark by which the next one begins anew."""
    change(sandbox)
    mark = tmp_path / "pip"
    driver = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import install;"
        "install.install(pathlib.Path(sys.argv[1]), pip=sys.argv[2:])"
    )
    pip = [sys.executable, "-c", HANGING_PIP, str(mark)]
    killed = subprocess.Popen([sys.executable, "-c", driver, str(sandbox.root), *pip])
    until = time.monotonic() + HANG_SECONDS
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    until = time.monotonic() + HANG_SECONDS
    stat = Path(f"/proc/{mark.read_text()}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "pip outlived the installer"
        time.sleep(0.05)
    venv = sandbox.root / ".venv"
    assert (venv / ".uspft-installing").exists() and not (venv / ".uspft-stamp").exists()


def test_an_interrupted_installation_says_so(sandbox: Sandbox, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "uspft_sandbox-1.1-py3-none-any.whl"
    os.mkfifo(wheel)
    pins = sandbox.root / "constraints.txt"
    pins.write_text(pins.read_text().replace("sandbox==1.0", "sandbox==1.1"))
    running = Sandbox(sandbox.root, wheels).start("train", "a.yaml")
    with wheel.open("wb"):  # returns when pip opens the package, which it then cannot read
        running.send_signal(signal.SIGINT)
        _, shown = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 130 and "installation interrupted" in shown


def test_a_page_that_does_not_answer_in_time() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert install.is_reachable(f"http://127.0.0.1:{server.server_port}/", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert not install.is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/", 0.3)
        assert time.monotonic() - start < HANG_SECONDS
    assert not install.is_reachable("http://no.such.host.invalid/", 1.0)
