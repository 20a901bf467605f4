"""A kernel is believed only after it has agreed with the written-out formula on this device."""

from __future__ import annotations

import torch
from torch import Tensor

from uspft.kernels.blocks import Block, Mask
from uspft.kernels.dense import dense_attention
from uspft.kernels.kernel import Kernel
from uspft.kernels.merge import Partial

BLOCKS = (
    (Block(0, 40, 0, 40, Mask.CAUSAL), Block(40, 57, 40, 57, Mask.CAUSAL)),
    (Block(30, 40, 57, 80, Mask.FULL), Block(5, 15, 80, 90, Mask.FLIPPED)),
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the error over that of the truth, which has the same rounded inputs."""
LSE_TOLERANCE = 2e-3
"""Scores are summed in float32 or wider whatever the inputs are."""


def probe(
    kernel: Kernel, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Compare forward and backward of a two-call attention with the reference in float64.

    heads: query heads, KV heads, head dim. Raises RuntimeError naming the kernel, the quantity and
    the error where they differ by more than rounding in dtype.
    """
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(0)
    shapes = ((57, query_heads), (90, kv_heads), (90, kv_heads), (57, query_heads))
    wide = [torch.randn(n, h, dim, generator=generator, dtype=torch.float64) for n, h in shapes]
    by_token = [x.to(device, dtype) for x in wide]
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in by_token]
    # Scores that a soft-cap bends: a kernel that forgets it is seen.
    scale = dim**-0.5 * (kernel.softcap / 4 if kernel.softcap else 1.0)
    truth = _truth(by_token, scale, kernel.softcap)
    for inputs in (by_token, by_head):  # exchanged q, k, v lie by token, a model's own by head
        wrong = _first_wrong(_results(kernel, inputs, scale), truth, dtype)
        if wrong:
            raise RuntimeError(
                f"attention kernel {kernel.name} is wrong on this machine: {wrong}, relatively "
                f"({query_heads} query heads, {kv_heads} KV heads, head dim {dim}, {dtype}); "
                "choose another model.attention"
            )


def _results(kernel: Kernel, inputs: list[Tensor], scale: float) -> list[Tensor]:
    """out, dq, dk, dv and lse, joined from one call for each group of blocks."""
    q, k, v, dout = inputs
    partial = Partial(q)
    for blocks in BLOCKS:
        partial.add(kernel.forward((q, k, v), blocks, scale))
    out, lse = partial.result()
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for blocks in BLOCKS:
        queries, keys = kernel.backward((q, k, v), (out, lse, dout), blocks, scale)
        for start, stop, (dq,) in queries:
            grads[0][start:stop] += dq
        for start, stop, (dk, dv) in keys:
            grads[1][start:stop] += dk
            grads[2][start:stop] += dv
    return [out, *grads, lse]


def _truth(inputs: list[Tensor], scale: float, softcap: float | None) -> list[Tensor]:
    """The same in float64, from the same rounded inputs."""
    q, k, v, dout = (x.detach().double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    every = [block for blocks in BLOCKS for block in blocks]
    out, lse = dense_attention(q, k, v, every, scale, softcap=softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout), lse.detach()]


def _first_wrong(results: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> str:
    """What differs by more than rounding in dtype, and by how much; "" where nothing does."""
    seen = truth[-1].isfinite()
    for name, got, want in zip(("out", "dq", "dk", "dv", "lse"), results, truth, strict=True):
        off = got.double() - want
        error = float(off[seen].abs().max() if name == "lse" else off.norm() / want.norm())
        if not error <= (LSE_TOLERANCE if name == "lse" else TOLERANCE[dtype]):
            return f"{name} is off by {error:.1e}"
    return ""
