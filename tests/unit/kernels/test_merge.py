"""Joins of partial results: weights far apart, and queries without a key."""

from __future__ import annotations

import torch

from uspft.kernels import Block, Mask, Partial
from uspft.kernels.plain import dense_attention
from uspft.kernels.torch_cpu import TorchCpu


def test_joining_parts_whose_weights_differ_by_more_than_a_float_can_hold() -> None:
    torch.manual_seed(0)  # no two parts weigh alike: float32 holds such large sums to 1e-3
    q = torch.randn(6, 2, 8) * 40
    k, v = torch.randn(9, 2, 8) * 40, torch.randn(9, 2, 8)
    partial = Partial(q)
    for block in (Block(0, 6, 0, 4, Mask.FULL), Block(2, 6, 4, 9, Mask.FULL)):
        partial.add(TorchCpu().forward((q, k, v), [block], 1.0))
    blocks = [Block(0, 6, 0, 4, Mask.FULL), Block(2, 6, 4, 9, Mask.FULL)]
    want, lse = dense_attention(q, k, v, blocks, 1.0)
    out, got = partial.result()
    assert torch.allclose(out, want, atol=1e-5) and torch.allclose(got, lse, rtol=1e-5)


def test_a_query_without_a_key_has_out_zero_and_lse_minus_infinity() -> None:
    q = torch.randn(5, 2, 8)
    partial = Partial(q)
    partial.add(TorchCpu().forward((q, q, q), [Block(1, 3, 1, 3, Mask.CAUSAL)], 1.0))
    out, lse = partial.result()
    assert out[[0, 3, 4]].abs().sum() == 0 and (lse[:, [0, 3, 4]] == -torch.inf).all()
    assert out[1:3].isfinite().all() and lse[:, 1:3].isfinite().all()
