"""What a recipe asks for that this host lacks: GPUs that torch does not see, and trackers that
could not start; each is refused with the reason and what to do."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.support.launch import ROOT
from uspft.called import VARIABLE
from uspft.config import Fault, Recipe
from uspft.config.recipe import LoggingBlock
from uspft.prepare import host
from uspft.prepare.host import tracker_findings

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
    monkeypatch.setattr(host, "PCI", tmp_path / "pci")
    monkeypatch.setattr(host, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(host, "NODES", tmp_path)
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
        host.require_here(recipe(device=device, processes=1), asked, environment or {})
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
        host.DRIVER.write_text(NVRM)
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
    host.DRIVER.write_text(NVRM)
    said = "The NVIDIA driver on your system is too old (found version 12040)"
    why = f"the driver is 550.54.15, torch is built for CUDA 13.0, and {said}"
    assert told("auto").endswith(why) and told("cuda").endswith(why)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # as the driver's own library says
    assert told("cuda") == f"is cuda, and torch can use no GPU here: {why}"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    host.DRIVER.unlink()
    (machine / "nvidia0").touch()
    assert told("auto").endswith(why.replace("550.54.15", "not known"))
    says.append("No CUDA GPUs are available")
    assert "none is given to this process (SLURM: --gres=gpu:1" in told("auto")


Findings = list[tuple[str, str, str]]


def findings(
    monkeypatch: pytest.MonkeyPatch,
    here: set[str],
    environment: dict[str, str] | None = None,
    **logging: object,
) -> Findings:
    def version(package: str) -> str:
        if package not in here:
            raise PackageNotFoundError(package)
        return "3.13.0"

    monkeypatch.setattr(host, "version", version)
    monkeypatch.setattr(host, "WANDB_SETTINGS", ())
    recipe = Recipe.model_construct(logging=LoggingBlock.model_validate(logging))
    return [tuple(one) for one in tracker_findings(recipe, environment)]  # type: ignore[misc]


def test_what_is_not_installed_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {"tensorboard": True, "wandb": {}, "mlflow": {}}
    found = findings(monkeypatch, set(), **every)
    assert [(key, what) for key, what, _ in found] == [
        (f"logging.{name}", f"{name} is not installed") for name in every
    ]
    line = f"run `{sys.executable} -m pip install wandb`, or leave `wandb` out"
    assert found[1][2] == line
    assert findings(monkeypatch, {"tensorboard", "wandb", "mlflow-skinny"}, **every) == []
    assert findings(monkeypatch, set()) == []


def test_mlflow_that_refuses_folders_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(uri: str, **environment: str) -> Findings:
        asked = {"tracking_uri": uri} if uri else {}
        return findings(monkeypatch, {"mlflow"}, environment, mlflow=asked)

    for uri in ("file:///a/mlruns", "./mlruns"):
        ((key, what, remedy),) = told(uri)
        assert key == "logging.mlflow.tracking_uri"
        assert what == f"`{uri}` is a folder of files, which MLflow 3.13.0 refuses"
        assert "sqlite:///FILE" in remedy and "MLFLOW_ALLOW_FILE_STORE=true" in remedy
    for uri in ("", "sqlite:///a.db", "http://a:5000", "databricks", "databricks://profile"):
        assert told(uri) == []
    ((key, _, remedy),) = told("", MLFLOW_TRACKING_URI="file:///a")
    assert key == "logging.mlflow" and "leave MLFLOW_TRACKING_URI out" in remedy
    assert told("file:///a", MLFLOW_ALLOW_FILE_STORE="true") == []
    monkeypatch.setattr(host, "NO_FILE_STORE", Version("3.14"))
    assert told("file:///a") == []


def test_weights_and_biases_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def told(environment: dict[str, str] | None = None, **wandb: object) -> Findings:
        return findings(monkeypatch, {"wandb"}, environment or {}, wandb=wandb)

    ((key, what, remedy),) = told(project="mine")
    assert (key, what) == ("logging.wandb", "Weights & Biases has no API key on this machine")
    assert "wandb login" in remedy and "mode: offline" in remedy
    assert told(mode="offline") == told(settings={"api_key": "0"}) == []
    (tmp_path / ".netrc").write_text("machine example.org login user password 0\n")
    assert len(told()) == 1, "a password for another host"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert told() == []
    assert len(told({"NETRC": str(tmp_path / "none")})) == 1
    assert told({"NETRC": str(tmp_path / "none"), "WANDB_API_KEY": "0"}) == []
