"""GPUs that are in a machine and that torch does not see: the run is refused, with the reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import ROOT
from uspft.called import VARIABLE
from uspft.config import Fault, Recipe
from uspft.prepare import gpus

NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 13.3.0\n"
)


def recipe(**launch: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "c"},
            "data": {"train": "d.jsonl", "sequence_length": 32},
            "training": {"steps": 1, "global_batch_size": 1},
            "launch": launch,
        }
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a disk and a network card, and nothing more; torch sees no GPU."""
    monkeypatch.setattr(gpus, "PCI", tmp_path / "pci")
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(gpus, "NODES", tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name, vendor, kind in (("0", "0x8086", "0x010601"), ("1", "0x10de", "0x020000")):
        device(tmp_path, name, vendor, kind)
    return tmp_path


def device(machine: Path, name: str, vendor: str, kind: str) -> None:
    folder = machine / "pci" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def told(asked: str, environment: dict[str, str] | None = None) -> str:
    device = "cpu" if asked == "auto" else asked
    try:
        gpus.require_here(recipe(device=device, processes=1), asked, environment or {})
    except Fault as fault:
        ((key, what, remedy),) = fault.findings
        assert key == "launch.device" and remedy.endswith("or write launch.device: cpu")
        return what
    return ""


def test_a_machine_without_one(machine: Path) -> None:
    assert told("auto") == told("cpu") == ""
    assert told("cuda") == "is cuda, and torch can use no GPU here: there is none"


@pytest.mark.parametrize("by", ["bus", "driver", "node"])
def test_a_torch_without_cuda(machine: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    if by == "bus":
        device(machine, "2", "0x10de", "0x030200")
    elif by == "node":
        (machine / "nvidiactl").touch()
        assert told("auto") == "", "which is there without a GPU"
        (machine / "nvidia0").touch()
    else:
        gpus.DRIVER.write_text(NVRM)
    why = f"torch here is the CPU build ({torch.__version__} in "
    assert told("auto").startswith(
        f"is auto, and would pass over the NVIDIA GPU of this host: {why}"
    )
    assert told("cuda").startswith(f"is cuda, and torch can use no GPU here: {why}")
    launch = f"{ROOT}/launch.sh"
    assert told("cuda", {VARIABLE: launch}).endswith(
        f" in {sys.prefix}); `{launch} --install` brings the one for GPUs"
    )
    assert told("cpu") == ""
    for hidden in ("", "-1"):
        assert told("auto", {"CUDA_VISIBLE_DEVICES": hidden}) == ""


def test_a_driver_that_is_not_there_or_too_old(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = ["The NVIDIA driver on your system is too old (found version 12040). Please update"]

    def init() -> None:
        raise RuntimeError(says[-1])

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", init)
    device(machine, "2", "0x10de", "0x030000")
    assert told("auto").endswith("of this host: no NVIDIA driver is loaded")
    gpus.DRIVER.write_text(NVRM)
    said = "The NVIDIA driver on your system is too old (found version 12040)"
    why = f"the driver is 550.54.15, torch is built for CUDA 13.0, and {said}"
    assert told("auto").endswith(why) and told("cuda").endswith(why)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # as the driver's own library says
    assert told("cuda") == f"is cuda, and torch can use no GPU here: {why}"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    gpus.DRIVER.unlink()
    (machine / "nvidia0").touch()
    assert told("auto").endswith(why.replace("550.54.15", "not known"))
    says.append("No CUDA GPUs are available")
    assert "none is given to this process (SLURM: --gres=gpu:1" in told("auto")
