"""Real processes for tests: one spawn, many cases inside."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOST = "127.0.0.1"


class Place(NamedTuple):
    """Where ranks meet, how many they are, and the folder that their answers go to."""

    world: int
    port: int
    folder: Path


def spawn(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(rank, *args) on `world` gloo processes; what each returned, by rank.

    Raises AssertionError with the first rank's traceback where one raised.
    """
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(world, store.port, Path(folder))
        mp.start_processes(  # type: ignore[no-untyped-call]
            _rank, (place, work, args), nprocs=world, start_method="forkserver"
        )
        answers = [torch.load(place.folder / f"{r}.pt", weights_only=False) for r in range(world)]
    wrong = [f"rank {r} of {world}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
    assert not wrong, "\n".join(sorted(wrong, key=lambda text: "Connection closed" in text))
    return [answer for _, answer in answers]


@contextmanager
def alone() -> Iterator[None]:
    """Be without the process group of the ranks that were spawned."""
    dist.destroy_process_group()
    yield
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def each_once(makers: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """What each maker gives, made on one rank and handed to all; collective, in the same order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = {key: make() for n, (key, make) in enumerate(makers.items()) if n % world == rank}
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine)
    return {key: made for part in parts for key, made in part.items()}


def _rank(rank: int, place: Place, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = place.world
    torch.set_num_threads(1)
    # What DeepSpeed reads; torch.distributed is up before it looks for anything else.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ["DS_ACCELERATOR"] = "cpu"
    store = dist.TCPStore(HOST, place.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    dist.barrier()  # a rank that fails at once would cut the line of one that still connects
    try:
        answer = True, work(rank, *args)
    except Exception:
        answer = False, traceback.format_exc()
    torch.save(answer, place.folder / f"{rank}.pt")
    if not answer[0]:
        os._exit(0)  # its peers find the line cut and end too; gloo's own end would abort
    dist.barrier()
    dist.destroy_process_group()
