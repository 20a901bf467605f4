"""`rank`: one process of a run, started by `train` and never by hand."""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uspft import __version__
from uspft.commands.joining import joined
from uspft.commands.place import Place
from uspft.job import Job

LIBRARIES = (
    *("torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "tokenizers"),
    "numpy",
)


def rank(folder: Path, place: Place) -> int:
    """Be one rank of the job in `folder`. Raises what the run raises."""
    job = Job.read(folder)
    logs_transfers = bool(job.recipe.deepspeed.comms_logger)
    with joined(job.recipe.launch.device, place.environment, talks=logs_transfers) as device:
        code = _run(job, device)
        if logs_transfers:
            import deepspeed

            deepspeed.comm.log_summary()
    return code


def _run(job: Job, device: torch.device) -> int:
    from uspft.assemble import assemble
    from uspft.loop import Interrupted, train

    first = dist.get_rank() == 0
    if first:
        _describe_environment(job, device)
    run = assemble(job, device)
    if first and job.recipe.model.attention == "auto":
        _settle_attention(job, run.world.kernel.name, run.refused)
    asked: list[int] = []  # from here on there is something to save
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    code = 0
    try:
        train(run, lambda: bool(asked))
    except Interrupted:
        code = 130
    run.engine.close()
    return code


def _describe_environment(job: Job, device: torch.device) -> None:
    """environment.json: what one needs to know to run it again."""
    output = job.recipe.output_dir
    assert output is not None
    found: dict[str, Any] = {
        "command": job.command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"uspft": __version__} | {name: version(name) for name in LIBRARIES},
        "ranks": dist.get_world_size(),
        "gpus": [],
        "git_commit": _git_commit(),
    }
    if device.type == "cuda":
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
    (output / "environment.json").write_text(json.dumps(found, indent=2) + "\n")


def _settle_attention(job: Job, name: str, refused: list[str]) -> None:
    """The kernel that `auto` became in the recipe that the run leaves: only a GPU could tell.

    refused: a line for each one that is installed and was tried before.
    """
    output = job.recipe.output_dir
    assert output is not None
    text = (output / "recipe.yaml").read_text()
    settled = re.sub(r"^(\s+attention:) auto$", rf"\1 {name}", text, count=1, flags=re.MULTILINE)
    (output / "recipe.yaml").write_text(settled)
    for line in refused:
        print(f"model.attention: {line}; using {name}", flush=True)
    print(f"attention kernel: {name}", flush=True)


def _git_commit() -> str | None:
    """The commit of uspft's own checkout, where it is one and there is a git to ask."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() or None
