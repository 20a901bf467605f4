"""launch.sh: what it passes on, what it refuses, and that Python takes its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hangs import HANG_SECONDS
from tests.support.sandbox import Sandbox, make_sandbox, path_without_python

VERBS = (
    "train check plan preprocess inspect verify export chat convert calibrate report recipes"
).split()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return make_sandbox(tmp_path, dependencies="[]")


@pytest.fixture
def no_python(tmp_path: Path) -> Path:
    return path_without_python(tmp_path / "bin")


def fake_python(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_usage(sandbox: Sandbox) -> None:
    nothing, asked = sandbox.run(), sandbox.run("--help")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert nothing.stderr == asked.stdout
    assert all(f"  {verb} " in asked.stdout for verb in VERBS) and len(VERBS) == 12
    assert asked.stdout.startswith(f"usage: {sandbox.root}/launch.sh RECIPE.yaml [key.path=value")
    assert "./launch.sh" not in asked.stdout.replace(f"{sandbox.root}/", "")


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_passed_on(sandbox: Sandbox, verb: str) -> None:
    done = sandbox.run(verb, "a b.yaml", "x.y=[1, 2]", USPFT_PYTHON=sys.executable)
    told = json.loads(done.stdout)
    assert told["argv"] == [verb, "a b.yaml", "x.y=[1, 2]"] and told["python"] == sys.executable
    assert ("PYTHONDONTWRITEBYTECODE" in told) == (verb in ("check", "plan"))
    assert told["PYTHONUTF8"] == "1", "a path in Latin-1 would end the ranks of a run"


def test_a_folder_that_is_no_more_is_told(sandbox: Sandbox, tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    words = ["bash", "-c", 'cd "$0" && rmdir "$0" && "$1" check r.yaml', gone]
    env = sandbox.environment(USPFT_PYTHON=sys.executable)
    done = subprocess.run(
        [*words, sandbox.root / "launch.sh"], env=env, capture_output=True, text=True, check=False
    )
    assert (
        done.returncode == 2 and "launch.sh: the folder in which it runs is no more" in done.stderr
    )


def test_a_recipe_without_a_verb_is_trained(sandbox: Sandbox) -> None:
    done = sandbox.run("a.yaml", "training.steps=3", USPFT_PYTHON=sys.executable)
    assert json.loads(done.stdout)["argv"] == ["train", "a.yaml", "training.steps=3"]


def test_from_any_folder_through_a_link(sandbox: Sandbox, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    # A module of the caller's folder must not win over the one that is meant.
    (elsewhere / "json.py").write_text("raise SystemExit('shadowed')")
    (elsewhere / "uspft").mkdir()
    (elsewhere / "uspft/__main__.py").write_text("raise SystemExit('shadowed')")
    link = elsewhere / "start"
    link.symlink_to(os.path.relpath(sandbox.root / "launch.sh", elsewhere))
    linked = Sandbox(elsewhere, sandbox.wheels)
    (elsewhere / "launch.sh").symlink_to("start")
    done = linked.run("recipes/a.yaml", cwd=elsewhere, USPFT_PYTHON=sys.executable)
    assert json.loads(done.stdout)["cwd"] == str(elsewhere), done.stderr
    assert json.loads(done.stdout)["argv"] == ["train", "recipes/a.yaml"]
    assert json.loads(done.stdout)["USPFT_PROGRAM"] == str(elsewhere / "launch.sh")


def test_the_users_python_is_named_when_it_will_not_do(sandbox: Sandbox, tmp_path: Path) -> None:
    old = fake_python(tmp_path, "old", "echo 3.9")
    for python, told in [("/no/such", "/no/such does not run"), (str(old), "is Python 3.9")]:
        done = sandbox.run("a.yaml", USPFT_PYTHON=python)
        assert done.returncode == 2 and told in done.stderr and done.stdout == ""
    assert not (sandbox.root / ".venv").exists()


def test_packages_that_the_users_python_lacks_are_named(tmp_path: Path) -> None:
    needs = '["no-such-package>=2", "packaging<1", "pytest>=1"]'
    sandbox = make_sandbox(tmp_path, dependencies=needs)
    done = sandbox.run("a.yaml", USPFT_PYTHON=sys.executable)
    assert done.returncode == 2 and done.stdout == ""
    assert "no-such-package is not installed (needs no-such-package>=2)" in done.stderr
    assert "(needs packaging<1)" in done.stderr and "pytest" not in done.stderr
    assert not (sandbox.root / ".venv").exists()


@pytest.mark.parametrize("words", [("--hostfile", "h", "a.yaml"), ("a.yaml", "--hostfile=h")])
def test_a_hostfile_is_passed_on(sandbox: Sandbox, words: tuple[str, ...]) -> None:
    done = sandbox.run(*words, USPFT_PYTHON=sys.executable)
    assert json.loads(done.stdout)["argv"] == ["train", *words]


def test_no_python_is_told_with_a_remedy(sandbox: Sandbox, no_python: Path) -> None:
    done = sandbox.run("a.yaml", PATH=str(no_python))
    assert done.returncode == 2 and "needs Python 3.11 or newer" in done.stderr
    assert "apt-get install python3.11 python3.11-venv" in done.stderr


def test_an_old_python_is_passed_over_and_named(sandbox: Sandbox, no_python: Path) -> None:
    fake_python(no_python, "python3", "exit 1")
    done = sandbox.run("a.yaml", PATH=str(no_python))
    assert done.returncode == 2 and "python3 is older" in done.stderr
    # A newer one further down the list is taken.
    fake_python(no_python, "python3.12", 'case "$*" in *install.py*) echo "took $*";; esac')
    assert "took" in sandbox.run("a.yaml", PATH=str(no_python)).stdout


def test_a_python_without_venv_is_told_with_a_remedy(sandbox: Sandbox, no_python: Path) -> None:
    fake_python(
        no_python, "python3", 'case "$2" in *ensurepip*) exit 1;; *print*) echo python3.13;; esac'
    )
    done = sandbox.run("a.yaml", PATH=str(no_python))
    assert done.returncode == 2 and "apt-get install python3.13-venv" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_python(sandbox: Sandbox, number: signal.Signals) -> None:
    mark = sandbox.root / "ready"
    (sandbox.root / "uspft/__main__.py").write_text(
        "import pathlib, signal, sys, time\n"
        f"signal.signal({number.value}, lambda *_: sys.exit(33))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    running = sandbox.start("a.yaml", USPFT_PYTHON=sys.executable)
    until = time.monotonic() + HANG_SECONDS
    while not mark.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(number)
    running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 33
