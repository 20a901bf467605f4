"""The measurements of a cluster, which every rank runs together; collective throughout.

A time is that of several consecutive calls divided by their number, on the slowest rank, and the
median of a few trials. A sweep over sizes ends with the first slow one, so that slow links take no
longer to measure than fast ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from uspft.blocks import Block, Mask
from uspft.calibration.fits import (
    ALONE,
    ATTENTION,
    PRODUCTS,
    FlopPoint,
    HidingPoint,
    LinkPoint,
    Load,
    Points,
)
from uspft.comm import Books, Group, Move, largest, shift
from uspft.kernels import Kernel
from uspft.launcher.hosts import host_memory
from uspft.mesh import Groups
from uspft.planner.machine import COLLECTIVES, PAIR_FLOPS, SUMS, Collective

KIB, MIB = 1 << 10, 1 << 20
TRIALS, MOST_CALLS = 3, 100
LONG_SECONDS = 0.25
"""A call that takes this long is timed once, and no larger one follows."""


@dataclass(frozen=True)
class SweepSizes:
    """The sizes at which a cluster is measured."""

    messages: Sequence[int]
    """Bytes of messages and collectives."""
    products: Sequence[int]
    """Sides of square products."""
    tokens: Sequence[int]
    """Tokens of the measured causal attention."""
    copied: int
    """Bytes of the copy that measures memory."""
    trial_seconds: float
    """Approximate seconds of all calls of a trial."""


SIZES = {
    "cpu": SweepSizes(
        messages=[size * KIB for size in (1, 16, 64, 256, 1024, 4096, 16384)],
        products=(256, 512, 1024, 1536),
        tokens=(256, 512, 1024, 2048),
        copied=64 * MIB,
        trial_seconds=0.02,
    ),
    "cuda": SweepSizes(
        messages=[KIB, *(size * MIB // 16 for size in (1, 16, 256, 2048, 8192))],
        products=(1024, 2048, 4096, 8192),
        tokens=(2048, 8192, 16384, 32768),
        copied=1024 * MIB,
        trial_seconds=0.05,
    ),
}
"""The sizes by type of device."""


@dataclass(frozen=True)
class Bench:
    """A rank that takes part in measurements."""

    device: torch.device
    dtype: torch.dtype
    groups: Groups
    ranks_per_host: int
    sizes: SweepSizes
    kernel: Kernel
    """The run's attention kernel."""
    heads: tuple[int, int, int]
    """Query heads, KV heads and head dim of attention."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    def group(self, every: Sequence[Sequence[int]]) -> Group:
        """Return the one of several groups of all ranks that contains this rank; collective."""
        return self.groups.of(every, self.rank, Books())

    def drawn(self, *shape: int) -> torch.Tensor:
        """Return a random tensor of the run's dtype."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

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
            return largest([mine], everyone, self.device)[0]  # the same on every rank

        trial(1)  # warms up
        if (once := trial(1)) > LONG_SECONDS:
            return once
        calls = max(1, min(MOST_CALLS, round(self.sizes.trial_seconds / once)))
        return statistics.median(trial(calls) for _ in range(TRIALS))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Says = Callable[[str], None]
"""A function that prints what is measured next."""


def measure(bench: Bench, says: Says = lambda _: None) -> Points:
    """Measure everything, and return the same on every rank; collective."""
    hosts, sizes = bench.world // bench.ranks_per_host, bench.sizes
    cuda = bench.device.type == "cuda"
    properties = torch.cuda.get_device_properties(bench.device) if cuda else None
    says("memory")
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copying = bench.seconds(lambda: target.copy_(source))  # the copy both reads and writes
    sweeps, links = sweeps_of_links(bench.ranks_per_host, hosts), list[LinkPoint]()
    for number, sweep in enumerate(sweeps, 1):
        says(f"links, {number} of {len(sweeps)}: {sweep.what}")
        links += measured_links(bench, sweep)
    says("products")
    computed = list[FlopPoint]()
    for size in sizes.products:
        a, b = bench.drawn(size, size), bench.drawn(size, size)
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        computed.append(FlopPoint(PRODUCTS, 2.0 * size**3, bench.seconds(product)))
    says("attention")
    query, _, dim = bench.heads
    for tokens in sizes.tokens:
        for what, of_pair, call in zip(
            ATTENTION, PAIR_FLOPS, _attended(bench, tokens), strict=True
        ):
            flops = of_pair * query * dim * tokens * (tokens + 1) / 2
            computed.append(FlopPoint(what, flops, bench.seconds(call)))
    if bench.world > 1:
        says("what a ring hides")
    return Points(
        properties.name if properties else "cpu",
        str(bench.dtype).removeprefix("torch."),
        bench.kernel.name,
        hosts,
        bench.ranks_per_host,
        properties.total_memory if properties else host_memory() / bench.ranks_per_host,
        2 * sizes.copied / copying,
        links,
        computed,
        [*_hiding(bench)] if bench.world > 1 else [],
    )


def _attended(bench: Bench, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of the run's kernel on causal attention: forward, and backward."""
    (query, kv, dim), kernel = bench.heads, bench.kernel
    q, k, v, dout = (bench.drawn(tokens, count, dim) for count in (query, kv, kv, query))
    blocks, scale = (Block(0, tokens, 0, tokens, Mask.CAUSAL),), dim**-0.5
    (part,) = kernel.forward((q, k, v), blocks, scale)
    saved = (part.out, part.lse, dout)
    forward = partial(kernel.forward, (q, k, v), blocks, scale)
    return forward, partial(kernel.backward, (q, k, v), saved, blocks, scale)


def _hiding(bench: Bench) -> Iterator[HidingPoint]:
    """Yield the times of attention, of transfers round a ring of all ranks, and of both at once,
    for sizes at which the two take about as long."""
    group = bench.group([range(bench.world)])
    for tokens in bench.sizes.tokens[-2:]:
        forward, _ = _attended(bench, tokens)
        attention = bench.seconds(forward)
        for of_bytes in bench.sizes.messages:
            move = _next(bench, of_bytes)
            transfer = bench.seconds(partial(_moved, move, group))
            if transfer > attention / 2 or of_bytes == bench.sizes.messages[-1]:
                both = bench.seconds(partial(_moved, move, group, forward))
                yield HidingPoint(transfer, attention, both)
                break


class Sweep(NamedTuple):
    """Groups whose collectives are measured at the same time."""

    what: str
    where: str
    every: Sequence[Sequence[int]]
    """The members of each group; together they are all ranks."""
    kinds: Sequence[Collective]
    load: Load = ALONE
    """If fewer ranks of a host send than it has, the later ones wait."""


def sweeps_of_links(here: int, hosts: int) -> list[Sweep]:
    """Return the measurements of links.

    Inside a host: groups of two, four and so on, and of all ranks. Between hosts: groups of one
    rank of each, first alone and then all at once; and sums and all-gathers of groups with one,
    two, four and so on ranks on each host, all at once. here: ranks of a host. The groups of a host
    work at the same time, as in a step.
    """
    world, found = here * hosts, list[Sweep]()
    widths = [n for n in _widths(here) if n > 1]
    for width in widths:
        every = [list(range(first, first + width)) for first in range(0, world, width)]
        found.append(Sweep(f"groups of {width} inside a host", "inside", every, COLLECTIVES))
    if hosts == 1:
        return found
    by_place = [range(first, world, here) for first in range(here)]
    found.append(Sweep("one rank of each host", "between", by_place, COLLECTIVES))
    if here > 1:
        what = f"{here} flows that share a host's links"
        found.append(Sweep(what, "between", by_place, ("point_to_point",), Load(here)))
        for members in _widths(here):
            every = [
                [host * here + first + i for host in range(hosts) for i in range(members)]
                for first in range(0, here, members)
            ]
            what = f"sums across hosts, {members} of each group on a host"
            found.append(Sweep(what, "between", every, SUMS, Load(here, members)))
    return found


def _widths(here: int) -> list[int]:
    """Return those of 1, 2, 4 and so on that divide the ranks of a host, and all its ranks."""
    widths = {1 << n for n in range(here.bit_length())} | {here}
    return sorted(width for width in widths if here % width == 0)


def measured_links(bench: Bench, sweep: Sweep) -> Iterator[LinkPoint]:
    """Yield the times of a sweep, each kind from the smallest size on."""
    group = bench.group(sweep.every)
    alone = sweep.where == "between" and sweep.load == ALONE
    takes_part = not alone or bench.rank % bench.ranks_per_host == 0
    for kind in sweep.kinds:
        for of_bytes in bench.sizes.messages:
            call, moved = _call(bench, kind, of_bytes, group)
            seconds = bench.seconds(call, takes_part=takes_part)
            yield LinkPoint(kind, sweep.where, group.size, moved, seconds, sweep.load)
            if seconds > LONG_SECONDS:
                break


def _call(
    bench: Bench, kind: Collective, of_bytes: int, group: Group
) -> tuple[Callable[[], object], int]:
    """Return a call of a collective on about this many bytes, or of a message to the next member,
    and the bytes as `LinkPoint` counts them."""
    if kind == "point_to_point":
        move = _next(bench, of_bytes)
        return partial(_moved, move, group), 4 * move.x.numel()
    count = max(1, of_bytes // 4 // group.size) * group.size
    sent = count // group.size * (group.size - 1) if kind == "all_to_all" else count
    whole = torch.zeros(count, device=bench.device)
    out, part = torch.empty_like(whole), whole[: count // group.size].clone()
    at: dict[str, Any] = {"group": group.handle}
    calls: dict[Collective, Callable[[], object]] = {
        "all_gather": partial(dist.all_gather_into_tensor, out, part, **at),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, **at),
        "all_reduce": partial(dist.all_reduce, whole, **at),
        "all_to_all": partial(dist.all_to_all_single, out, whole, **at),
    }
    return calls[kind], 4 * sent


def _next(bench: Bench, of_bytes: int) -> Move:
    """Return a message of this many bytes to the next member of a group."""
    x = torch.zeros(of_bytes // 4, device=bench.device)
    return Move(x, torch.empty_like(x), 1)


def _moved(move: Move, group: Group, meanwhile: Callable[[], object] = lambda: None) -> None:
    (wait,) = shift([move], group, "ring")
    meanwhile()
    wait()
