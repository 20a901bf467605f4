"""How uspft was started, so that commands in messages begin in the same way; and imports without
garbage collection."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "USPFT_PROGRAM"
"""The environment variable with the name of the started program, as it was typed."""
LAUNCH = Path(__file__).parents[1] / "launch.sh"
"""The project's launch.sh, next to the package; an installed package has none."""


def called_as(started: str) -> str:
    """Return the beginning of the command line that started a program, quoted for a shell.

    started: the program's name, which is its whole path where a shell has looked it up.
    """
    name, quoted = Path(started).name, shlex.quote(started)
    if name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m uspft"
    if shutil.which(name) == started:
        return name
    runs = name == "uspft" or ("/" in started and os.access(started, os.X_OK))
    return quoted if runs else f"bash {quoted}"


def to_type(environment: Mapping[str, str], *words: str) -> str:
    """Return a command of uspft with these words, as the user would type it.

    environment: of the command, which says how it was started.
    """
    return " ".join([called_as(environment.get(VARIABLE, "uspft")), *map(shlex.quote, words)])


def to_install(environment: Mapping[str, str]) -> str:
    """Return the command that installs uspft, which is launch.sh's however this one was started."""
    called = environment.get(VARIABLE, "")
    launch = called if Path(called).name == LAUNCH.name else str(LAUNCH)
    return f"{called_as(launch)} --install"


def begin_imports() -> None:
    """Stop garbage collection until `keep_imports`: imported objects all stay, and searching them
    for garbage takes a fifth of the imports' time."""
    gc.disable()


def keep_imports() -> None:
    """Resume garbage collection, excluding imported objects for good.

    Without a call of `begin_imports`, as in a process with other work, this does nothing.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
