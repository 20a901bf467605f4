"""The hook into transformers' layers with a state: its own convolution and rule, over this rank's
share of each document.

A modelling file calls both by a global name, and hands them what the model was called with. There
the two names stand for functions that heed `uspft=`, as attention does, and are transformers' own
(fla's and causal-conv1d's where installed) without it.
"""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.sequence.states import Mixed

if TYPE_CHECKING:
    from types import ModuleType

    from uspft.model.attention import Bound

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""What a modelling file calls its convolution and its rule."""
PIECE_TOKENS = 1024
"""Tokens that transformers' written-out rule is given at once: its backward takes time by the
square of them."""
PASSED_ON = {"use_qk_l2norm_in_kernel", "chunk_size"}
"""Arguments of the rule that go to it as they come."""
NEUTRAL = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
IGNORED = {"position_ids", "use_cache", "output_attentions", "output_router_logits"}


def bind_linear_layers(model: nn.Module) -> None:
    """Let the layers with a state of a model heed the share that it is called with.

    Raises RuntimeError where its modelling file lacks one of the two functions.
    """
    for module in model.modules():
        if hasattr(module, "conv1d") and hasattr(module, "A_log"):
            _bind(sys.modules[type(module).__module__])
            module.register_forward_pre_hook(_named, with_kwargs=True)


def _named(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Tell a layer, before it runs, which one it is of those that are remembered."""
    bound: Bound | None = kwargs.get("uspft")
    return (args, {**kwargs, "uspft": bound.of_layer(id(module))}) if bound else None


def _bind(modelling: ModuleType) -> None:
    for name, ours in ((CONVOLUTION, _convolution), (RULE, _rule)):
        stock = getattr(modelling, name, None)
        if stock is None:
            raise RuntimeError(
                f"{modelling.__name__} has no {name}, which its layers with a state are split by; "
                "install a transformers version that pyproject.toml allows"
            )
        if not hasattr(stock, "without_uspft"):
            bound: Any = wraps(stock)(partial(ours, stock))
            bound.without_uspft = stock
            setattr(modelling, name, bound)


def _convolution(
    stock: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    uspft: Bound | None = None,
    **rest: Any,
) -> Tensor:
    """Convolve x [1, C, T] with weight [C, taps], each document by itself."""
    if uspft is None:
        found: Tensor = stock(x, weight, bias, activation=activation, **rest)
        return found
    run = partial(stock, weight=weight, bias=bias, activation=activation)
    return uspft.convolve(x, weight.shape[1], run)


def _rule(
    stock: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    uspft: Bound | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule on q, k [1, T, G, K], v [1, T, H, V], g and β [1, T, H] → out [1, T, H, V]."""
    if uspft is None:
        found: tuple[Tensor, Tensor | None] = stock(query, key, value, g=g, beta=beta, **rest)
        return found
    asked = {k: v for k, v in rest.items() if v is not None and k not in IGNORED | PASSED_ON}
    unknown = sorted(k for k, v in asked.items() if k not in NEUTRAL or v != NEUTRAL[k])
    if unknown:
        raise RuntimeError(
            f"a layer with a state asks its rule for {', '.join(unknown)}, "
            "which uspft does not support"
        )
    passed = {k: v for k, v in rest.items() if k in PASSED_ON}
    x = Mixed(*(t[0] for t in (query, key, value, g, beta)))
    return uspft.mix(x, partial(in_pieces, stock, passed))[None], None


def in_pieces(
    stock: Any, passed: dict[str, Any], x: Mixed, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run transformers' rule on tokens and the state that enters them; on CPU a piece at a time,
    each handing its state to the next."""
    tokens = len(x.v)
    size = PIECE_TOKENS if x.v.is_cpu else max(tokens, 1)
    state = None if state is None else state[None]
    outs = []
    for pieces in zip(*(t.split(size) for t in x), strict=True):
        q, k, v, g, beta = (t[None] for t in pieces)
        out, state = stock(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **passed
        )
        outs.append(out[0])
    assert state is not None, "a fragment has tokens"
    return torch.cat(outs) if len(outs) > 1 else outs[0], state[0]
