"""What every kernel owes: a block reads its own tokens only; and query heads that share KV heads
unevenly, beside dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import computed, expected
from tests.support.varlen import varlen_on_cpu
from uspft.kernels import Block, Grouped, Kernel, Mask, plain, torch_cpu
from uspft.kernels.plain import dense_attention
from uspft.kernels.torch_cpu import TorchCpu


@pytest.mark.parametrize(
    "kernel",
    [
        TorchCpu(),
        plain.TorchCapped(2.0),
        varlen_on_cpu(),
        Grouped(TorchCpu(), [((0, 1), (0, 1)), ((1, 4), (1, 2))]),
    ],
    ids=lambda kernel: kernel.name,
)
def test_a_block_reads_its_own_tokens_only(kernel: Any) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(30, n, 8) for n in (4, 2, 2, 4))
    blocks = [
        Block(0, 12, 0, 12, Mask.CAUSAL),
        Block(12, 15, 12, 15, Mask.CAUSAL),
        Block(15, 30, 15, 30, Mask.CAUSAL),
    ]

    before = computed(kernel, (q, k, v, dout), blocks)
    for block in blocks:
        broken = [x.clone() for x in (q, k, v, dout)]
        for x in broken:
            x[: block.q0], x[block.q1 :] = torch.nan, torch.nan
        rows = slice(block.q0, block.q1)
        after = computed(kernel, broken, blocks)
        assert all(torch.equal(x[rows], y[rows]) for x, y in zip(before, after, strict=True))
        assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("kernel", [TorchCpu(), plain.TorchCapped(2.0)])
def test_uneven_head_groups_equal_dense_attention(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "TILE_SCORES", 30)
    monkeypatch.setattr(torch_cpu, "TILE", 7)
    monkeypatch.setattr(torch_cpu, "STRIP", 7)
    q, k, v, dout = (torch.randn(20, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    blocks = [Block(0, 20, 0, 20, Mask.CAUSAL)]
    uneven = Grouped(kernel, [((0, 1), (0, 1)), ((1, 4), (1, 2))])
    spread = torch.tensor([0, 1, 1, 1])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k[:, spread], v[:, spread], blocks, 0.3, softcap=kernel.softcap)

    found = computed(uneven, (q, k, v, dout), blocks)
    for got, want in zip(found, expected(dense, (q, k, v, dout)), strict=True):
        assert torch.allclose(got, want)
