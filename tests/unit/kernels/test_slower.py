"""What is said of a kernel where another would be much faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kernels import CPU, GPU
from uspft.kernels import slower


@pytest.mark.parametrize(
    ("capability", "kernel", "softcap", "told"),
    [
        ((9, 0), "torch", None, "--no-deps --index-url https://download.pytorch.org/whl/cu130 fl"),
        ((9, 0), "flash_attn_2", None, "flash-attn 3 is not in use"),
        ((9, 0), "flash_attn_3", None, ""),
        ((9, 0), "torch", 50.0, "flash-attn 2, whose kernel can do that, is not in use"),
        ((9, 0), "flash_attn_2", 50.0, ""),
        ((8, 0), "torch", None, ""),
        ((10, 0), "torch", 30.0, "pip install flash-attn"),
    ],
)
def test_what_is_lost_is_said_with_a_remedy(
    capability: tuple[int, int],
    kernel: str,
    softcap: float | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    here: Any = SimpleNamespace(name=kernel, softcap=softcap)
    said = slower(here, GPU)
    assert said is None if not told else said and told in said and "\n" not in said
    assert slower(here, CPU) is None
