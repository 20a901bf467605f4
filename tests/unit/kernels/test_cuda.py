"""torch's flash attentions: each kernel runs the one that it is called after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.varlen import cpu_backward, cpu_forward
from uspft.kernels import Block, Mask, cuda
from uspft.kernels.probe import probe
from uspft.kernels.varlen import Varlen, VarlenKernel


class Switch:
    """torch's switch between flash attentions, which is the process's; aten's calls, by who ran."""

    def __init__(self) -> None:
        self.active: str | None = None
        self.ran: list[str | None] = []
        self.turned = 0

    def turn(self, package: str | None) -> None:
        self.active, self.turned = package, self.turned + 1

    def attention(self, **missing: Any) -> SimpleNamespace:
        found = {
            "current_flash_attention_impl": lambda: self.active,
            "activate_flash_attention_impl": self.turn,
            "restore_flash_attention_impl": lambda: self.turn(None),
        }
        return SimpleNamespace(**{name: way for name, way in found.items() if name not in missing})

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.ran.append(self.active)
        return args[0], args[0][..., 0].t()

    def backward(self, dout: Tensor, *qkv: Any, **options: Any) -> tuple[Tensor, ...]:
        self.ran.append(self.active)
        return qkv[:3]


@pytest.mark.parametrize("told", [True, False])
def test_each_kernel_runs_what_it_is_called(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch()
    missing = {} if told else {"current_flash_attention_impl": True}
    aten = SimpleNamespace(
        _flash_attention_forward=switch.forward, _flash_attention_backward=switch.backward
    )
    monkeypatch.setattr(cuda, "attention", switch.attention(**missing))
    monkeypatch.setattr(torch.ops, "aten", aten)
    x = torch.randn(4, 1, 8)
    blocks = [Block(0, 4, 0, 4, Mask.CAUSAL)]

    def run(kernel: VarlenKernel) -> list[str | None]:
        switch.ran.clear()
        kernel.forward((x, x, x), blocks, 1.0)
        kernel.backward((x, x, x), (x, x[..., 0].t(), x), blocks, 1.0)
        return switch.ran

    own = cuda.torch_flash()
    assert run(own) == [None, None] and switch.turned == 0
    hopper, another = cuda.torch_flash("FA3"), cuda.torch_flash("FA4")
    assert run(hopper) == ["FA3", "FA3"] and run(another) == ["FA4", "FA4"]
    turned = switch.turned
    assert run(another) == ["FA4", "FA4"] and run(hopper) == ["FA3", "FA3"]
    if told:  # or torch is told anew each time, and its own cannot be had back
        assert switch.turned == turned + 1 and run(own) == [None, None]


class Cute:
    """flash-attn 4's functions with the parameters and results of release 4.0.0b36, on CPU."""

    def __init__(self, results: int) -> None:
        self.results = results

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        return_lse: bool,
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        sizes = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
        found = cpu_forward(q, k, v, sizes, softmax_scale)
        return (*found, None, None, None)[: self.results]

    def _flash_attn_bwd(
        self,
        *given: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, ...]:
        sizes = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
        q, k, v, out, dout, lse = given
        return cpu_backward((q, k, v), (out, lse, dout), sizes, softmax_scale)


@pytest.mark.parametrize("results", [2, 5])
def test_flash_attn_4_is_called_as_it_is_released(
    results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.importlib, "import_module", lambda name: Cute(results))
    probe(cuda.flash_attn_4(), (4, 2, 16), torch.float32, torch.device("cpu"))
