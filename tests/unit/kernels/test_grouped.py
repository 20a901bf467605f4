"""Query heads that share KV heads unevenly, beside dense attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernels import computed, expected
from uspft.kernels import Block, Grouped, Kernel, Mask, capped, torch_cpu
from uspft.kernels.dense import dense_attention
from uspft.kernels.torch_cpu import TorchCpu


@pytest.mark.parametrize("kernel", [TorchCpu(), capped.TorchCapped(2.0)])
def test_uneven_head_groups_equal_dense_attention(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "TILE_SCORES", 30)
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
