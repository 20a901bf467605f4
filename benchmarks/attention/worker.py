"""One rank of the attention benchmark: python -m benchmarks.attention.worker FOLDER RANK.

FOLDER has setting.json; rank 0 writes progress and records.json there.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.attention.rounds import measure
from benchmarks.attention.setting import Setting

TIMEOUT = timedelta(hours=1)
"""The other ranks wait at a barrier for so long while one process does all."""


def main(folder: Path, rank: int) -> None:
    """The process is one rank until all engines have been measured."""
    read = json.loads((folder / "setting.json").read_text())
    setting = Setting(**{**read, "engines": tuple(read["engines"])})
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), setting.processes)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=setting.processes, timeout=TIMEOUT
    )
    with (folder / "progress").open("a") as progress:

        def tell(line: str) -> None:
            if rank == 0:
                progress.write(line + "\n")
                progress.flush()

        records = measure(setting, tell)
    if rank == 0:
        (folder / "records.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
