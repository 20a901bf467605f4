"""Attention kernels for CUDA, which take blocks through the variable-length interface.

Each is probed at the start of a run. torch's own and flash-attn 4 have run on an H100; flash-attn 2
and 3 have not run on a GPU yet.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from uspft.kernels.kernel import KernelSaved, Qkv
from uspft.kernels.varlen import Varlen, VarlenKernel


def torch_flash(package: str | None = None) -> VarlenKernel:
    """Return torch's own flash attention (aten), for float16 and bfloat16; it needs no
    installation.

    package: FA3 (Hopper), whose kernels torch should use instead of its own. Raises ImportError
    where the package is not installed, RuntimeError where it is incompatible.
    """
    aten = torch.ops.aten
    _use(package)

    def forward(q: Tensor, k: Tensor, v: Tensor, x: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        _use(package)
        sizes = (x.cu_q, x.cu_k, x.longest_q, x.longest_k)
        out = aten._flash_attention_forward(q, k, v, *sizes, 0.0, x.causal, False, scale=scale)
        return out[0], out[1]

    def backward(qkv: tuple[Tensor, ...], saved: KernelSaved, x: Varlen, scale: float) -> Qkv:
        _use(package)
        out, lse, dout = saved
        sizes = (x.cu_q, x.cu_k, x.longest_q, x.longest_k)
        # The generator's state matters only with dropout, which is always 0 here.
        state = torch.zeros(2, dtype=torch.uint64, device=out.device)
        unused = torch.zeros((), dtype=torch.uint64, device=out.device)
        grads = aten._flash_attention_backward(
            dout, *qkv, out, lse, *sizes, 0.0, x.causal, state, unused, scale=scale
        )
        return grads[0], grads[1], grads[2]

    return VarlenKernel(f"flash_attn_{package[-1]}" if package else "torch", forward, backward)


def _use(package: str | None) -> None:
    """Make torch's flash attention use a package's kernels, or its own for None, in the whole
    process.

    This is called before each call, since another kernel may have changed it. A torch version that
    does not report which kernels are active is assumed to use its own, and is set anew each time.
    """
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if current == package:
        return
    if package:
        attention.activate_flash_attention_impl(package)
    else:
        attention.restore_flash_attention_impl()


def flash_attn_4() -> VarlenKernel:
    """Return the kernel of the flash-attn 4 package. Raises ImportError where it is not installed.

    torch 2.13 can run it too, but expects two results where release 4.0.0b36 returns five.
    """
    flash = importlib.import_module("flash_attn.cute.interface")

    def sizes(x: Varlen) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {**dict(zip(names, x[:4], strict=True)), "causal": x.causal}

    def forward(q: Tensor, k: Tensor, v: Tensor, x: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        asked = {"softmax_scale": scale, "return_lse": True, **sizes(x)}
        out, lse, *_ = flash._flash_attn_fwd(q, k, v, **asked)
        return out, lse

    def backward(qkv: tuple[Tensor, ...], saved: KernelSaved, x: Varlen, scale: float) -> Qkv:
        out, lse, dout = saved
        given = (*qkv, out, dout.contiguous(), lse)
        dq, dk, dv, *_ = flash._flash_attn_bwd(*given, softmax_scale=scale, **sizes(x))
        return dq, dk, dv

    return VarlenKernel("flash_attn_4", forward, backward)


def flash_attn_2(softcap: float | None = None) -> VarlenKernel:
    """Return the kernel of the flash-attn 2 package. Raises ImportError where it is not
    installed."""
    _use(None)
    flash = importlib.import_module("flash_attn.flash_attn_interface")
    cap = softcap or 0.0

    def forward(q: Tensor, k: Tensor, v: Tensor, x: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash._flash_attn_varlen_forward(
            q, k, v, *x[:4], dropout_p=0.0, softmax_scale=scale, causal=x.causal, softcap=cap
        )
        return out, lse

    def backward(qkv: tuple[Tensor, ...], saved: KernelSaved, x: Varlen, scale: float) -> Qkv:
        out, lse, dout = saved
        dq, dk, dv = (torch.empty_like(t) for t in qkv)
        flash._flash_attn_varlen_backward(
            *(dout.contiguous(), *qkv, out, lse, dq, dk, dv),
            *x[:4],
            dropout_p=0.0,
            softmax_scale=scale,
            causal=x.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=cap,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv

    return VarlenKernel("flash_attn_2", forward, backward, softcap)
