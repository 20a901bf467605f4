"""This host: how a command was started on it, its GPUs, and what a recipe asks for that it lacks.

torch, whose import takes seconds, is imported only where there may be a GPU to be asked.
"""

from __future__ import annotations

import ctypes
import netrc
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import Version

from uspft.called import to_install, to_type
from uspft.config import Fault, Finding, Recipe
from uspft.config.algorithms import AUTO
from uspft.config.problems import counted
from uspft.launcher.meeting import Meeting
from uspft.launcher.supervise import Loss

CONFIGS = Path(__file__).parents[2] / "configs"
"""The folder beside the package that holds shapes of hub models and fragments of recipes."""


@dataclass(frozen=True)
class Invocation:
    """A command as typed, the environment of its child processes, its cache folder and hosts."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path(".cache")
    ranks: int | None = None
    """The N of `--ranks N`: another number of processes than this machine would start."""
    meeting: Meeting = field(default_factory=Meeting)
    """The line to the other hosts of the run."""
    losses: tuple[Loss, ...] = ()
    """How earlier starts of the run were lost, where this one follows them."""

    def data_cache(self, recipe: Recipe) -> Path:
        """Return the folder in which tokenised data is kept."""
        return Path(recipe.data.cache_dir or self.cache / "data")

    def to_type(self, *words: str) -> str:
        """Return a command of uspft with these words, to be typed where the user stands."""
        return to_type(self.environment, *words)


LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so")
"""The drivers' libraries of which torch needs one to see a GPU."""
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


def has_driver() -> bool:
    """Tell whether a driver of GPUs is on this host."""
    for name in LIBRARIES:
        with suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def gpu_count() -> int:
    """Return how many GPUs torch sees on this host; it is not imported where there is no driver."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str | None:
    """Return the name of this host's first GPU, or None where there is none to be asked."""
    if gpu_count():
        import torch

        with suppress(AssertionError, RuntimeError):  # no CUDA, or a driver that does not answer
            return torch.cuda.get_device_name(0)
    return None


def require_here(recipe: Recipe, asked: str, environment: Mapping[str, str]) -> None:
    """Check that this host has the GPUs and the attention kernel that the recipe names.

    `check` does without this, since it may run elsewhere. asked: `launch.device` before `auto` was
    settled. Raises Fault where something is lacking, and where `auto` would pass over a GPU that is
    in this machine.
    """
    from uspft.kernels.choose import is_installed

    count, wanted, name = usable(), recipe.launch.processes, recipe.model.attention
    why = why_none(environment) if count == 0 else None
    if recipe.launch.device == "cpu" and asked == AUTO and why:
        what = f"is auto, and would pass over the NVIDIA GPU of this host: {why}"
        raise Fault([(KEY, what, f"mend that, {ANYWAY}")])
    if recipe.launch.device == "cuda" and count == 0:
        what = f"is {asked}, and torch can use no GPU here: {why or 'there is none'}"
        raise Fault([(KEY, what, f"start it on a host that has one, {ANYWAY}")])
    if recipe.launch.device == "cuda" and isinstance(wanted, int):
        if wanted > count and not shares_gpus(environment):
            what = f"{wanted} processes on this host, which has {counted(count, 'GPU')}"
            remedy = f"start at most {count}, or start it on a host that has them"
            raise Fault([("launch.processes", what, remedy)])
        _require_flash(min(wanted, count))
    if name != AUTO and not is_installed(name):
        what = f"is {name}, and its package is not installed in {sys.prefix}"
        raise Fault([("model.attention", what, "install it there, or write auto")])


def shares_gpus(environment: Mapping[str, str]) -> bool:
    """Tell whether more ranks than this host has GPUs may share them, to try a layout out."""
    return environment.get("USPFT_SHARE_GPUS") == "1"


def usable() -> int:
    """Return how many GPUs torch can use here.

    torch counts those that the driver manages, also where it is too old for this torch: only a
    start of CUDA tells.
    """
    import torch

    with suppress(AssertionError, RuntimeError):
        if count := torch.cuda.device_count():
            torch.cuda.init()
            return count
    return 0


def why_none(environment: Mapping[str, str]) -> str | None:
    """Return why torch can use no GPU although there is one in this machine.

    Returns None where there is none, or where the user hides it.
    """
    import torch

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
    with suppress(OSError):
        line = DRIVER.read_text().partition("\n")[0]
        if found := re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?", line):
            return found[0]
    return None


def _require_flash(processes: int) -> None:
    """Check that the GPU of each process is new enough; no CUDA context is made on it. Raises
    Fault."""
    import torch

    for index in range(processes):
        major, minor = torch.cuda.get_device_capability(index)
        if major < AMPERE:
            name = torch.cuda.get_device_name(index)
            what = (
                f"is cuda, and GPU {index} of this host, {name}, has compute capability "
                f"{major}.{minor}: bfloat16 and flash attention need {AMPERE}.0 (Ampere) or newer"
            )
            remedy = f"start it on a host with newer GPUs, {ANYWAY}"
            raise Fault([(KEY, what, remedy)])


PACKAGES = {
    "logging.tensorboard": ("tensorboard",),
    "logging.wandb": ("wandb",),
    "logging.mlflow": ("mlflow", "mlflow-skinny"),
}
"""By key the packages of which one must be installed, the first of which is to be recommended."""
NO_FILE_STORE = Version("3.13")
"""The version of MLflow from which it keeps no runs in a folder of plain files."""
_NOT_FOLDERS = ("databricks", "databricks-uc", "uc")  # URIs of MLflow that have no scheme
_WANDB_HOST = "api.wandb.ai"
# What may log in, change the host or take a run offline; Weights & Biases reads it by itself.
WANDB_VARIABLES = tuple(
    f"WANDB_{name}"
    for name in "API_KEY IDENTITY_TOKEN_FILE MODE DISABLED BASE_URL CONFIG_DIR".split()
)
WANDB_SETTINGS = ("wandb/settings", "~/.config/wandb/settings")


def tracker_findings(recipe: Recipe, environment: Mapping[str, str] | None) -> list[Finding]:
    """Return a finding for each tracker that the recipe asks for and that could not start here.

    environment: what trackers read; None: only what is not installed is looked for.
    """
    wandb, mlflow = recipe.logging.wandb, recipe.logging.mlflow
    wanted = (recipe.logging.tensorboard, wandb is not None, mlflow is not None)
    found: list[Finding] = []
    for (key, packages), is_asked in zip(PACKAGES.items(), wanted, strict=True):
        installed = [one for one in map(_version, packages) if one is not None]
        if is_asked and not installed:
            line, name = f"{sys.executable} -m pip install {packages[0]}", key.partition(".")[2]
            remedy = f"run `{line}`, or leave `{name}` out"
            found.append((key, f"{packages[0]} is not installed", remedy))
        elif is_asked and environment is not None and key == "logging.mlflow":
            found += _file_store(mlflow or {}, installed[0], environment)
        elif is_asked and environment is not None and key == "logging.wandb":
            found += _logged_out(wandb or {}, environment)
    return found


def _version(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def _file_store(
    asked: Mapping[str, object], installed: Version, environment: Mapping[str, str]
) -> list[Finding]:
    """Return a finding where MLflow's runs are to be kept in a folder, and it keeps none there."""
    own = asked.get("tracking_uri")
    uri = str(own or environment.get("MLFLOW_TRACKING_URI", ""))
    allowed = environment.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    is_folder = uri and urlsplit(uri).scheme in ("", "file") and uri not in _NOT_FOLDERS
    if not is_folder or allowed or installed < NO_FILE_STORE:
        return []
    name = "it" if own else "MLFLOW_TRACKING_URI"
    key = "logging.mlflow" + ".tracking_uri" * bool(own)
    what = f"`{uri}` is a folder of files, which MLflow {installed} refuses"
    remedy = f"write sqlite:///FILE, leave {name} out, or set MLFLOW_ALLOW_FILE_STORE=true"
    return [(key, what, remedy)]


def _logged_out(asked: Mapping[str, object], environment: Mapping[str, str]) -> list[Finding]:
    """Return a finding where Weights & Biases is to be reached, and nothing logs in."""
    told = [name for name in WANDB_VARIABLES if environment.get(name)]
    told += [file for file in WANDB_SETTINGS if os.path.exists(os.path.expanduser(file))]
    if asked.get("mode") == "offline" or "settings" in asked or told or _has_netrc(environment):
        return []
    what = "Weights & Biases has no API key on this machine"
    remedy = "run `wandb login`, set WANDB_API_KEY, or write `mode: offline` there"
    return [("logging.wandb", what, remedy)]


def _has_netrc(environment: Mapping[str, str]) -> bool:
    """Tell whether the file of passwords in the home folder has one for Weights & Biases."""
    home = Path.home()
    named = environment.get("NETRC")
    for file in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        with suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(_WANDB_HOST):
                return True
    return False
