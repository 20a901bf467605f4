"""What every kernel owes: a block reads its own tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.kernels import computed
from tests.support.varlen import varlen_on_cpu
from uspft.kernels import Block, Grouped, Mask, capped
from uspft.kernels.torch_cpu import TorchCpu


@pytest.mark.parametrize(
    "kernel",
    [
        TorchCpu(),
        capped.TorchCapped(2.0),
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
