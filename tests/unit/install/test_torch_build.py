"""install.py: which build of torch a host gets, and which one is current there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.sandbox import install, make_sandbox, path_without_python

INDEX = f"{install.TORCH_INDEX}/"


@pytest.mark.parametrize(
    ("driver", "wish", "reachable", "first"),
    [
        ("580.65.06", "", True, ["--no-deps"]),
        ("550.54.15", "", True, ["--no-deps", "--index-url", f"{INDEX}cu129"]),
        (None, "", True, ["--no-deps", "--index-url", f"{INDEX}cpu"]),
        (None, "", False, ["--no-deps"]),
        (None, "cu130", True, ["--no-deps"]),
        ("580.65.06", "cpu", True, ["--no-deps", "--index-url", f"{INDEX}cpu"]),
        ("470.1", "cu126", True, ["--no-deps", "--index-url", f"{INDEX}cu126"]),
    ],
)
def test_where_torch_comes_from(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str | None,
    wish: str,
    reachable: bool,
    first: list[str],
) -> None:
    sandbox = make_sandbox(tmp_path, dependencies='["torch>=9,<10"]')
    (sandbox.root / "constraints.txt").write_text("torch==9.9\n")
    ran: list[list[str]] = []
    monkeypatch.setenv("USPFT_TORCH", wish)
    monkeypatch.setattr(install, "driver_version", lambda: driver)
    monkeypatch.setattr(install, "is_reachable", lambda url, seconds: reachable)
    monkeypatch.setattr(install, "run", lambda command, name: ran.append(command))
    monkeypatch.setattr(install, "require_build", lambda *given: None)
    install.install_packages(sandbox.root, ["pip"], dev=False)
    constraints = str(sandbox.root / "constraints.txt")
    # The pinned requirement by itself comes before the one with a range.
    assert ran == [
        ["pip", *first, "torch==9.9"],
        ["pip", "-c", constraints, "torch==9.9"],
        ["pip", "-c", constraints, "torch>=9,<10"],
    ]


@pytest.mark.parametrize(
    ("driver", "wish", "told"),
    [
        ("470.182.03", "", r"driver is 470.182.03, .* CUDA 12.9, which needs driver 525 or newer"),
        ("550.54.15", "", r"cu129 does not answer.*CUDA 13.0, which needs driver 580 .*550.54.15"),
        (None, "cpu", r"cpu does not answer.*USPFT_TORCH=cu130"),
        (None, "cuda", "USPFT_TORCH=cuda is no build of torch; write cpu or cu130"),
    ],
)
def test_a_build_that_cannot_be_had_is_told_with_versions(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, wish: str, told: str
) -> None:
    monkeypatch.setenv("USPFT_TORCH", wish)
    monkeypatch.setattr(install, "is_reachable", lambda url, seconds: False)
    monkeypatch.setattr(install, "run", lambda command, name: pytest.fail("pip ran"))
    with pytest.raises(install.InstallError, match=told):
        install.install_torch(["pip"], "torch==9.9", driver, None)


def torch_in(venv: Path, cuda: str | None) -> None:
    """Leave what tells the build of torch, as its own version.py says it."""
    file = venv / "lib/python3.11/site-packages/torch/version.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"debug = False\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n")


@pytest.mark.parametrize(("cuda", "build"), [("13.0", "cu130"), ("12.9", "cu129"), (None, "cpu")])
def test_the_build_that_is_there_is_read_from_torch(
    tmp_path: Path, cuda: str | None, build: str
) -> None:
    torch_in(tmp_path, cuda)
    assert install.built_in(tmp_path) == build


def test_the_build_of_this_torch() -> None:
    import torch

    own = install.built_in(Path(torch.__file__).parents[4])
    assert own == ("cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu")


def test_a_build_that_came_and_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USPFT_TORCH", raising=False)
    install.require_build("torch==9.9", "cu130", None)
    install.require_build("torch==9.9", "cu129", "580.1")
    with pytest.raises(
        install.InstallError, match=r"build cpu, which is for no GPU.*driver is 580"
    ):
        install.require_build("torch==9.9", "cpu", "580.1")
    with pytest.raises(install.InstallError, match=r"cu130.*driver 580 or newer.*driver is 550.54"):
        install.require_build("torch==9.9", "cu130", "550.54")
    monkeypatch.setenv("USPFT_TORCH", "cpu")
    install.require_build("torch==9.9", "cpu", "580.1")


def test_another_build_of_one_version_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.delenv("USPFT_TORCH", raising=False)
    monkeypatch.setattr(install, "run", lambda command, name: ran.append(command))
    install.install_torch(["pip"], "torch==9.9", "580.1", "cpu")
    install.install_torch(["pip"], "torch==9.9", "580.1", "cu130")
    assert ["--force-reinstall" in command for command in ran] == [True, False]


@pytest.mark.parametrize(
    ("build", "capability", "reachable", "asked"),
    [
        ("cu130", "9.0\n9.0\n", True, True),
        ("cu130", "8.0\n", True, False),
        ("cpu", "9.0\n", True, False),
        ("cu130", "9.0\n", False, False),
    ],
)
def test_flash_attention_for_hopper(
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: str,
    capability: str,
    reachable: bool,
    asked: bool,
) -> None:
    ran: list[list[str]] = []

    def no_wheel(command: list[str], name: str) -> None:
        ran.append(command)
        raise install.InstallError("no matching distribution")

    monkeypatch.setattr(install, "asked_of_gpus", lambda field: capability)
    monkeypatch.setattr(install, "is_reachable", lambda url, seconds: reachable)
    monkeypatch.setattr(install, "run", no_wheel)
    install.add_flash_attention(["pip"], build)
    assert [command[-2:] for command in ran] == ([[f"{INDEX}cu130", "flash-attn-3"]] * asked)
    wanted = build != "cpu" and "9.0" in capability
    assert ("no wheel of flash-attn-3" in capsys.readouterr().err) == wanted


VERSIONS = [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release", "580.65.06"),
    ("no version", None),
]


@pytest.mark.parametrize(("text", "version"), VERSIONS)
def test_the_driver_s_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    monkeypatch.setattr(install, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text(f"{text}\nGCC version:  gcc version 13.3.0\n")
    assert install.driver_version() == version


@pytest.mark.skipif(install.DRIVER.exists(), reason="a driver of this host's own is asked first")
@pytest.mark.parametrize(
    ("cuda", "driver", "wish", "current"),
    [
        (None, "", "", True),
        (None, "580.65.06", "", False),  # made on a login node, started where a GPU is
        (None, "580.65.06", "cpu", True),
        ("13.0", "580.65.06", "", True),
        ("13.0", "", "", True),
        ("13.0", "550.54.15", "", False),
        ("12.9", "550.54.15", "", True),
        ("12.9", "580.65.06", "", True),
        ("13.0", "", "cpu", False),
    ],
)
def test_launch_and_install_agree_on_what_is_current(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    driver: str,
    wish: str,
    current: bool,
) -> None:
    sandbox = make_sandbox(tmp_path, dependencies='["torch>=9,<10"]')
    root, tools = sandbox.root, path_without_python(tmp_path / "tools")
    (root / "constraints.txt").write_text("torch==9.9\n")
    torch_in(root / ".venv", cuda)
    (root / ".venv/pyvenv.cfg").touch()
    (root / ".venv/bin").mkdir()
    (root / ".venv/bin/python").symlink_to(sys.executable)
    (root / ".venv/.uspft-stamp").write_text(install.stamp_of(root, root / ".venv"))
    smi = tools / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{f'echo {driver}' if driver else 'echo no driver; exit 9'}\n")
    smi.chmod(0o755)
    # Where it is not current, launch.sh looks for a Python, and finds none.
    done = sandbox.run("train", "a.yaml", PATH=str(tools), USPFT_TORCH=wish)
    assert (done.returncode == 0) == current, done.stderr
    assert current or "needs Python 3.11 or newer" in done.stderr
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("USPFT_TORCH", wish)
    assert install.is_complete(root, dev=False) == current
