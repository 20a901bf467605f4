"""`rank`: one process of a run, started by `train` and never by hand."""

from __future__ import annotations

import re
import signal
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from uspft.commands.joining import joined
from uspft.commands.place import Place
from uspft.commands.shared import require_shared
from uspft.durable import write_text
from uspft.job import Job
from uspft.output import RECIPE


def rank(folder: Path, place: Place) -> int:
    """Be one rank of the job in `folder`. Raises what the run raises."""
    job = Job.read(folder)
    logs_transfers = bool(job.recipe.deepspeed.comms_logger)
    with joined(job.recipe.launch.device, place.environment, talks=logs_transfers) as device:
        assert job.recipe.output_dir is not None
        require_shared(job.recipe.output_dir, place.environment)
        renewed = job.lease.renewed() if job.lease and dist.get_rank() == 0 else nullcontext()
        with renewed:
            code = _run(job, device)
        if logs_transfers:
            import deepspeed

            deepspeed.comm.log_summary()
    return code


def _run(job: Job, device: torch.device) -> int:
    from uspft.assemble import assemble
    from uspft.loop import Interrupted, train

    first = dist.get_rank() == 0
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


def _settle_attention(job: Job, name: str, refused: list[str]) -> None:
    """The kernel that `auto` became in the recipe that the run leaves: only a GPU could tell.

    refused: a line for each one that is installed and was tried before.
    """
    output = job.recipe.output_dir
    assert output is not None
    text = (output / RECIPE).read_text()
    settled = re.sub(r"^(\s+attention:) auto$", rf"\1 {name}", text, count=1, flags=re.MULTILINE)
    write_text(output / RECIPE, settled)
    for line in refused:
        print(f"model.attention: {line}; using {name}", flush=True)
    print(f"attention kernel: {name}", flush=True)
