"""The probe believes the kernels of this machine, and sees what is wrong with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import CPU, FLOAT, HEADS, Broken
from tests.support.varlen import varlen_on_cpu
from uspft.kernels import Mask, plain, torch_cpu
from uspft.kernels.kernel import BlockOutput
from uspft.kernels.probe import SHORT, probe
from uspft.kernels.torch_cpu import TorchCpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4, 16), (8, 2, 16), (6, 1, 24)])
def test_the_cpu_kernel_passes_the_probe(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    probe(TorchCpu(), heads, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.7, 50.0, None])
@pytest.mark.parametrize("tile", [2**18, 12])
def test_the_capped_kernel_passes_the_probe(
    dtype: torch.dtype, softcap: float | None, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "TILE_SCORES", tile)
    shapes = ((4, 4, 16), (8, 2, 16), (6, 1, 24))
    if tile < 100:  # thousands of pieces
        monkeypatch.setattr("uspft.kernels.probe.LONG", SHORT)
        shapes = shapes[-1:]
    for heads in shapes:
        probe(plain.TorchCapped(softcap), heads, dtype, CPU)


def test_the_variable_length_path_passes_the_probe() -> None:
    probe(varlen_on_cpu(), (4, 2, 16), torch.float32, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_the_probe_sees_a_forgotten_softcap(dtype: torch.dtype, softcap: float) -> None:
    forgetful = TorchCpu()
    forgetful.softcap = softcap
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(forgetful, HEADS, dtype, CPU)


@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_the_probe_allows_half_types_an_approximate_tanh(
    softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float16 has the relative error of the GPU's instruction.
    monkeypatch.setattr(Tensor, "tanh_", lambda x: x.copy_(x.tanh().half()))
    kernel = plain.TorchCapped(softcap)
    for dtype in (torch.bfloat16, torch.float16):
        probe(kernel, HEADS, dtype, CPU)
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(kernel, HEADS, FLOAT, CPU)


def test_the_probe_meets_the_tiles_that_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = torch_cpu.strips
    monkeypatch.setattr(torch_cpu, "strips", lambda *shape: list(strips(*shape))[:-1])
    with pytest.raises(RuntimeError, match="wrong on this machine: dq is off"):
        probe(TorchCpu(), HEADS, FLOAT, CPU)


class Shifted(TorchCpu):
    """A kernel whose lse is off, as one that forgets the scale's logarithm would have it."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        return [part._replace(lse=part.lse + 0.05) for part in super().forward(qkv, blocks, scale)]


class Blind(TorchCpu):
    """A kernel that takes any memory to lie token by token."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in qkv)
        return super().forward((q, k, v), blocks, scale)


class Lonely(TorchCpu):
    """A kernel that lays out the lse of single queries with grouped heads in another order."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        parts = super().forward(qkv, blocks, scale)
        grouped = qkv[0].shape[1] > qkv[1].shape[1]
        if grouped and all(block.q1 - block.q0 == 1 for block in blocks):
            return [part._replace(lse=part.lse.roll(1, 0)) for part in parts]
        return parts


class Unwindowed(TorchCpu):
    """A kernel that sees no key before a window's last tile."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        parts = super().forward(qkv, blocks, scale)
        if all(block.mask is Mask.FLIPPED for block in blocks):
            return [part._replace(lse=part.lse - torch.inf) for part in parts]
        return parts


@pytest.mark.parametrize("kernel", [Lonely(), Unwindowed()])
def test_the_probe_asks_what_models_ask_rarely(kernel: Any) -> None:
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(kernel, (4, 2, 64), torch.float32, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [Broken(), Shifted(), Blind()])
def test_the_probe_finds_a_broken_kernel(kernel: Any, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(kernel, (4, 2, 64), dtype, CPU)
