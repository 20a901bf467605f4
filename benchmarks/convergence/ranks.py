"""One spawn of ranks that trains the runs of the convergence experiment, one after another."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from uspft.assemble import assemble
from uspft.data.rows.loader import StepLoader
from uspft.data.rows.stream import Row, RowStream, training_rows
from uspft.engine.quarantine import prepare_deepspeed
from uspft.job import Job
from uspft.mesh import Groups
from uspft.training.loop import train


class Backwards:
    """This is a stream in which the rows of each step stand in reverse order."""

    def __init__(self, stream: RowStream, rows_per_step: int) -> None:
        self._stream, self._rows = stream, rows_per_step

    def row(self, index: int) -> Row:
        step, place = divmod(index, self._rows)
        return self._stream.row(step * self._rows + self._rows - 1 - place)


def train_all(jobs: Sequence[tuple[Path, bool]], ranks: int) -> None:
    """The ranks train each job: its folder, and whether the rows of a step are taken backwards."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, folder, jobs), nprocs=ranks, start_method="spawn")


def _rank(rank: int, ranks: int, folder: str, jobs: Sequence[tuple[Path, bool]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["DS_ACCELERATOR"] = "cpu"
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    prepare_deepspeed()
    for job, backwards in jobs:
        _train(Job.read(job), backwards)
    dist.barrier()
    dist.destroy_process_group()


def _train(job: Job, backwards: bool) -> None:
    run = assemble(job, torch.device("cpu"), Groups())
    if backwards:
        data, rows = job.recipe.data, job.recipe.training.global_batch_size
        stream: Any = Backwards(training_rows(data, job.corpus, job.recipe.seed), rows)
        loader = StepLoader(
            stream,
            run.world,
            row_tokens=data.sequence_length,
            rows_per_step=rows,
            rows_per_batch=job.recipe.training.micro_batch_size,
        )
        run = dataclasses.replace(run, loader=loader)
    train(run, lambda: False)
    run.engine.close()
