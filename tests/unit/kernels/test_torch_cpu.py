"""Tiles of the CPU kernel beside dense attention, and which types are tiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import TILED, TILED_SHAPES, computed, expected
from uspft.kernels import Block, Mask, torch_cpu
from uspft.kernels.plain import dense_attention
from uspft.kernels.torch_cpu import TorchCpu


@pytest.mark.parametrize("tile", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("strip", [1, 40, 1000])
@pytest.mark.parametrize("joined", [20, 1000])
def test_tiles_of_the_cpu_kernel_equal_dense_attention(
    tile: int, strip: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cpu, "TILE", tile)
    monkeypatch.setattr(torch_cpu, "STRIP", strip)
    monkeypatch.setattr(torch_cpu, "JOINED_ROWS", joined)
    inputs = tuple(torch.randn(n, h, 8, dtype=torch.float64) for n, h in TILED_SHAPES)
    found = computed(TorchCpu(), inputs, TILED)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k, v, TILED, 0.3)

    for got, want in zip(found, expected(dense, inputs), strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-11)


def test_a_tile_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = torch_cpu.strips
    monkeypatch.setattr(torch_cpu, "strips", lambda *shape: list(strips(*shape))[:-1])
    with pytest.raises(AssertionError):
        test_tiles_of_the_cpu_kernel_equal_dense_attention(16, 40, 1000, monkeypatch)


@pytest.mark.parametrize("length", range(17, 3000, 7))
def test_strips_are_even_and_no_power_of_two(length: int) -> None:
    width = torch_cpu.even(length, torch_cpu.STRIP)
    assert width.bit_count() > 1
    assert width % 16 == 0 and width - torch_cpu.STRIP <= 16
    assert -(-length // width) <= -(-length // torch_cpu.STRIP)


@pytest.mark.parametrize(("dtype", "calls"), [(torch.float32, 3 * 3 + 2), (torch.bfloat16, 1)])
def test_types_that_tiles_would_round_are_not_tiled(
    dtype: torch.dtype, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, backward = [], torch_cpu.BACKWARD

    def counting(*args: Any, **options: Any) -> Any:
        count.append(args)
        return backward(*args, **options)

    monkeypatch.setattr(torch_cpu, "BACKWARD", counting)
    n = 3 * torch_cpu.STRIP
    x = tuple(torch.randn(n, 1, 8, dtype=dtype) for _ in range(4))
    computed(TorchCpu(), x, [Block(0, n, 0, n, Mask.CAUSAL)])
    assert len(count) == calls


def test_the_cpu_kernel_takes_any_strides() -> None:
    q, k, v = (torch.randn(n, 8, 20, dtype=torch.float64).transpose(1, 2) for n in (4, 2, 2))
    q, k, v = (x.permute(1, 0, 2) for x in (q, k, v))
    blocks = [Block(0, 20, 0, 20, Mask.CAUSAL)]
    assert q.stride(-1) != 1
    (part,) = TorchCpu().forward((q, k, v), blocks, 0.3)
    want, _ = dense_attention(q, k, v, blocks, 0.3)
    assert torch.allclose(part.out, want)
