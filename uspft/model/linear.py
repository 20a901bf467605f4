"""Layers with a state (gated delta nets): the hook into transformers' code, the test of its
kernels, and the heads that a tensor rank has.

A modelling file calls its convolution and its delta rule by global names, with the arguments of the
model's call. Both names are replaced by functions that use `uspft=`, as attention does, and without
it call transformers' own (fla's and causal-conv1d's where installed). Kernels are used only after
they have agreed with transformers' plain PyTorch version on this device. That version has run on a
GPU; fla's kernels have not yet.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.comm import said_by_all
from uspft.parameters.shards import MatrixSplit
from uspft.sequence.states import Mixed, StateRule

if TYPE_CHECKING:
    from types import ModuleType

    from uspft.model.attention import Bound
    from uspft.model.divided import Call

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""A modelling file's names for its convolution and its delta rule."""
PIECE_TOKENS = 1024
"""Tokens per call of transformers' plain delta rule, whose backward takes quadratic time."""
PASSED_ON = {"use_qk_l2norm_in_kernel", "chunk_size"}
"""Arguments that are passed on to the rule."""
NEUTRAL = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
IGNORED = {"position_ids", "use_cache", "output_attentions", "output_router_logits"}


def bind_linear_layers(model: nn.Module) -> None:
    """Make a model's layers with a state use the share that it is called with.

    Raises RuntimeError where its modelling file lacks one of the two functions.
    """
    for modelling, module in _layers_with_a_state(model):
        _bind(modelling)
        module.register_forward_pre_hook(_named, with_kwargs=True)


def _layers_with_a_state(model: nn.Module) -> Iterator[tuple[ModuleType, nn.Module]]:
    """Yield each layer with a state of a model, with the Python module of its code."""
    for module in model.modules():
        if hasattr(module, "conv1d") and hasattr(module, "A_log"):
            yield sys.modules[type(module).__module__], module


def _named(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Tell a layer, before it runs, its own number, by which results are saved."""
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
    """Run transformers' rule on tokens with an initial state; on CPU piece by piece, each starting
    from the state of the one before."""
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


TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""By dtype, the largest norm of an error relative to the norm of the right result: kernels use
tensor cores, for float32 in tf32."""
PROBE_TOKENS, PROBE_HEADS = 200, 2
"""More tokens than three of the rule's chunks of 64; key heads, each shared by two value heads."""
NORMED = {"use_qk_l2norm_in_kernel": True}


def believe_linear_layers(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    told: Callable[[str], list[str]] = said_by_all,
) -> None:
    """Test the kernels of a model's layers with a state on a device that has kernels.

    told: gathers each rank's message, collective. Raises RuntimeError on every rank if a kernel is
    wrong on any.
    """
    layers = dict(_layers_with_a_state(model))
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
    """Compare the kernels that a modelling file calls with its plain PyTorch versions, forward and
    backward: the rule without an initial state, and with one and wider values, as for summaries;
    the convolution.

    layer: one of its layers, for the head dims. Raises RuntimeError, which names the function, the
    quantity and the error.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    dims, values = (layer.head_k_dim, layer.head_v_dim), 2 * PROBE_HEADS
    stock = {name: getattr(modelling, name) for name in (RULE, CONVOLUTION)}
    stock = {name: getattr(one, "without_uspft", one) for name, one in stock.items()}
    for wide in (False, True):
        width = dims[1] + dims[0] * wide
        q, k = (draw(PROBE_TOKENS, PROBE_HEADS, dims[0]).to(device, dtype) for _ in range(2))
        v = draw(PROBE_TOKENS, values, width).to(device, dtype)
        decays = (-0.2 * draw(PROBE_TOKENS, values).exp()).to(device)
        x = Mixed(q, k, v, decays, draw(PROBE_TOKENS, values).sigmoid().to(device, dtype))
        state = draw(values, dims[0], width).to(device) if wide else None
        kernel, written = (partial(in_pieces, one, NORMED) for one in _both(stock[RULE]))
        run = partial(_rule_results, x, state)
        _compare(f"{RULE} of {modelling.__name__}", run, (kernel, written), dtype)
    taps = layer.conv1d.kernel_size[0]
    pair = (
        draw(1, 4 * dims[0], PROBE_TOKENS).to(device, dtype),
        draw(4 * dims[0], taps).to(device, dtype),
    )
    _compare(
        f"{CONVOLUTION} of {modelling.__name__}",
        partial(_convolved, pair),
        _both(stock[CONVOLUTION]),
        dtype,
    )


def _both(stock: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that is called, and transformers' plain PyTorch version of it."""
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


def divide_states(layer: Any, call: Call) -> None:
    """Make a layer with a state, loaded with this rank's shards, compute the heads of a call."""
    layer.uspft_heads = partial(_count_heads, call, layer.num_k_heads, layer.num_v_heads)
    layer.register_forward_pre_hook(layer.uspft_heads)


def _count_heads(call: Call, keys: int, values: int, layer: Any, args: Any) -> None:
    """Set the numbers of heads of a layer with a state for a call, before it runs, unless it
    computes only some heads. keys, values: heads of all ranks."""
    if "A_log" in layer.__dict__:
        return
    ((first, stop),) = call.ranges(MatrixSplit(0, (keys,)))
    layer.num_k_heads, layer.num_v_heads = stop - first, (stop - first) * (values // keys)
    layer.key_dim = layer.num_k_heads * layer.head_k_dim
    layer.value_dim = layer.num_v_heads * layer.head_v_dim
