"""Whether an engine's result is dense attention's, which is asked before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.attention.engines import Attention
from benchmarks.attention.layer import TENSORS, Layer

LARGEST_ERROR = 1e-4
"""An error is a share of a tensor's largest value; float32 rounding stays near 1e-6."""


def dense(layer: Layer) -> dict[str, Tensor]:
    """This computes out, dq, dk, dv [S, heads, dim] in float64, every score written out."""
    drawn = {name: layer.draw(name).double() for name in TENSORS}
    results = {"out": torch.empty_like(drawn["q"])}
    results |= {f"d{name}": torch.empty_like(drawn[name]) for name in "qkv"}
    per_kv = layer.query_heads // layer.kv_heads
    for start, stop in layer.documents:
        hidden = torch.ones(stop - start, stop - start).triu(1).bool()
        for kv in range(layer.kv_heads):
            heads = slice(kv * per_kv, (kv + 1) * per_kv)
            q, dout = (drawn[name][start:stop, heads] for name in ("q", "dout"))
            k, v = (drawn[name][start:stop, kv] for name in ("k", "v"))
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            scores = torch.einsum("qhd,kd->hqk", inputs[0], inputs[1]) * layer.scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,kd->qhd", weights, inputs[2])
            dq, dk, dv = torch.autograd.grad(out, inputs, dout)
            results["out"][start:stop, heads] = out.detach()
            results["dq"][start:stop, heads] = dq
            results["dk"][start:stop, kv] = dk
            results["dv"][start:stop, kv] = dv
    return results


def run_once(attention: Attention, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """This runs forward and backward on this rank's tokens; nothing where it only waits."""
    if not len(attention.positions):
        return {}
    inputs = [tensors[name].requires_grad_() for name in "qkv"]
    out = attention.attend(inputs[0], inputs[1], inputs[2])
    gradients = torch.autograd.grad(out, inputs, tensors["dout"])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def errors(attention: Attention, layer: Layer, truth: dict[str, Tensor]) -> dict[str, float]:
    """This returns each result's largest error on this rank over the largest value of all ranks."""
    tensors = {name: layer.draw(name)[attention.positions] for name in TENSORS}
    got = run_once(attention, tensors)
    return {
        name: float((got[name] - truth[name][attention.positions]).abs().max())
        / float(truth[name].abs().max())
        for name in attention.results
        if name in got
    }
