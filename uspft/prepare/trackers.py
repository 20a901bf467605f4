"""Trackers that a recipe asks for and that could not start: each is told with what to do."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import Version

from uspft.config import Finding, Recipe

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
    asked = recipe.logging
    wanted = {
        "logging.tensorboard": asked.tensorboard,
        "logging.wandb": asked.wandb is not None,
        "logging.mlflow": asked.mlflow is not None,
    }
    found: list[Finding] = []
    for key, is_asked in wanted.items():
        if not is_asked:
            continue
        installed = [one for one in map(_version, PACKAGES[key]) if one is not None]
        if not installed:
            found.append((key, f"{PACKAGES[key][0]} is not installed", _remedy(key)))
        elif environment is None:
            continue
        elif key == "logging.mlflow":
            found += _file_store(recipe, installed[0], environment)
        elif key == "logging.wandb":
            found += _logged_out(recipe, environment)
    return found


def _remedy(key: str) -> str:
    line = f"{sys.executable} -m pip install {PACKAGES[key][0]}"
    return f"run `{line}`, or leave `{key.partition('.')[2]}` out"


def _version(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def _file_store(
    recipe: Recipe, installed: Version, environment: Mapping[str, str]
) -> list[Finding]:
    """Return a finding where MLflow's runs are to be kept in a folder, and it keeps none there."""
    own = (recipe.logging.mlflow or {}).get("tracking_uri")
    uri = own or environment.get("MLFLOW_TRACKING_URI", "")
    allowed = environment.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    is_folder = uri and urlsplit(uri).scheme in ("", "file") and uri not in _NOT_FOLDERS
    if not is_folder or allowed or installed < NO_FILE_STORE:
        return []
    key, name = "logging.mlflow", "MLFLOW_TRACKING_URI"
    if own:
        key, name = f"{key}.tracking_uri", "it"
    what = f"`{uri}` is a folder of files, which MLflow {installed} refuses"
    remedy = f"write sqlite:///FILE, leave {name} out, or set MLFLOW_ALLOW_FILE_STORE=true"
    return [(key, what, remedy)]


def _logged_out(recipe: Recipe, environment: Mapping[str, str]) -> list[Finding]:
    """Return a finding where Weights & Biases is to be reached, and nothing logs in."""
    asked = recipe.logging.wandb or {}
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
    files = [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file).authenticators(_WANDB_HOST):
                return True
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
            continue
    return False
