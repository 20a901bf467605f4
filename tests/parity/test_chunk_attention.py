"""Chunks of rows whose queries are dealt out to ranks, under every algorithm, against dense float64
attention in one process: out, dq, dk, dv, dsinks, and what ranks send."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.attention import (
    DIM,
    HEADS,
    WINDOWS,
    Bench,
    Case,
    Layer,
    busiest,
    dense,
    make_inputs,
    make_sinks,
    rows_of,
    ways,
)
from tests.support.pairwise import pairwise
from tests.support.ranks import each_once, spawn
from uspft.sequence import FORWARDS
from uspft.sequence.chunk_attention import ChunkOverRanks
from uspft.sequence.chunked import Chunked, Cut
from uspft.sequence.kept_keys import KeptKeys

SCALE = DIM**-0.5
PRICES = (1.0, ((None, 0.05), (11, 0.01)))
"""By which chunks of rows have unequal tokens, and other bounds in each row."""


class Chunks(NamedTuple):
    """A comparison of attention in so many chunks."""

    case: Case
    chunks: int


def pairs(world: int) -> list[Chunks]:
    """With these ranks, recomputed and not."""
    again = (None, "nothing", "exchange", "attention")
    factors = ways(world), HEADS, rows_of(world), WINDOWS, again, (False, True), (2, 3, 4)
    return [Chunks(Case(*one), chunks) for *one, chunks in pairwise(*factors)]


def in_chunks(layer: Layer, algorithm: Chunked, case: Case) -> tuple[list[torch.Tensor], Any]:
    """out, dq, dk, dv of this rank's tokens and its part of dsinks, and where its tokens are."""
    mesh, rows = layer.bench.mesh, layer.rows
    orders = [algorithm.token_order(row) for row in rows]
    place = mesh.layout.ulysses, mesh.context.index
    every = algorithm.shares(rows, orders, place).with_window(layer.window).every
    inputs = make_inputs(HEADS[case.heads], sum(row.length for row in rows))
    sinks = [make_sinks(HEADS[case.heads])] if case.sinks else []
    keys: dict[int, KeptKeys] = {}
    made = []
    for share in every:
        index = torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in share.held)])
        mine = [x[index].clone().requires_grad_() for x in inputs[:3]]
        mine += [x.clone().requires_grad_() for x in sinks]
        out = layer.attend(mine, SCALE, again=case.again, share=share, earlier=keys)
        made.append((index, mine, out))
    found = []
    for index, mine, out in reversed(made):
        found.append([out.detach(), *torch.autograd.grad(out, mine, inputs[3][index])])
    assert not keys, "what was kept is let go"
    parts = [torch.cat(one) for one in zip(*(one[:4] for one in reversed(found)), strict=True)]
    parts += [sum(one[4] for one in found)] if sinks else []
    return parts, torch.cat([index for index, *_ in made])


def compare(rank: int, cases: list[Chunks], world: int, forgets: bool) -> dict[Chunks, Any]:
    """By case: the largest errors of (out, dq, dk, dv) and of dsinks, the books, and the cost.

    forgets: whether what is found for keys that ranks share is lost.
    """
    benches = {case.way: Bench.of(case.way, None) for case, _ in cases}
    layers = {
        case: Layer(benches[case.way], rows_of(world)[case.rows], case.window) for case, _ in cases
    }
    truth = each_once(
        {
            case.question: partial(
                dense,
                make_inputs(HEADS[case.heads], sum(row.length for row in layer.rows)),
                layer,
                SCALE,
                make_sinks(HEADS[case.heads]) if case.sinks else None,
            )
            for case, layer in layers.items()
        }
    )
    found = {}
    for one in cases:
        case, layer = one.case, layers[one.case]
        multiple = case.way.ulysses * case.way.ring * (2 if case.way.ring > 1 else 1)
        algorithm = Chunked(layer.bench.algorithm, Cut(one.chunks, multiple, *PRICES))
        lost = mock.patch.object(ChunkOverRanks, "_share_out", lambda *_: None)
        with lost if forgets else nullcontext():
            got, index = in_chunks(layer, algorithm, case)
        want = truth[case.question]
        off = [float((g - w[index]).abs().max()) for g, w in zip(got[:4], want[:4], strict=True)]
        for part, whole in zip(got[4:], want[4:], strict=True):
            if world > 1:
                dist.all_reduce(part)
            off.append(float((part - whole).abs().max()))
        sent, cost = layer.bench.sent(), None
        if len(layer.rows) == 1:
            how = HEADS[case.heads], 8, case.window, FORWARDS[case.again or "nothing"]
            cost = algorithm.cost(layer.rows[0], *how)
        found[one] = off, sent, cost
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_algorithm_equals_dense_attention(world: int) -> None:
    cases = pairs(world)
    answers = spawn(world, compare, cases, world, False)
    for case in cases:
        for off, _, _ in (answer[case] for answer in answers):
            assert max(off) < 1e-10, f"{case}: out, dq, dk, dv, dsinks off by {off}"
        cost = answers[0][case][2]
        if cost:
            assert busiest([answer[case][1] for answer in answers]) == cost, f"{case}: the books"
    if world == 2:
        asked = [one for one in cases if one.case.way.ring == 2 and one.case.window is None]
        asked = [one for one in asked if one.case.rows == "one document"]
        for answer in spawn(world, compare, asked, world, True):
            assert asked and all(max(off) > 1e-3 for off, _, _ in answer.values())
