"""Keys and gradients are on their way while blocks are computed: the order in which each rank
starts a transfer, calls its kernel and waits."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.support.algorithms import named
from tests.support.attention import Bench, Layer, dense, make_inputs, shared
from tests.support.wire import (
    TORCH_DISTRIBUTED,
    Call,
    Rank,
    Recorder,
    Transfer,
    mark_keys,
    on_threads,
)
from uspft.comm import Books, Group, collectives
from uspft.layout import Layout
from uspft.mesh import Mesh
from uspft.segments import Segments
from uspft.sequence import Heads

HEADS, SCALE = Heads(4, 2, 8), 0.3
ROW = Segments.single(64)


@dataclass
class Pass:
    """The forward or the backward of one rank: its kernel calls, and whose keys each had; the keys
    that came and the gradients that left."""

    index: int
    calls: list[Call]
    sources: list[set[int]]
    keys: list[Transfer]
    gradients: list[Transfer]

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
        found.append(Pass(rank.index, calls, sources, keys, gradients))
    return found[0], found[1]


@pytest.fixture
def on_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "dist", TORCH_DISTRIBUTED)


def attend(name: str, ranks: int, **options: int | bool) -> tuple[list[tuple[Pass, Pass]], int]:
    """One layer, shown to be right: what each rank did, and the most buffers that any had."""
    algorithm = named(name, 1, ranks, **options)
    inputs = make_inputs(HEADS, ROW.length)
    mark_keys(inputs[0], inputs[1])

    def work(rank: Rank) -> None:
        group = Group(rank, tuple(range(ranks)), rank.index)  # type: ignore[arg-type]
        mesh = Mesh(Layout(ring=ranks), rank.index, Group(), Group(), group, group)
        layer = Layer(Bench(algorithm, mesh, Books(), Recorder(rank)), [ROW], None)
        index = layer.index()
        want = dense(inputs, layer, SCALE)
        for got, whole in zip(shared(inputs, layer, index, SCALE), want, strict=True):
            assert torch.allclose(got, whole[index], atol=1e-10)

    done = on_threads(ranks, work)
    held = algorithm.token_order(ROW)
    owner = {t: rank for rank, runs in enumerate(held) for run in runs for t in range(*run)}
    return [passes(rank, owner) for rank in done], max(rank.most_buffers() for rank in done)


def test_a_ring_sends_the_next_keys_while_it_computes(on_wire: None) -> None:
    found, buffers = attend("ring_cp", 4)
    for done in (one for both in found for one in both):
        assert done.sources == [{(done.index - step) % 4} for step in range(4)]
        assert [done.call_of(t) for t in done.keys] == [1, 2, 3]
        for step, transfer in enumerate(done.keys):
            before, after = done.calls[step : step + 2]
            assert transfer.started < before.at < transfer.ended < after.at
    assert buffers == 2, "more than what is at hand and what arrives"


def test_gradients_of_a_ring_go_straight_home_while_it_computes(on_wire: None) -> None:
    for forward, backward in attend("ring_cp", 4)[0]:
        assert forward.gradients == []
        assert [{t.peer} for t in backward.gradients] == backward.sources[1:]
        assert len(backward.gradients) == 3
        for step, transfer in enumerate(backward.gradients, 1):
            assert backward.calls[step].at < transfer.started
            for following in backward.calls[step + 1 : step + 2]:
                assert transfer.started < following.at < transfer.ended


EXCHANGES = [
    # algorithm, ranks, options, kernel calls: this rank's own keys, and one for each stage
    ("planned_cp", 4, {"keep": True}, 4),
    ("planned_cp", 4, {"keep": False}, 4),
    ("planned_cp", 4, {"keep": False, "stages": 2}, 3),
    ("planned_cp", 2, {"keep": True, "piece_tokens": 4}, 5),
    ("planned_cp", 2, {"keep": False, "piece_tokens": 4}, 5),
    ("allgather_cp", 4, {}, 2),
]


@pytest.mark.parametrize(("name", "ranks", "options", "calls"), EXCHANGES)
def test_an_exchange_computes_while_keys_and_gradients_are_on_their_way(
    name: str, ranks: int, options: dict[str, int | bool], calls: int, on_wire: None
) -> None:
    for forward, backward in attend(name, ranks, **options)[0]:
        assert len(forward.calls) == len(backward.calls) == calls
        assert forward.sources[0] == {forward.index}
        assert forward.keys and bool(backward.keys) == (not options.get("keep"))
        for done in (forward, backward):
            for transfer in done.keys:
                before, after = (done.calls[done.call_of(transfer) - n] for n in (1, 0))
                assert transfer.started < done.calls[0].at
                assert before.at < transfer.ended < after.at
        assert forward.gradients == [] and backward.gradients
        for transfer in backward.gradients:
            number = max(n for n, call in enumerate(backward.calls) if call.at < transfer.started)
            assert transfer.peer in backward.sources[number]
            assert transfer.ended > backward.calls[-1].at


@pytest.mark.parametrize(
    ("device", "started"),
    [
        ("cpu", [[("irecv", 12)], [("irecv", 11)], [("isend", 11)], [("isend", 12)]]),
        ("meta", [[("irecv", 12), ("isend", 11)], [("irecv", 11), ("isend", 12)]]),
    ],
)
def test_gloo_hears_of_all_receives_before_anything_leaves(
    device: str, started: list[list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[list[tuple[str, int]]] = []

    def start(operations: list[tuple[str, int]]) -> list[object]:
        log.append(operations)
        return []

    torch_distributed = SimpleNamespace(
        irecv="irecv",
        isend="isend",
        P2POp=lambda way, tensor, peer, group: (way, peer),
        batch_isend_irecv=start,
    )
    monkeypatch.setattr(collectives, "dist", torch_distributed)
    x = torch.zeros(3, device=device)
    moves = [collectives.Move(x, x, 1), collectives.Move(x[:0], x[:0], 1)]
    collectives.shift([*moves, collectives.Move(x, x, 2)], Group(None, (10, 11, 12), 0), "ring")
    assert log == started
