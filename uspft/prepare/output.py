"""The output folder before ranks start: one run holds it, and an earlier run's files go aside."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from uspft import __version__
from uspft.checkpoint.folder import CHECKPOINTS, Checkpoint
from uspft.config import Fault, Recipe, dump
from uspft.config.algorithms import AUTO
from uspft.durable import write_text
from uspft.launcher import Hosts
from uspft.lease import Held, Lease
from uspft.prepare.invocation import Invocation
from uspft.written import (
    ENVIRONMENT,
    RECIPE,
    clear_partial,
    later_than,
    outdate_exports,
    set_aside,
    written,
)

KEY, ANOTHER = "output_dir", "name another folder"


def output_of(recipe: Recipe) -> Path:
    """Return the output folder of a loaded recipe, which always has one."""
    assert recipe.output_dir is not None
    return recipe.output_dir


@contextmanager
def held_output(output: Path, screen: Console) -> Iterator[Lease]:
    """Hold the output folder inside the `with` block, where no other run may use it.

    Yields the lease. Raises Fault where another run holds the folder or it cannot be written. A
    folder that was made here and is still empty is deleted in the end.
    """
    made = not output.exists()
    try:
        lease = Lease.take(output.resolve(), lambda line: screen.print(line, markup=False))
    except Held as held:
        what = f"a run is alive in `{output}`: {held}"
        raise Fault([(KEY, what, f"wait for its end, stop it, or {ANOTHER}")]) from held
    except OSError as error:
        raise not_written(output, error) from error
    try:
        with lease.renewed():
            clear_partial(output)
            yield lease
    finally:
        with suppress(OSError):
            if lease.is_held():
                clear_partial(output)
            lease.release()
            if made and not any(output.iterdir()):
                output.rmdir()


def not_written(output: Path, error: OSError) -> Fault:
    what = f"`{output}` cannot be written: {error.strerror}"
    return Fault([(KEY, what, ANOTHER)])


def open_output(
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    hosts: Hosts,
    place: Invocation,
    comments: Mapping[str, str] | None = None,
) -> Path | None:
    """Move aside what an earlier run left, and write environment.json and the resolved recipe.

    Where ranks are to choose the attention kernel, they write the recipe. comments: what stands
    above its keys. Returns the folder that
    things were moved to, or None where there were none. Raises Fault.
    """
    output = output_of(recipe)
    here = (output / CHECKPOINTS).resolve()
    try:
        if checkpoint and checkpoint.folder.resolve().parent == here:
            moved = set_aside(output, later_than(output, checkpoint.step))
            outdate_exports(output)
        else:
            moved = set_aside(output, written(output))  # no host's ranks log there before all may
        write_text(output / ENVIRONMENT, environment_of(recipe, hosts, place))
        if recipe.model.attention != AUTO:
            write_text(output / RECIPE, dump(recipe, comments))
    except OSError as error:
        raise not_written(output, error) from error
    return moved


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
