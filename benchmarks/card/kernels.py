"""What attention kernels, and products, take on one GPU, and what kernels allocate inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uspft.kernels import Block, Kernel, Mask, choose

REPEATS = 5
LENGTHS = (4096, 16384, 65536)


class Heads(NamedTuple):
    """Query heads, KV heads, features of each."""

    query: int
    kv: int
    dim: int


LLAMA = Heads(32, 8, 128)
INSIDE = (LLAMA, Heads(32, 32, 128), Heads(8, 2, 128), Heads(32, 8, 64), Heads(16, 8, 256))
"""Heads whose kernels are asked what they allocate."""
PRODUCTS = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (4096, 128256))
"""Inputs and outputs of an 8B layer's matrices, and of its head."""


def kernels() -> dict[str, Kernel]:
    """Return those that are installed and load, by name."""
    found: dict[str, Kernel] = {}
    for name in choose.SOURCES:
        if choose.is_installed(name):
            try:
                found[name] = choose.SOURCES[name].make()
            except (ImportError, RuntimeError) as error:
                print(f"{name}: {error}", flush=True)
    return found


def rates(kernel: Kernel, heads: Heads, tokens: int, device: str = "cuda") -> dict[str, float]:
    """Return FLOP/s of a causal row, forward and backward: 4 · pairs · features, and 2.5 times that
    (FlashAttention-2, section 4.1)."""
    qkv, dout = _inputs(heads, tokens, device)
    blocks, scale = [Block(0, tokens, 0, tokens, Mask.CAUSAL)], heads.dim**-0.5
    (part,) = kernel.forward(qkv, blocks, scale)
    flops = 4 * tokens**2 / 2 * heads.query * heads.dim
    saved = part.out, part.lse, dout
    forward = seconds(lambda: kernel.forward(qkv, blocks, scale), device)
    backward = seconds(lambda: kernel.backward(qkv, saved, blocks, scale), device)
    return {"forward": flops / forward, "backward": 2.5 * flops / backward}


def inside(kernel: Kernel, heads: Heads, tokens: int, documents: int) -> dict[str, float]:
    """Return the bytes for each token that a kernel allocates beside what it returns."""
    qkv, dout = _inputs(heads, tokens)
    length, scale = tokens // documents, heads.dim**-0.5
    starts = [n * length for n in range(documents)]
    blocks = [Block(a, a + length, a, a + length, Mask.CAUSAL) for a in starts]
    parts = kernel.forward(qkv, blocks, scale)
    (out, lse) = (
        torch.cat([one.out for one in parts]),
        torch.cat([one.lse for one in parts], 1),
    )
    saved = out, lse, dout
    kernel.backward(qkv, saved, blocks, scale)
    del parts
    returned = 2 * (2 * heads.query + 2 * heads.kv) * heads.dim
    forward = _beside(lambda: kernel.forward(qkv, blocks, scale)) / tokens
    backward = _beside(lambda: kernel.backward(qkv, saved, blocks, scale)) / tokens
    return {
        "forward": forward - 2 * heads.query * heads.dim - 4 * heads.query,
        "backward": backward - returned + 2 * heads.query * heads.dim,
    }


def product(inputs: int, outputs: int, tokens: int) -> dict[str, float]:
    """Return FLOP/s of a matrix product forward and of its two gradients, in bfloat16."""
    x, w, dy = (
        torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    flops = 2.0 * tokens * inputs * outputs
    return {
        "forward": flops / seconds(lambda: x @ w.T),
        "backward": 2 * flops / seconds(lambda: (dy @ w, dy.T @ x)),
    }


def _inputs(
    heads: Heads, tokens: int, device: str = "cuda"
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(number: int) -> Tensor:
        return torch.randn(tokens, number, heads.dim, device=device, dtype=dtype)

    return (draw(heads.query), draw(heads.kv), draw(heads.kv)), draw(heads.query)


def seconds(work: Callable[[], object], device: str = "cuda") -> float:
    """Return the least of several times, on the GPU's own clock where it is one, after one that
    warms up."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        if device == "cuda":
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


def _beside(work: Callable[[], object]) -> int:
    """Return by how much the allocated bytes rise while work is done."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    del result
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured() -> dict[str, Any]:
    """Return what every kernel takes and allocates, and the rates of products."""
    found: dict[str, Any] = {"rates": {}, "inside": {}, "products": {}}
    for name, kernel in kernels().items():
        found["rates"][name] = {n: _or_error(rates, kernel, LLAMA, n) for n in LENGTHS}
        found["rates"][f"{name}, 64 features"] = {
            n: _or_error(rates, kernel, Heads(32, 8, 64), n) for n in LENGTHS[1:2]
        }
        found["inside"][name] = {
            f"{heads.query}/{heads.kv}/{heads.dim}, {documents} documents": _or_error(
                inside, kernel, heads, 16384, documents
            )
            for heads in INSIDE
            for documents in (1, 16)
        }
    for tokens in (2048, 8192, 32768):
        for inputs, outputs in PRODUCTS:
            if tokens * outputs < 2**32:
                found["products"][f"{tokens} x {inputs} x {outputs}"] = product(
                    inputs, outputs, tokens
                )
    return found


def _or_error(work: Callable[..., dict[str, float]], *given: Any) -> dict[str, Any]:
    try:
        return work(*given)
    except (RuntimeError, AssertionError, TypeError) as error:
        return {"error": str(error).splitlines()[0]}
