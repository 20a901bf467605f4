"""Every algorithm against dense float64 attention in one process: out, dq, dk, dv."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.support.ranks import spawn
from uspft.batch import Segments
from uspft.comm import Books
from uspft.kernels import Block, Mask
from uspft.kernels.dense import dense_attention
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.sequence import ALGORITHMS, Heads, Plan, Rule, Split, choose

LENGTH = 96
DIM = 8
HEADS = {
    "mha": Heads(4, 4, DIM),
    "gqa": Heads(8, 2, DIM),
    "mqa": Heads(6, 1, DIM),
    "6/2": Heads(6, 2, DIM),
    "9/3": Heads(9, 3, DIM),
    "28/4": Heads(28, 4, DIM),
    "fewer heads than ranks": Heads(3, 3, DIM),
}
ROWS = {
    "one document": [Segments.single(LENGTH)],
    "packed": [Segments((0, 17, 40, 41, 95), LENGTH)],
    "micro-batch of unlike rows": [Segments((0, 50, 96), LENGTH), Segments((0, 31), LENGTH)],
    "all padding": [Segments((0,), LENGTH), Segments.single(LENGTH)],
}


WINDOWS = (None, 1, 11, 60)
WINDOWED = ("gqa", "28/4")


def degrees(world: int) -> list[tuple[str, int, int]]:
    """(algorithm, Ulysses, ring) of every way to share a row over `world` ranks."""
    if world == 1:
        return [("whole", 1, 1)]
    pairs = [(u, world // u) for u in range(1, world + 1) if world % u == 0]
    ways = [("ulysses_cp", world, 1), ("ring_cp", 1, world), ("allgather_cp", 1, world)]
    return ways + [(name, *pair) for name in ("hybrid_cp", "planned_cp") for pair in pairs]


def compare(rank: int, world: int, break_order: bool) -> tuple[dict[str, list[float]], Any]:
    """By case: the largest errors of (out, dq, dk, dv) on this rank's tokens, and what it sent."""
    errors, sent = {}, {}
    for name, ulysses, ring in degrees(world):
        algorithm = choose(name, ulysses, ring)
        books = Books()
        mesh = make_mesh(Layout(ulysses=ulysses, ring=ring), books)
        split = Split(mesh.ulysses, mesh.ring, TorchCpu())
        for (kind, heads), (rows_name, rows), window in product(
            HEADS.items(), ROWS.items(), WINDOWS
        ):
            if window and (kind not in WINDOWED or break_order):
                continue
            orders = [algorithm.token_order(row) for row in rows]
            plan = Plan(rows, orders, (ulysses, mesh.ring.index), window)
            if break_order:
                orders = [order[::-1] for order in orders]
            index = torch.cat(
                [
                    torch.arange(a, b) + i * LENGTH
                    for i, order in enumerate(orders)
                    for a, b in order[mesh.context.index]
                ]
            )
            case = f"{name} U{ulysses} R{ring} {kind} {rows_name} window {window}"
            errors[case] = _errors(algorithm, plan, split, rows, (heads, index))
            page = books.close()
            if len(rows) == 1 and window is None:
                sent[case] = page, algorithm.cost(rows[0], heads, element_bytes=8)
    return errors, sent


def _errors(algorithm: Any, plan: Any, split: Split, rows: list[Segments], at: Any) -> list[float]:
    heads, index = at
    torch.manual_seed(0)
    tokens = LENGTH * len(rows)
    inputs = [
        torch.randn(tokens, n, DIM, dtype=torch.float64, requires_grad=True)
        for n in (heads.query, heads.kv, heads.kv)
    ]
    dout = torch.randn(tokens, heads.query, DIM, dtype=torch.float64)
    documents = [(i * LENGTH + a, i * LENGTH + b) for i, row in enumerate(rows) for a, b in row]
    reach = plan.window or tokens
    seen = [
        Block(p, p + 1, max(a, p - reach + 1), p + 1, Mask.FULL)
        for a, b in documents
        for p in range(a, b)
    ]
    want, _ = dense_attention(*inputs, seen, DIM**-0.5)
    grads = torch.autograd.grad(want, inputs, dout)
    mine = [x.detach()[index].requires_grad_() for x in inputs]
    got = algorithm.attend(tuple(mine), plan, Rule(DIM**-0.5), split)
    got_grads = torch.autograd.grad(got, mine, dout[index])
    pairs = zip((got, *got_grads), (want, *grads), strict=True)
    return [float((g - w[index]).detach().abs().max()) for g, w in pairs]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_algorithm_equals_dense_attention(world: int) -> None:
    answers = spawn(world, compare, world, False)
    for errors, _ in answers:
        kinds = len(HEADS) + len(WINDOWED) * (len(WINDOWS) - 1)
        assert len(errors) == len(degrees(world)) * kinds * len(ROWS)
        for case, off in errors.items():
            assert max(off) < 1e-10, f"{case}: out, dq, dk, dv off by {off}"
    for case, (_, cost) in answers[0][1].items():
        pages = [sent[case][0] for _, sent in answers]
        for kind in ("all_to_all", "ring", "gather"):
            busiest = max(page.get(kind, 0) for page in pages)
            assert busiest == getattr(cost, kind), f"{case}: {kind}"


def test_a_wrong_token_order_is_seen() -> None:
    for errors, _ in spawn(2, compare, 2, True):
        for case, off in errors.items():
            assert max(off) > 1e-3, f"{case} did not notice tokens in the wrong order"


def test_the_registry_is_covered() -> None:
    tried = {name for world in (1, 2, 4) for name, _, _ in degrees(world)}
    assert tried == set(ALGORITHMS)
