"""How fast each installed kernel is, forward and backward; the same at small sizes on CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.support.gpu import Row, needs
from uspft.kernels import Block, Kernel, Mask, choose
from uspft.kernels.torch_cpu import TorchCpu

LENGTHS = (4096, 16384, 65536)
HEADS, KV_HEADS, DIM = 32, 8, 128
REPEATS = 5


def rates(kernel: Kernel, length: int, heads: tuple[int, int, int], device: torch.device) -> tuple:
    """TFLOP/s of a causal block, forward and backward: 4 · pairs · features, and 2.5 times that
    (FlashAttention-2, section 4.1)."""
    query, kv, dim = heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, dout = (torch.randn(length, query, dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(length, kv, dim, device=device, dtype=dtype) for _ in range(2))
    blocks = [Block(0, length, 0, length, Mask.CAUSAL)]
    (part,) = kernel.forward((q, k, v), blocks, dim**-0.5)
    flops = 4 * length**2 / 2 * query * dim
    forward = seconds(lambda: kernel.forward((q, k, v), blocks, dim**-0.5), device)
    saved = part.out, part.lse, dout
    backward = seconds(lambda: kernel.backward((q, k, v), saved, blocks, dim**-0.5), device)
    return flops / forward / 1e12, 2.5 * flops / backward / 1e12


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least time of a few, on the device's own clock where it has one."""
    best = float("inf")
    for _ in range(REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
    return best


def test_rates_on_cpu() -> None:
    forward, backward = rates(TorchCpu(), 256, (4, 2, 32), torch.device("cpu"))
    assert 0 < forward < 100 and 0 < backward < 100


@pytest.mark.full
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=needs(1))])
@pytest.mark.parametrize("name", [n for n in choose.SOURCES if choose.is_installed(n)])
def test_rates_by_kernel(name: str, gpus: int, row: Row) -> None:
    device = torch.device("cuda", 0)
    if name == "flash_attn_3" and torch.cuda.get_device_capability(device) != (9, 0):
        shapes = [(HEADS, KV_HEADS, DIM)]
        with pytest.raises((ImportError, RuntimeError)):
            choose.believed_kernel(name, shapes, torch.bfloat16, device)
        row(f"attention, {name}", "refused: not for this GPU")
        return
    kernel = choose.SOURCES[name].make()
    found = {n: rates(kernel, n, (HEADS, KV_HEADS, DIM), device) for n in LENGTHS}
    for length, (forward, backward) in found.items():
        told = f"{forward:.0f} TFLOP/s forward, {backward:.0f} backward"
        row(f"attention, {name}, {length >> 10}k tokens, causal", told)
        assert forward > 0 and backward > 0
