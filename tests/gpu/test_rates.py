"""How fast each installed kernel is, forward and backward; the same at small sizes on CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.card.kernels import LENGTHS, LLAMA, Heads, rates
from tests.support.gpu import Row, needs
from uspft.kernels import choose
from uspft.kernels.torch_cpu import TorchCpu


def test_rates_on_cpu() -> None:
    found = rates(TorchCpu(), Heads(4, 2, 32), 256, "cpu")
    assert len(found) == 2 and all(0 < each < 100e12 for each in found.values())


@pytest.mark.full
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=needs(1))])
@pytest.mark.parametrize("name", [n for n in choose.SOURCES if choose.is_installed(n)])
def test_rates_by_kernel(name: str, gpus: int, row: Row) -> None:
    device = torch.device("cuda", 0)
    if name == "flash_attn_3" and torch.cuda.get_device_capability(device) != (9, 0):
        shapes = [LLAMA]
        with pytest.raises((ImportError, RuntimeError)):
            choose.believed_kernel(name, shapes, torch.bfloat16, device)
        row(f"attention, {name}", "refused: not for this GPU")
        return
    kernel = choose.SOURCES[name].make()
    found = {n: rates(kernel, LLAMA, n) for n in LENGTHS}
    for length, both in found.items():
        forward, backward = (each / 1e12 for each in both.values())
        told = f"{forward:.0f} TFLOP/s forward, {backward:.0f} backward"
        row(f"attention, {name}, {length >> 10}k tokens, causal", told)
        assert forward > 0 and backward > 0
