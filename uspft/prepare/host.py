"""This host: how the command was started, its GPUs, and what a recipe needs that it lacks.

torch takes seconds to import, and is imported only where there may be a GPU.
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
"""The folder next to the package with configurations of hub models and recipe fragments."""


@dataclass(frozen=True)
class Invocation:
    """A command as typed, the environment of its child processes, its cache folder and hosts."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path(".cache")
    ranks: int | None = None
    """The N of `--ranks N`, in place of the number of processes that this machine would start."""
    meeting: Meeting = field(default_factory=Meeting)
    """The connection to the other hosts of the run."""
    losses: tuple[Loss, ...] = ()
    """How earlier starts of the run were lost, if this one follows them."""

    def data_cache(self, recipe: Recipe) -> Path:
        """Return the folder in which tokenised data is kept."""
        return Path(recipe.data.cache_dir or self.cache / "data")

    def to_type(self, *words: str) -> str:
        """Return a command line of uspft with these words, as the user would type it."""
        return to_type(self.environment, *words)


LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so")
"""GPU driver libraries, of which torch needs one."""
AMPERE = 8
"""The major compute capability from which GPUs have flash attention, and bfloat16 in hardware."""
PCI = Path("/sys/bus/pci/devices")
NODES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""The PCI vendor id of NVIDIA, and the beginning of the PCI class of GPUs."""
NONE_GIVEN = "No CUDA GPUs are available"
"""torch's message where the driver works but shows no GPU to this process."""
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""
KEY, ANYWAY = "launch.device", "or write launch.device: cpu"


def has_driver() -> bool:
    """Tell whether this host has a GPU driver."""
    for name in LIBRARIES:
        with suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def gpu_count() -> int:
    """Return how many GPUs torch sees on this host, without importing it if there is no driver."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str | None:
    """Return the name of this host's first GPU, or None without one."""
    if gpu_count():
        import torch

        with suppress(AssertionError, RuntimeError):  # no CUDA, or a driver that does not answer
            return torch.cuda.get_device_name(0)
    return None


def require_here(recipe: Recipe, asked: str, environment: Mapping[str, str]) -> None:
    """Check that this host has the GPUs and the attention kernel that the recipe names.

    `check` skips this, since it may run elsewhere. asked: `launch.device` before `auto` was
    resolved. Raises Fault where something is missing, and where `auto` would ignore a GPU of this
    machine.
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
    """Tell whether more ranks may share this host's GPUs than it has, to try out a layout."""
    return environment.get("USPFT_SHARE_GPUS") == "1"


def usable() -> int:
    """Return how many GPUs torch can use here.

    torch also counts GPUs whose driver is too old for it; only initialising CUDA shows that.
    """
    import torch

    with suppress(AssertionError, RuntimeError):
        if count := torch.cuda.device_count():
            torch.cuda.init()
            return count
    return 0


def why_none(environment: Mapping[str, str]) -> str | None:
    """Return why torch cannot use a GPU that is in this machine.

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
    """Tell whether there is a device node of an NVIDIA GPU, which sandboxes show without a
    PCI bus."""
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
    """Return the version of the loaded NVIDIA driver, or None."""
    with suppress(OSError):
        line = DRIVER.read_text().partition("\n")[0]
        if found := re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?", line):
            return found[0]
    return None


def _require_flash(processes: int) -> None:
    """Check that the GPU of each process is new enough, without creating a CUDA context. Raises
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
"""By key, packages of which one must be installed; messages recommend the first."""
NO_FILE_STORE = Version("3.13")
"""From this version MLflow does not store runs in plain folders."""
_NOT_FOLDERS = ("databricks", "databricks-uc", "uc")  # MLflow's URIs without a scheme
_WANDB_HOST = "api.wandb.ai"
# Variables that log in, change the host or take a run offline; Weights & Biases reads them.
WANDB_VARIABLES = tuple(
    f"WANDB_{name}"
    for name in "API_KEY IDENTITY_TOKEN_FILE MODE DISABLED BASE_URL CONFIG_DIR".split()
)
WANDB_SETTINGS = ("wandb/settings", "~/.config/wandb/settings")


def tracker_findings(recipe: Recipe, environment: Mapping[str, str] | None) -> list[Finding]:
    """Return a finding for each tracker in the recipe that could not start here.

    environment: of the trackers; None: only check whether they are installed.
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
    """Return a finding where MLflow's runs should go to a folder, and its version does not support
    that."""
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
    """Return a finding where Weights & Biases would be online without credentials."""
    told = [name for name in WANDB_VARIABLES if environment.get(name)]
    told += [file for file in WANDB_SETTINGS if os.path.exists(os.path.expanduser(file))]
    if asked.get("mode") == "offline" or "settings" in asked or told or _has_netrc(environment):
        return []
    what = "Weights & Biases has no API key on this machine"
    remedy = "run `wandb login`, set WANDB_API_KEY, or write `mode: offline` there"
    return [("logging.wandb", what, remedy)]


def _has_netrc(environment: Mapping[str, str]) -> bool:
    """Tell whether the home folder's .netrc has credentials for Weights & Biases."""
    home = Path.home()
    named = environment.get("NETRC")
    for file in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        with suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(_WANDB_HOST):
                return True
    return False
