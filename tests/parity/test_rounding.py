"""Splitting a row costs no precision: float32 to 5e-6, bfloat16 within 2 × one process's error."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.test_attention import degrees
from tests.support.ranks import spawn
from uspft.batch import Segments
from uspft.comm import Books, Group
from uspft.kernels import Block, Mask
from uspft.kernels.dense import dense_attention
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.sequence import Heads, Plan, Rule, Split, choose

LENGTH, HEADS = 256, Heads(8, 2, 32)
ROWS = {
    "one document": Segments.single(LENGTH),
    "packed": Segments((0, 117, 130, 131, 250), LENGTH),
}
SCALE = HEADS.dim**-0.5


def inputs() -> list[torch.Tensor]:
    """q, k, v and dout, unit normal."""
    torch.manual_seed(0)
    counts = (HEADS.query, HEADS.kv, HEADS.kv, HEADS.query)
    return [torch.randn(LENGTH, n, HEADS.dim, dtype=torch.float64) for n in counts]


def errors(algorithm: Any, plan: Any, split: Any, case: tuple[Segments, Any]) -> Any:
    """By dtype: (largest, root mean square) errors of out, dq, dk, dv on these tokens."""
    segments, index = case
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.to(dtype) for x in inputs()]
        exact = [x.double().requires_grad_() for x in rounded[:3]]
        squares = [Block(a, b, a, b, Mask.CAUSAL) for a, b in segments]
        want, _ = dense_attention(*exact, squares, SCALE)
        grads = torch.autograd.grad(want, exact, rounded[3].double())
        mine = [x[index].clone().requires_grad_() for x in rounded[:3]]
        got = algorithm.attend(tuple(mine), plan, Rule(SCALE), split)
        got_grads = torch.autograd.grad(got, mine, rounded[3][index])
        off = [
            g.double() - w[index]
            for g, w in zip((got.detach(), *got_grads), (want.detach(), *grads), strict=True)
        ]
        found[dtype] = [(float(x.abs().max()), float(x.square().sum())) for x in off]
    return found


def work(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, ulysses, ring in degrees(world):
        algorithm = choose(name, ulysses, ring)
        mesh = make_mesh(Layout(ulysses=ulysses, ring=ring), Books())
        split = Split(mesh.ulysses, mesh.ring, TorchCpu())
        for kind, segments in ROWS.items():
            order = algorithm.token_order(segments)
            plan = Plan([segments], [order], (ulysses, mesh.ring.index))
            index = torch.cat([torch.arange(a, b) for a, b in order[mesh.context.index]])
            case = f"{name} U{ulysses} R{ring} {kind}"
            found[case] = errors(algorithm, plan, split, (segments, index))
    return found


def alone(kind: str) -> Any:
    """The errors of one process."""
    algorithm, segments = choose(None, 1, 1), ROWS[kind]
    plan = Plan([segments], [algorithm.token_order(segments)], (1, 0))
    split = Split(Group(), Group(), TorchCpu())
    return errors(algorithm, plan, split, (segments, torch.arange(LENGTH)))


def test_rounding() -> None:
    answers = spawn(4, work, 4)
    single = {kind: alone(kind) for kind in ROWS}
    assert len(answers[0]) == 2 * len(degrees(4))
    for case in answers[0]:
        kind = next(kind for kind in ROWS if case.endswith(kind))
        for number, what in enumerate(("out", "dq", "dk", "dv")):
            largest = max(answer[case][torch.float32][number][0] for answer in answers)
            assert largest <= 5e-6, f"{case}: {what} in float32 is off by {largest}"
            squares = sum(answer[case][torch.bfloat16][number][1] for answer in answers)
            ratio = (squares / single[kind][torch.bfloat16][number][1]) ** 0.5
            assert ratio <= 2.0, f"{case}: {what} in bfloat16 is {ratio:.2f} × as far off"
