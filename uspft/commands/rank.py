"""The command `rank`: one process of a run, which `train` starts and nobody by hand."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from uspft.comm import deadline, set_deadline
from uspft.commands.imports import keep_imports
from uspft.commands.joining import joined, ranks_of_host, require_shared
from uspft.config import Recipe, dump
from uspft.config.algorithms import AUTO
from uspft.config.problems import Interrupted
from uspft.config.strategies import layouts_of
from uspft.data.rows.orders import Orders, searching_beside
from uspft.durable import write_text
from uspft.job import Job
from uspft.launcher import Waiting
from uspft.prepare.invocation import Invocation
from uspft.prepare.known import Known
from uspft.prepare.resolve import resolve
from uspft.written import RECIPE


def rank(folder: Path, place: Invocation, waiting: Waiting) -> int:
    """Be one rank of the job in `folder`, and return its exit code. Raises what the run raises.

    waiting: says what this rank waits for until the run has a display of its own.
    """
    job = Job.read(folder)
    logs_transfers = bool(job.recipe.deepspeed.comms_logger)
    with (
        searching_beside() if splits_rows(job.recipe) else nullcontext() as orders,
        joined(job.recipe.launch, place.environment, talks=logs_transfers) as device,
    ):
        assert job.recipe.output_dir is not None
        require_shared(job.recipe.output_dir, place.environment)
        renewed = job.lease.renewed() if job.lease and dist.get_rank() == 0 else nullcontext()
        with renewed:
            code = _run(job, device, waiting, orders, place.environment)
        if logs_transfers:
            import deepspeed

            deepspeed.comm.log_summary()
    return code


def splits_rows(recipe: Recipe) -> bool:
    """Tell whether ranks share rows under any of a recipe's layouts."""
    every = [one.parallel_config for one in layouts_of(recipe)]
    return any(p.context_parallel > 1 or p.tensor_parallel_algo == "meshslice" for p in every)


def _run(
    job: Job,
    device: torch.device,
    waiting: Waiting,
    orders: Orders | None,
    environment: Mapping[str, str],
) -> int:
    waiting.now("the model to be built")
    from uspft.assemble import assemble
    from uspft.kernels import slower
    from uspft.mesh import Groups
    from uspft.training.loop import train

    keep_imports()
    first = dist.get_rank() == 0
    limit = deadline(job.recipe.launch.timeout_minutes, first_step=True)
    run = assemble(job, device, Groups(limit, ranks_of_host(environment)), orders=orders)
    set_deadline(limit)  # in DeepSpeed's groups too
    waiting.close()
    if first and job.recipe.model.attention == AUTO:
        leave_recipe(job, run.world.kernel.name, run.refused)
    if first and (line := slower(run.world.kernel, device)):
        print(f"model.attention: {line}", flush=True)
    asked: list[int] = []  # from here on there is something to save
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    code = 0
    try:
        train(run, lambda: bool(asked))
    except Interrupted:
        code = 130
    run.loader.close()
    run.engine.close()
    return code


def leave_recipe(job: Job, kernel: str, refused: list[str]) -> None:
    """Write the recipe that the run leaves, now that the ranks have found which kernel works.

    refused: a line for each kernel that is installed and was tried before, in vain.
    """
    recipe = resolve(job.recipe, Known(kernel=kernel))
    assert recipe.output_dir is not None
    write_text(recipe.output_dir / RECIPE, dump(recipe, job.comments))
    for line in refused:
        print(f"model.attention: {line}; using {kernel}", flush=True)
    print(f"attention kernel: {kernel}", flush=True)
