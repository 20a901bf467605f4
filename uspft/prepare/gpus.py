"""The GPUs of this host: that a run has those that it asks for, and why it may see none."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from uspft.called import to_install
from uspft.config import Fault, Recipe
from uspft.config.algorithms import AUTO
from uspft.config.problems import counted
from uspft.kernels.choose import is_installed

AMPERE = 8
"""The major compute capability from which GPUs have flash attention, and bfloat16 in hardware."""
PCI = Path("/sys/bus/pci/devices")
NODES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""The vendor, and the beginning of the class, of a GPU on the PCI bus."""
NONE_GIVEN = "No CUDA GPUs are available"
"""What torch says where the driver works and shows this process no GPU."""
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES with which a user hides all GPUs."""
KEY, ANYWAY = "launch.device", "or write launch.device: cpu"


def require_here(recipe: Recipe, asked: str, environment: Mapping[str, str]) -> None:
    """Check that this host has the GPUs and the attention kernel that the recipe names.

    `check` does without this, since it may run elsewhere. asked: `launch.device` before `auto` was
    settled. Raises Fault where something is lacking, and where `auto` would pass over a GPU that is
    in this machine.
    """
    count, wanted = usable(), recipe.launch.processes
    why = why_none(environment) if count == 0 else None
    if recipe.launch.device == "cpu" and asked == AUTO and why:
        what = f"is auto, and would pass over the NVIDIA GPU of this host: {why}"
        raise Fault([(KEY, what, f"mend that, {ANYWAY}")])
    if recipe.launch.device == "cuda" and count == 0:
        what = f"is {asked}, and torch can use no GPU here: {why or 'there is none'}"
        raise Fault([(KEY, what, f"start it on a host that has one, {ANYWAY}")])
    if recipe.launch.device == "cuda" and isinstance(wanted, int):
        if wanted > count:
            what = f"{wanted} processes on this host, which has {counted(count, 'GPU')}"
            remedy = f"start at most {count}, or start it on a host that has them"
            raise Fault([("launch.processes", what, remedy)])
        _require_flash(wanted)
    name = recipe.model.attention
    if name != AUTO and not is_installed(name):
        what = f"is {name}, and its package is not installed in {sys.prefix}"
        raise Fault([("model.attention", what, "install it there, or write auto")])


def usable() -> int:
    """Return how many GPUs torch can use here.

    torch counts those that the driver manages, also where it is too old for this torch: only a
    start of CUDA tells.
    """
    count = torch.cuda.device_count()
    try:
        if count:
            torch.cuda.init()
    except (AssertionError, RuntimeError):
        return 0
    return count


def why_none(environment: Mapping[str, str]) -> str | None:
    """Return why torch can use no GPU although there is one in this machine.

    Returns None where there is none, or where the user hides it.
    """
    driver = driver_version()
    if environment.get("CUDA_VISIBLE_DEVICES") in HIDDEN or not (driver or in_machine()):
        return None
    if torch.version.cuda is None:
        return (
            f"torch here is the CPU build ({torch.__version__} in {sys.prefix}); "
            f"`{to_install(environment)}` brings the one for GPUs"
        )
    if driver is None and not has_node():
        return "no NVIDIA driver is loaded"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        said = " ".join(str(error).split()).split(". ")[0]
        if NONE_GIVEN not in said:
            known, built = driver or "not known", torch.version.cuda
            return f"the driver is {known}, torch is built for CUDA {built}, and {said}"
    return "none is given to this process (SLURM: --gres=gpu:1; containers: --gpus all)"


def has_node() -> bool:
    """Tell whether there is a device node of an NVIDIA GPU, which sandboxes show without a bus."""
    return any(NODES.glob("nvidia[0-9]*"))


def in_machine() -> bool:
    """Tell whether this machine shows an NVIDIA GPU: a device node, or one on its PCI bus."""
    try:
        return has_node() or any(
            (device / "vendor").read_text().strip() == NVIDIA
            and (device / "class").read_text().startswith(DISPLAY)
            for device in PCI.iterdir()
        )
    except OSError:
        return False


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver that is loaded, or None."""
    try:
        found = re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?", DRIVER.read_text().partition("\n")[0])
    except OSError:
        return None
    return found[0] if found else None


def _require_flash(processes: int) -> None:
    """Check that the GPU of each process is new enough. Raises Fault where one is too old.

    The check makes no CUDA context on the GPUs.
    """
    for index in range(processes):
        major, minor = torch.cuda.get_device_capability(index)
        if major < AMPERE:
            name = torch.cuda.get_device_name(index)
            what = (
                f"is cuda, and GPU {index} of this host, {name}, has compute capability "
                f"{major}.{minor}: bfloat16 and flash attention need {AMPERE}.0 (Ampere) or newer"
            )
            remedy = "start it on a host with newer GPUs, or write launch.device: cpu"
            raise Fault([(KEY, what, remedy)])
