"""The test that a kernel must pass before it is used: agreement with plain PyTorch attention on
this device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from uspft.blocks import Block, Mask
from uspft.kernels.kernel import Kernel
from uspft.kernels.merge import Partial
from uspft.kernels.plain import dense_attention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""By dtype, the largest norm of an error relative to the norm of the right result for the same
rounded inputs."""
LSE_TOLERANCE = 2e-3
"""The largest error of lse, for any dtype: scores are summed in float32 or wider whatever the
inputs are."""
TANH_ERROR = 2**-11
"""The largest error of a capped score, as a share of the cap: for half types kernels may take the
GPU's approximate tanh."""

Calls = tuple[tuple[Block, ...], ...]


class Question(NamedTuple):
    """A test case: attention in two calls, of some queries over some keys."""

    queries: int
    keys: int
    calls: Calls


SHORT = Question(
    *(57, 90),
    (
        (Block(0, 40, 0, 40, Mask.CAUSAL), Block(40, 57, 40, 57, Mask.CAUSAL)),
        (Block(30, 40, 57, 80, Mask.FULL), Block(5, 15, 80, 90, Mask.FLIPPED)),
    ),
)
LONG = Question(
    *(520, 1020),
    ((Block(0, 520, 0, 520, Mask.CAUSAL),), (Block(490, 520, 520, 1020, Mask.FULL),)),
)
"""A case longer than a kernel's tiles; it has one head, since a model's heads would take
seconds."""


ALONE = Question(
    *(3, 40),
    (
        (Block(0, 1, 0, 13, Mask.FULL), Block(1, 2, 13, 40, Mask.FULL)),
        (Block(2, 3, 39, 40, Mask.CAUSAL),),
    ),
)
"""Single queries, for which kernels turn grouped heads into queries, in a separate code path."""
WINDOW = Question(
    *(48, 48),
    (
        tuple(Block(at, at + 16, at, at + 16, Mask.CAUSAL) for at in (0, 16, 32)),
        tuple(Block(at, at + 16, at - 16, at, Mask.FLIPPED) for at in (16, 32)),
    ),
)
"""A sliding window of 17 keys."""


def probe(
    kernel: Kernel, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Compare forward and backward of some attentions with the reference in float64.

    heads: (query heads, KV heads, head dim). Raises RuntimeError, which names the kernel, the
    quantity and the error, where they differ by more than rounding in dtype.
    """
    for question in (SHORT, ALONE, WINDOW):
        _ask(kernel, question, heads, (dtype, device))
    _ask(kernel, LONG, (1, 1, heads[2]), (dtype, device))


def _ask(
    kernel: Kernel,
    question: Question,
    heads: tuple[int, int, int],
    kind: tuple[torch.dtype, torch.device],
) -> None:
    query_heads, kv_heads, dim = heads
    (queries, keys, calls), (dtype, device) = question, kind
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, query_heads), *[(keys, kv_heads)] * 2, (queries, query_heads))
    wide = [torch.randn(n, h, dim, generator=generator, dtype=torch.float64) for n, h in shapes]
    by_token = [x.to(device, dtype) for x in wide]
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in by_token]
    # Scores large enough for a soft-cap to matter, so that a kernel that ignores it fails.
    scale = dim**-0.5 * (kernel.softcap / 4 if kernel.softcap else 1.0)
    truth = _truth(by_token, calls, scale, kernel.softcap)
    # exchanged q, k, v are contiguous by token, a model's own by head
    for inputs in (by_token, by_head):
        wrong = _first_wrong(_results(kernel, inputs, calls, scale), truth, dtype, kernel.softcap)
        if wrong:
            raise RuntimeError(
                f"attention kernel {kernel.name} is wrong on this machine: {wrong}, relatively "
                f"({query_heads} query heads, {kv_heads} KV heads, head dim {dim}, {dtype}); "
                "choose another model.attention"
            )


def _results(kernel: Kernel, inputs: list[Tensor], calls: Calls, scale: float) -> list[Tensor]:
    """Return a kernel's out, dq, dk, dv and lse, joined from one call for each group of blocks."""
    q, k, v, dout = inputs
    partial = Partial(q)
    for blocks in calls:
        partial.add(kernel.forward((q, k, v), blocks, scale))
    out, lse = partial.result()
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for blocks in calls:
        queries, keys = kernel.backward((q, k, v), (out, lse, dout), blocks, scale)
        for start, stop, (dq,) in queries:
            grads[0][start:stop] += dq
        for start, stop, (dk, dv) in keys:
            grads[1][start:stop] += dk
            grads[2][start:stop] += dv
    return [out, *grads, lse]


def _truth(inputs: list[Tensor], calls: Calls, scale: float, softcap: float | None) -> list[Tensor]:
    """Return out, dq, dk, dv and lse of the reference in float64, from the same rounded inputs."""
    q, k, v, dout = (x.detach().double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    every = [block for blocks in calls for block in blocks]
    out, lse = dense_attention(q, k, v, every, scale, softcap=softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout), lse.detach()]


def _first_wrong(
    results: list[Tensor], truth: list[Tensor], dtype: torch.dtype, softcap: float | None
) -> str:
    """Return the first result that differs by more than rounding in dtype, and by how much; "" if
    none does."""
    seen = truth[-1].isfinite()
    bent = TANH_ERROR * softcap if softcap and dtype.itemsize == 2 else 0.0
    for name, got, want in zip(("out", "dq", "dk", "dv", "lse"), results, truth, strict=True):
        off = got.double() - want
        if name == "lse":
            error, allowed = float(off[seen].abs().max()), LSE_TOLERANCE + bent
        else:  # weights and slopes change by less than the largest score error
            error, allowed = float(off.norm() / want.norm()), TOLERANCE[dtype] + bent / 4
        if not error <= allowed:
            return f"{name} is off by {error:.1e}"
    return ""
