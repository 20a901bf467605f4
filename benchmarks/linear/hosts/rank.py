"""One rank between slow hosts: python -m benchmarks.linear.hosts.rank FOLDER RANK."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.linear.inputs import inputs, rule
from uspft.comm import Books
from uspft.config.algorithms import CONTEXT
from uspft.families import StateSizes
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.sequence.mixing import mix
from uspft.sequence.rows.share import Share
from uspft.sequence.states import Mixed

MODULE = "benchmarks.linear.hosts.rank"
WAYS = ("heads", "states")


def measured(setting: dict[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """Return by length the seconds of each round and the bytes of the busiest rank, of tokens for
    heads and of states; collective. Ways take turns."""
    ranks, mine = dist.get_world_size(), dist.get_rank()
    groups, run, sizes = Groups(), rule(), StateSizes(*setting["sizes"])
    layouts = {"heads": Layout(ulysses=ranks), "states": Layout(ring=ranks)}
    names = {"heads": "ulysses_cp", "states": "ring_cp"}
    books = {way: Books() for way in WAYS}
    meshes = {way: make_mesh(layouts[way], groups, books[way]) for way in WAYS}
    found = []
    for tokens in setting["lengths"]:
        row, every = Segments.single(tokens), inputs(tokens, sizes)
        shares, mixed = {}, {}
        for way in WAYS:
            layout = layouts[way]
            algorithm = make_algorithm(CONTEXT[names[way]], layout.ulysses, layout.ring)
            shares[way] = Share([row], [algorithm.token_order(row)], (layout.ulysses, mine))
            held = torch.cat([torch.arange(a, b) for a, b in shares[way].held])
            mixed[way] = [x[held].float() for x in every]
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        sent: dict[str, int] = {}
        for number in range(-1, setting["rounds"]):  # the first makes buffers, and is not timed
            for way in WAYS if number % 2 else WAYS[::-1]:
                x = Mixed(*(one.detach().requires_grad_() for one in mixed[way]))
                gc.collect()
                dist.barrier()
                began = time.perf_counter()
                both = meshes[way].ulysses, meshes[way].ring
                mix(x, shares[way], run, both).sum().backward()
                dist.barrier()
                took = time.perf_counter() - began
                sent[way] = sum(books[way].close().values())
                if number >= 0:
                    seconds[way].append(took)
        busiest = torch.tensor([sent[way] for way in WAYS])
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        found.append(
            {
                "tokens": tokens,
                "seconds": seconds,
                "sent": dict(zip(WAYS, busiest.tolist(), strict=True)),
            }
        )
        tell(f"{tokens} tokens done")
    return found


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
