"""`rank`: one process of a run, started by `train` and never by hand."""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import warnings
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uspft import __version__
from uspft.commands.place import Place
from uspft.job import Job

TIMEOUT = timedelta(minutes=30)
"""After it a collective that waits for a lost rank fails and says which."""
LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def rank(folder: Path, place: Place) -> int:
    """Be one rank of the job in `folder`. Raises what the run raises."""
    environment = place.environment
    number, local = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor passes on what it is told
    job = Job.read(folder)
    device = _device(job.recipe.launch.device, local)
    _quiet()
    _join(environment, device)

    import deepspeed

    from uspft.assemble import assemble
    from uspft.engine.quarantine import prepare_deepspeed
    from uspft.loop import Interrupted, train

    prepare_deepspeed(talks=bool(job.recipe.deepspeed.comms_logger))
    if number == 0:
        _describe_environment(job, device)
    run = assemble(job, device)
    if number == 0 and job.recipe.model.attention == "auto":
        _settle_attention(job, run.world.kernel.name)
    asked: list[int] = []  # from here on there is something to save
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    code = 0
    try:
        train(run, lambda: bool(asked))
    except Interrupted:
        code = 130
    if job.recipe.deepspeed.comms_logger:
        deepspeed.comm.log_summary()
    # In order, or gloo may abort a process whose work is done.
    run.engine.close()
    dist.barrier()
    dist.destroy_process_group()
    return code


def _device(kind: str, local: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _quiet() -> None:
    """Silence what means nothing to a user of uspft; errors still come through."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


def _join(environment: Mapping[str, str], device: torch.device) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    address = environment["MASTER_ADDR"]
    host = f"[{address}]" if ":" in address else address
    where = f"tcp://{host}:{environment['MASTER_PORT']}"
    dist.init_process_group(
        backend,
        init_method=where,
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


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


def _settle_attention(job: Job, name: str) -> None:
    """The kernel that `auto` became in the recipe that the run leaves: only a GPU could tell."""
    output = job.recipe.output_dir
    assert output is not None
    text = (output / "recipe.yaml").read_text()
    settled = re.sub(r"^(\s+attention:) auto$", rf"\1 {name}", text, count=1, flags=re.MULTILINE)
    (output / "recipe.yaml").write_text(settled)
    print(f"attention kernel: {name}", flush=True)


def _git_commit() -> str | None:
    """The commit of uspft's own checkout, where it is one and there is a git to ask."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() or None
