"""Kernels of layers with a state are believed only after they have agreed with transformers' own
written-out form on this device. Not yet run on a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.comm import said_by_all
from uspft.model.linear import CONVOLUTION, RULE, in_pieces
from uspft.sequence.states import Mixed, StateRule

if TYPE_CHECKING:
    from types import ModuleType

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""By dtype, how large the norm of an error may be, relative to the norm of what is right: a kernel
multiplies in tensor cores, float32 as tf32."""
TOKENS, HEADS = 200, 2
"""More than three of the rule's chunks of 64; key heads, which two value heads each share."""
NORMED = {"use_qk_l2norm_in_kernel": True}


def believe_linear_layers(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    told: Callable[[str], list[str]] = said_by_all,
) -> None:
    """Try the kernels of a model's layers with a state where it runs on a device that has kernels.

    told: returns what each rank says, by rank, and is collective. Raises RuntimeError on every rank
    where one of them found a kernel wrong.
    """
    layers = {
        sys.modules[type(module).__module__]: module
        for module in model.modules()
        if hasattr(module, "conv1d") and hasattr(module, "A_log")
    }
    if device.type == "cpu" or not layers:
        return
    wrong = ""
    try:
        for modelling, layer in layers.items():
            probe(modelling, layer, dtype, device)
    except RuntimeError as error:
        wrong = str(error)
    found = next(filter(None, told(wrong)), "")
    if found:
        raise RuntimeError(found)


def probe(modelling: ModuleType, layer: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare what a modelling file calls with what it has written out, forward and backward: the
    rule from no state, and from one over wider values, as summaries are made; the convolution.

    layer: one of its layers, for the dims of heads. Raises RuntimeError, which names the function,
    the quantity and the error.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    dims, values = (layer.head_k_dim, layer.head_v_dim), 2 * HEADS
    stock = {name: getattr(modelling, name) for name in (RULE, CONVOLUTION)}
    stock = {name: getattr(one, "without_uspft", one) for name, one in stock.items()}
    for wide in (False, True):
        width = dims[1] + dims[0] * wide
        q, k = (draw(TOKENS, HEADS, dims[0]).to(device, dtype) for _ in range(2))
        v = draw(TOKENS, values, width).to(device, dtype)
        decays = (-0.2 * draw(TOKENS, values).exp()).to(device)
        x = Mixed(q, k, v, decays, draw(TOKENS, values).sigmoid().to(device, dtype))
        state = draw(values, dims[0], width).to(device) if wide else None
        kernel, written = (partial(in_pieces, one, NORMED) for one in _both(stock[RULE]))
        run = partial(_rule_results, x, state)
        _compare(f"{RULE} of {modelling.__name__}", run, (kernel, written), dtype)
    taps = layer.conv1d.kernel_size[0]
    pair = draw(1, 4 * dims[0], TOKENS).to(device, dtype), draw(4 * dims[0], taps).to(device, dtype)
    _compare(
        f"{CONVOLUTION} of {modelling.__name__}",
        partial(_convolved, pair),
        _both(stock[CONVOLUTION]),
        dtype,
    )


def _both(stock: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what is called, and what transformers has written out."""
    return stock, inspect.unwrap(stock)


def _rule_results(x: Mixed, state: Tensor | None, rule: StateRule) -> dict[str, Tensor]:
    leaves = Mixed(*(one.detach().requires_grad_() for one in x))
    out, left = rule(leaves, state)
    grads = torch.autograd.grad(out.float().square().sum() + left.square().sum(), leaves)
    named = zip(("dq", "dk", "dv", "dg", "dbeta"), grads, strict=True)
    return {"out": out.detach(), "state": left.detach(), **dict(named)}


def _convolved(pair: tuple[Tensor, Tensor], convolve: Callable[..., Tensor]) -> dict[str, Tensor]:
    x, weight = (one.detach().requires_grad_() for one in pair)
    out = convolve(x, weight, None, activation="silu")
    dx, dweight = torch.autograd.grad(out.float().square().sum(), (x, weight))
    return {"out": out.detach(), "dx": dx, "dweight": dweight}


def _compare(
    what: str,
    results: Callable[[Any], dict[str, Tensor]],
    both: tuple[Any, Any],
    dtype: torch.dtype,
) -> None:
    got, wanted = (results(one) for one in both)
    for name, want in wanted.items():
        off = float((got[name].double() - want.double()).norm() / want.double().norm())
        if not off <= TOLERANCE[dtype]:
            raise RuntimeError(
                f"{what} is wrong on this machine: {name} is off by {off:.1e}, relatively, from "
                f"the written-out form ({dtype}); install another version of its package, or none"
            )
