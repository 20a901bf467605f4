"""One attention layer under an algorithm, beside dense float64 attention in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.algorithms import named
from uspft.comm import Books, Group
from uspft.kernels import Kernel
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import Groups, Mesh, make_mesh
from uspft.model.recompute import Recompute, attend_once
from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Heads, Rule, Share, Split, Traffic
from uspft.sequence.kept_keys import LayerKeys
from uspft.sequence.ulysses import attend_over_heads

DIM = 8
KINDS = ("all_to_all", "ring", "gather")
"""Of transfers, in the books and in an algorithm's cost."""
HEADS = {
    "mha": Heads(4, 4, DIM),
    "gqa": Heads(8, 2, DIM),
    "mqa": Heads(6, 1, DIM),
    "6/2": Heads(6, 2, DIM),
    "9/3": Heads(9, 3, DIM),
    "28/4": Heads(28, 4, DIM),
    "fewer heads than ranks": Heads(3, 3, DIM),
}
WINDOWS = (None, 1, 11, 60)
LENGTHS = {5: 100, 7: 98}
"""Tokens of a row where 96 does not split over so many ranks."""


def rows_of(world: int) -> dict[str, list[Segments]]:
    """Micro-batches of one or two rows."""
    length = LENGTHS.get(world, 96)
    return {
        "one document": [Segments.single(length)],
        "packed regular": [Segments((0, 24, 48, 72, 96), length)],
        "packed odd": [Segments((0, 17, 40, 41, 95), length)],
        "unlike rows": [Segments((0, 50, length), length), Segments((0, 31), length)],
        "all padding": [Segments((0,), length), Segments.single(length)],
    }


class Way(NamedTuple):
    """An algorithm at its degrees; fetched: received keys are fetched again for the backward;
    per_host: ring ranks of one host, where there are more; stages: of the planned exchange."""

    name: str
    ulysses: int
    ring: int
    fetched: bool = False
    per_host: int | None = None
    stages: int = 0


def ways(world: int) -> list[Way]:
    """Every way to share a row over `world` ranks."""
    if world == 1:
        return [Way("whole", 1, 1)]
    pairs = [(u, world // u) for u in range(1, world + 1) if world % u == 0]
    single = [
        Way("ulysses_cp", world, 1),
        Way("ring_cp", 1, world),
        Way("allgather_cp", 1, world),
        Way("planned_cp", 1, world, True, world // 2 if world > 2 and world % 2 == 0 else None),
    ]
    single += [Way("planned_cp", 1, world, stages=2)] if world > 3 else []
    return single + [Way(name, *pair) for name in ("hybrid_cp", "planned_cp") for pair in pairs]


class Case(NamedTuple):
    """What one comparison is about; heads and rows by name."""

    way: Way
    heads: str
    rows: str
    window: int | None = None
    again: Recompute | None = None
    sinks: bool = False

    @property
    def question(self) -> tuple[str, str, int | None, bool]:
        """What one answer of dense attention is to."""
        return self.heads, self.rows, self.window, self.sinks


GROUPS = Groups()


@cache
def _mesh(ulysses: int, ring: int) -> Mesh:
    return make_mesh(Layout(ulysses=ulysses, ring=ring), GROUPS, Books())


@dataclass
class Bench:
    """The ranks of one way to share a row, alive on this rank."""

    algorithm: Algorithm
    mesh: Mesh
    books: Books
    kernel: Kernel

    @classmethod
    def of(cls, way: Way, window: int | None = None, kernel: Kernel | None = None) -> Bench:
        """Collective at the first call with these degrees."""
        options: dict[str, Any] = {
            "keep": not way.fetched,
            "window": window,
            "per_host": way.per_host,
        }
        options |= {"stages": way.stages} if way.stages else {}
        options |= {"piece_tokens": 5} if way.name == "planned_cp" else {}
        made = named(way.name, way.ulysses, way.ring, **options)
        mesh = _mesh(way.ulysses, way.ring)
        return cls(made, mesh, mesh.context.books, kernel or TorchCpu())

    def sent(self) -> dict[str, Traffic]:
        """What this rank has sent since it was last asked, by kind."""
        found = {k: Traffic(self.books.bytes[k], self.books.messages[k]) for k in KINDS}
        self.books.close()
        return found

    @classmethod
    def alone(cls, kernel: Kernel | None = None) -> Bench:
        """One process that no process group is needed for."""
        mesh = Mesh(Layout(), 0, *[Group()] * 5)
        return cls(named("whole", 1, 1), mesh, Books(), kernel or TorchCpu())


def busiest(books: list[dict[str, Traffic]]) -> Cost:
    """The most that any rank sent, by kind."""
    most: dict[str, Traffic] = {}
    for kind in books[0]:
        pages = [page[kind] for page in books]
        most[kind] = Traffic(max(p.bytes for p in pages), max(p.messages for p in pages))
    return Cost(**most)


@dataclass
class Layer:
    """One micro-batch's attention on this rank: its share and its tokens' positions."""

    bench: Bench
    rows: list[Segments]
    window: int | None

    @cached_property
    def orders(self) -> list[Any]:
        return [self.bench.algorithm.token_order(row) for row in self.rows]

    @cached_property
    def share(self) -> Share:
        mesh = self.bench.mesh
        return Share(self.rows, self.orders, (mesh.layout.ulysses, mesh.context.index), self.window)

    def index(self, context: int | None = None) -> Tensor:
        """Positions held by a context rank (None: this one), rows laid end to end."""
        context = self.bench.mesh.context.index if context is None else context
        starts = [sum(row.length for row in self.rows[:i]) for i in range(len(self.rows))]
        runs = chain.from_iterable(
            [torch.arange(a, b) + at for a, b in order[context]]
            for at, order in zip(starts, self.orders, strict=True)
        )
        return torch.cat([torch.arange(0), *runs])

    def documents(self) -> list[tuple[int, int]]:
        """Their bounds, rows laid end to end."""
        return self.share.documents

    def attend(
        self,
        inputs: list[Tensor],
        scale: float,
        *,
        again: Recompute | None = None,
        share: Share | None = None,
        earlier: LayerKeys | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens; inputs: q, k, v and, where there are any, sinks; again:
        as a layer runs it that is recomputed, and this of attention with it; share: of a chunk of
        the rows, whose earlier ones' keys are at hand."""
        mesh = self.bench.mesh
        once = partial(attend_once, {}, 0)
        inside = once if again == "exchange" and mesh.ulysses.size > 1 else None
        split = Split(mesh.ulysses, mesh.ring, self.bench.kernel, inside, earlier)

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            q, k, v, *sinks = inputs
            rule = Rule(scale, self.window, *sinks)
            held = share or self.share
            passes = self.bench.algorithm.passes(held, keeps=True)
            return attend_over_heads(passes, (q, k, v), held, rule, split)

        if again is None:
            return run(tuple(inputs))
        one = torch.ones((), dtype=inputs[0].dtype, requires_grad=True)

        def layer(*inputs: Tensor) -> Tensor:
            out = run(inputs) if inside or again == "attention" else once(run, inputs)
            return out * one  # which keeps what it multiplies

        out: Tensor = checkpoint(layer, *inputs, use_reentrant=False)
        return out


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def make_inputs(heads: Heads, tokens: int) -> list[Tensor]:
    """q, k, v and dout, unit normal, float64, the same everywhere."""
    generator = seeded(0)
    counts = (heads.query, heads.kv, heads.kv, heads.query)
    return [
        torch.randn(tokens, n, heads.dim, dtype=torch.float64, generator=generator) for n in counts
    ]


def make_sinks(heads: Heads) -> Tensor:
    """One score a query head, float64, the same everywhere; some outweigh all keys."""
    return 3 * torch.randn(heads.query, dtype=torch.float64, generator=seeded(1))


def dense(
    inputs: list[Tensor], layer: Layer, scale: float, sinks: Tensor | None = None
) -> list[Tensor]:
    """out, dq, dk, dv of all tokens, and dsinks where there are any, in one process in float64."""
    q, k, v, dout = [x.double() for x in inputs]
    leaves = [
        x.clone().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))
    ]
    place = torch.arange(len(q), device=q.device)
    document = torch.full_like(place, -1)
    for number, (a, b) in enumerate(layer.documents()):
        document[a:b] = number
    far = place[:, None] - place
    seen = (document[:, None] == document) & (far >= 0) & (far < (layer.window or len(q)))
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in leaves[:3]]
    scores = torch.einsum("qhd,khd->hqk", wide[0], wide[1]) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, leaves[3][:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(q)]
    weights = weights.masked_fill((document < 0)[:, None], 0.0)  # padding attends to nothing
    out = torch.einsum("hqk,khd->qhd", weights, wide[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def shared(
    inputs: list[Tensor],
    layer: Layer,
    index: Tensor,
    scale: float,
    *,
    sinks: Tensor | None = None,
    again: Recompute | None = None,
) -> list[Tensor]:
    """out, dq, dk, dv of this rank's tokens, which are those at `index`, and its part of dsinks."""
    mine = [x[index].clone().requires_grad_() for x in inputs[:3]]
    mine += [] if sinks is None else [sinks.clone().requires_grad_()]
    out = layer.attend(mine, scale, again=again)
    return [out.detach(), *torch.autograd.grad(out, mine, inputs[3][index])]


def leaks(
    layer: Layer,
    inputs: list[Tensor],
    scale: float,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> dict[tuple[int, int], list[bool]]:
    """By document: whether out, dq, dk, dv of it are the same once all other documents are not a
    number; and whether those became it."""
    index, found = layer.index(), {}
    before = shared(inputs, layer, index, scale)
    within = torch.stack([(index >= a) & (index < b) for a, b in layer.documents()])
    for own, (a, b) in zip(within, layer.documents(), strict=True):
        broken = [x.clone() for x in inputs]
        for x in broken:
            x[:a], x[b:] = torch.nan, torch.nan
        after = shared(broken, layer, index, scale)
        kept = [same(x[own], y[own]) for x, y in zip(before, after, strict=True)]
        found[a, b] = [*kept, bool(after[0][within.any(0) & ~own].isnan().all())]
    return found
