"""Starts the ranks of a case, waits for them, and ends them whatever happens; what a rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.lab.results import ROOT

TIMEOUT = timedelta(hours=1)
"""The other ranks wait at a barrier for so long while one process does all."""
Tell = Callable[[str], None]
"""It takes a line of progress."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a case: python -m MODULE FOLDER RANK on each, which calls `as_rank`."""

    module: str
    number: int
    hosts: Sequence[Sequence[str]]
    """For each host, the words to put before a command that runs there."""


def as_rank(words: Sequence[str], work: Callable[[dict[str, Any], Tell], Any]) -> None:
    """The process is one rank until work, of the setting, has returned what it measured.

    words: FOLDER and RANK. FOLDER has setting.json; rank 0 writes progress and records.json there.
    """
    import torch
    import torch.distributed as dist

    folder, rank = Path(words[0]), int(words[1])
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    with (folder / "progress").open("a") as progress:

        def tell(line: str) -> None:
            if rank == 0:
                progress.write(line + "\n")
                progress.flush()

        records = work(json.loads((folder / "setting.json").read_text()), tell)
    if rank == 0:
        (folder / "records.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def from_all(mine: Any) -> list[Any]:
    """This returns what each rank has; collective."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def records_of(ranks: Ranks, setting: dict[str, Any], tell: Tell) -> Any:
    """This starts the ranks with a setting and returns what the first of them measured.

    Raises RuntimeError with the end of a failed rank's log.
    """
    with tempfile.TemporaryDirectory(prefix="uspft-benchmark-") as name:
        folder = Path(name)
        (folder / "setting.json").write_text(json.dumps(setting))
        (folder / "progress").touch()
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks.number):
                started.append(_start(folder, rank, ranks))
            _wait(started, folder, tell)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return json.loads((folder / "records.json").read_text())


def _start(folder: Path, rank: int, ranks: Ranks) -> subprocess.Popen[bytes]:
    before = ranks.hosts[rank * len(ranks.hosts) // ranks.number]
    own = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",  # DeepSpeed reads this and the three below
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks.number),
    }
    if before:
        own["GLOO_SOCKET_IFNAME"] = "eth0"
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*before, sys.executable, "-m", ranks.module, str(folder), str(rank)],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, tell: Callable[[str], None]
) -> None:
    with (folder / "progress").open() as progress:
        while True:
            codes = [process.poll() for process in ranks]
            for line in progress:
                tell(line.rstrip())
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                log = (folder / f"rank-{failed[0]}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {failed[0]} failed:\n{log[-3000:]}")
            if all(code == 0 for code in codes):
                return
            time.sleep(0.2)
