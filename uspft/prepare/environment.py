"""The file environment.json: what one needs to know of a run's surroundings to run it again."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from uspft import __version__
from uspft.config import Recipe
from uspft.launcher import Hosts
from uspft.prepare.invocation import Invocation

LIBRARIES = (
    *("torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "tokenizers"),
    "numpy",
)


def environment_of(recipe: Recipe, hosts: Hosts, place: Invocation) -> str:
    """Return the surroundings of a run as JSON text.

    They are the command, versions, the number of ranks, this host's GPUs, and the commit of uspft's
    own checkout.
    """
    processes, gpus = recipe.launch.processes, []
    assert isinstance(processes, int)
    if recipe.launch.device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {
        "command": place.command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"uspft": __version__} | {name: version(name) for name in LIBRARIES},
        "ranks": processes * hosts.count,
        "gpus": gpus,
        "git_commit": _git_commit(),
    }
    return json.dumps(found, indent=2) + "\n"


def _git_commit() -> str | None:
    """Return the commit of uspft's own checkout; None if it is none, or there is no git to ask."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() or None
