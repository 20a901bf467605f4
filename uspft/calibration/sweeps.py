"""What every rank does while a cluster is measured; collective throughout.

A time is that of several calls in a row, divided by their number, on the slowest rank; of a few
trials the median counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from uspft.blocks import Block, Mask
from uspft.calibration.points import AttentionPoint, LinkPoint, Points, ProductPoint
from uspft.comm import Books, Group, Move, largest, shift
from uspft.kernels import Kernel
from uspft.launcher import host_memory
from uspft.mesh import Groups

KIB, MIB = 1 << 10, 1 << 20
TRIALS, MOST_CALLS = 3, 100


@dataclass(frozen=True)
class SweepSizes:
    """The sizes at which a cluster is measured."""

    messages: Sequence[int]
    """Bytes of messages and collectives."""
    products: Sequence[int]
    """Sides of square products."""
    tokens: Sequence[int]
    """Tokens of causal squares."""
    copied: int
    """Bytes of the copy that measures memory."""
    trial_seconds: float
    """Seconds that the calls of a trial take together, about."""


SIZES = {
    "cpu": SweepSizes(
        messages=[size * KIB for size in (16, 64, 256, 1024, 4096, 16384)],
        products=(256, 512, 1024, 1536),
        tokens=(256, 512, 1024, 2048),
        copied=64 * MIB,
        trial_seconds=0.02,
    ),
    "cuda": SweepSizes(
        messages=[size * MIB // 16 for size in (1, 16, 256, 2048, 8192)],
        products=(1024, 2048, 4096, 8192),
        tokens=(2048, 8192, 16384, 32768),
        copied=1024 * MIB,
        trial_seconds=0.05,
    ),
}
"""By type of device."""


@dataclass(frozen=True)
class Bench:
    """A rank among those that measure."""

    device: torch.device
    dtype: torch.dtype
    groups: Groups
    ranks_per_host: int
    sizes: SweepSizes

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    def group(self, every: Sequence[Sequence[int]]) -> Group:
        """Return this rank's group of several that together hold all ranks; collective."""
        return self.groups.of(every, self.rank, Books())

    def seconds(self, call: Callable[[], object], *, takes_part: bool = True) -> float:
        """Return the seconds of one call on the slowest of the ranks that take part; collective."""
        everyone = self.group([range(self.world)])

        def trial(calls: int) -> float:
            if self.world > 1:
                dist.barrier(group=everyone.handle)
            self._wait()
            started = time.perf_counter()
            for _ in range(calls if takes_part else 0):
                call()
            self._wait()
            mine = (time.perf_counter() - started) / calls
            return largest([mine], everyone, self.device)[0]  # on every rank the same

        trial(1)  # warms up
        calls = max(1, min(MOST_CALLS, round(self.sizes.trial_seconds / trial(1))))
        return statistics.median(trial(calls) for _ in range(TRIALS))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(bench: Bench, kernel: Kernel, heads: tuple[int, int, int]) -> Points:
    """Measure everything, and return the same on every rank; collective.

    heads: query heads, KV heads and head dim of attention.
    """
    hosts = bench.world // bench.ranks_per_host
    cuda = bench.device.type == "cuda"
    properties = torch.cuda.get_device_properties(bench.device) if cuda else None
    return Points(
        properties.name if properties else "cpu",
        str(bench.dtype).removeprefix("torch."),
        kernel.name,
        hosts,
        bench.ranks_per_host,
        properties.total_memory if properties else host_memory() / bench.ranks_per_host,
        _copied(bench),
        tuple(_links(bench, hosts)),
        tuple(_products(bench)),
        tuple(_attention(bench, kernel, heads)),
    )


def _copied(bench: Bench) -> float:
    """Return the bytes per second that a copy reads and writes while every rank makes one."""
    source = torch.zeros(bench.sizes.copied, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * bench.sizes.copied / bench.seconds(lambda: target.copy_(source))


def _products(bench: Bench) -> Iterator[ProductPoint]:
    for size in bench.sizes.products:
        a, b = (torch.randn(size, size, device=bench.device).to(bench.dtype) for _ in range(2))
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        yield ProductPoint(size, bench.seconds(product))


def _attention(
    bench: Bench, kernel: Kernel, heads: tuple[int, int, int]
) -> Iterator[AttentionPoint]:
    """Yield the times of the run's kernel on causal squares, while every rank computes one."""
    query, kv, dim = heads
    for tokens in bench.sizes.tokens:
        q, k, v, dout = (
            torch.randn(tokens, count, dim, device=bench.device).to(bench.dtype)
            for count in (query, kv, kv, query)
        )
        blocks, scale = (Block(0, tokens, 0, tokens, Mask.CAUSAL),), dim**-0.5
        (part,) = kernel.forward((q, k, v), blocks, scale)
        forward = partial(kernel.forward, (q, k, v), blocks, scale)
        saved = (part.out, part.lse, dout)
        backward = partial(kernel.backward, (q, k, v), saved, blocks, scale)
        yield AttentionPoint(tokens, query, dim, False, bench.seconds(forward))
        yield AttentionPoint(tokens, query, dim, True, bench.seconds(backward))


def _links(bench: Bench, hosts: int) -> Iterator[LinkPoint]:
    """Yield the times of groups of two, four and so on and of all ranks inside a host, and between
    hosts of one rank of each, alone and then all at once.

    The groups of a host work at the same time, as they do in a step.
    """
    here, world = bench.ranks_per_host, bench.world
    widths = {1 << n for n in range(1, here.bit_length())} | {here}
    for width in sorted(widths) if here > 1 else ():
        if here % width == 0:
            every = [range(first, first + width) for first in range(0, world, width)]
            yield from _collectives(bench, every, "inside")
    if hosts > 1:
        every = [range(first, world, here) for first in range(here)]
        alone = bench.rank % here == 0
        yield from _collectives(bench, every, "between", takes_part=alone)
        if here > 1:
            yield from _messages(bench, every, "between", senders=here)


def _collectives(
    bench: Bench, every: Sequence[Sequence[int]], where: str, *, takes_part: bool = True
) -> Iterator[LinkPoint]:
    group = bench.group(every)
    for of_bytes in bench.sizes.messages:
        count = max(1, of_bytes // 4 // group.size) * group.size
        for kind, call in _calls(count, group, bench.device).items():
            sent = count // group.size * (group.size - 1) if kind == "all_to_all" else count
            seconds = bench.seconds(call, takes_part=takes_part)
            yield LinkPoint(kind, where, group.size, 4 * sent, seconds)
    yield from _messages(bench, every, where, takes_part=takes_part)


def _calls(count: int, group: Group, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a call for each collective on so many numbers of 4 bytes."""
    whole = torch.zeros(count, device=device)
    out, part = torch.empty_like(whole), whole[: count // group.size].clone()
    at: dict[str, Any] = {"group": group.handle}
    return {
        "all_gather": partial(dist.all_gather_into_tensor, out, part, **at),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, **at),
        "all_reduce": partial(dist.all_reduce, whole, **at),
        "all_to_all": partial(dist.all_to_all_single, out, whole, **at),
    }


def _messages(
    bench: Bench,
    every: Sequence[Sequence[int]],
    where: str,
    *,
    takes_part: bool = True,
    senders: int = 1,
) -> Iterator[LinkPoint]:
    """Yield the times in which each member of a group sends to the next one."""
    group = bench.group(every)
    for of_bytes in bench.sizes.messages:
        x = torch.zeros(of_bytes // 4, device=bench.device)
        move = Move(x, torch.empty_like(x), 1)
        seconds = bench.seconds(partial(_moved, move, group), takes_part=takes_part)
        yield LinkPoint("point_to_point", where, group.size, 4 * x.numel(), seconds, senders)


def _moved(move: Move, group: Group) -> None:
    (wait,) = shift([move], group, "ring")
    wait()
