"""The order in which each rank starts a transfer, calls its kernel and waits, in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.algorithms import named
from tests.support.attention import Bench, Layer, dense, make_inputs, shared
from tests.support.wire import Call, Rank, Recorder, Transfer, mark_keys, on_threads
from uspft.comm import Books, Group
from uspft.layout import Layout
from uspft.mesh import Mesh
from uspft.segments import Segments
from uspft.sequence import Heads

HEADS, SCALE = Heads(4, 2, 8), 0.3
ROW = Segments.single(64)


@dataclass
class Pass:
    """The forward or the backward of one rank: its kernel calls, and whose keys each had; the keys
    that came and the gradients that left; of these keys, those whose memory was there at each
    call."""

    index: int
    calls: list[Call]
    sources: list[set[int]]
    keys: list[Transfer]
    gradients: list[Transfer]
    alive: list[list[Transfer]]

    def call_of(self, transfer: Transfer) -> int:
        """The number of the call that takes what a transfer brings."""
        return next(n for n, c in enumerate(self.calls) if set(transfer.tokens) <= set(c.tokens))


def passes(rank: Rank, owner: dict[int, int]) -> tuple[Pass, Pass]:
    """(forward, backward) of what a rank did."""
    border = max(call.at for call in rank.calls if call.way == "forward")
    found = []
    for way, late in (("forward", False), ("backward", True)):
        calls = [call for call in rank.calls if call.way == way and call.tokens]
        keys, gradients = (
            [t for t in transfers if (t.started > border) == late and bool(t.tokens) == are_keys]
            for transfers, are_keys in ((rank.received, True), (rank.sent, False))
        )
        sources = [{owner[t] for t in call.tokens} for call in calls]
        alive = [
            [t for t in rank.alive(call.at) if any(t is key for key in keys)] for call in calls
        ]
        found.append(Pass(rank.index, calls, sources, keys, gradients, alive))
    return found[0], found[1]


def attend(name: str, ranks: int, **options: int | bool) -> tuple[list[tuple[Pass, Pass]], int]:
    """One layer, shown to be right: what each rank did, and the most buffers that any had."""
    algorithm = named(name, 1, ranks, **options)
    inputs = make_inputs(HEADS, ROW.length)
    mark_keys(inputs[0], inputs[1])

    def work(rank: Rank) -> None:
        group = Group(rank, tuple(range(ranks)), rank.index)  # type: ignore[arg-type]
        mesh = Mesh(Layout(ring=ranks), rank.index, *[Group()] * 3, group, group)
        layer = Layer(Bench(algorithm, mesh, Books(), Recorder(rank)), [ROW], None)
        index = layer.index()
        want = dense(inputs, layer, SCALE)
        for got, whole in zip(shared(inputs, layer, index, SCALE), want, strict=True):
            assert torch.allclose(got, whole[index], atol=1e-10)

    done = on_threads(ranks, work)
    held = algorithm.token_order(ROW)
    owner = {t: rank for rank, runs in enumerate(held) for run in runs for t in range(*run)}
    return [passes(rank, owner) for rank in done], max(rank.most_buffers() for rank in done)
