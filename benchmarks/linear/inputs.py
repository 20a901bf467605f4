"""What a layer with a state is given, and transformers' own rule over it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers.models.qwen3_5 import modeling_qwen3_5

from uspft.families import StateSizes
from uspft.model.linear import in_pieces
from uspft.sequence.states import Mixed, StateRule

GATES = ("no decay", "A 0.001", "A 0.01", "A 1", "A 16 for 1 token in 100, else 0.001")
"""How fast a state is forgotten: log of what it keeps is −A · softplus(a)."""


def rule() -> StateRule:
    """Return transformers' rule, as a layer of a run calls it."""
    stock = modeling_qwen3_5.torch_chunk_gated_delta_rule
    return partial(in_pieces, stock, {"use_qk_l2norm_in_kernel": True})


def inputs(tokens: int, sizes: StateSizes, gate: str = GATES[2]) -> Mixed:
    """Return q, k, v and gates of a row in float64, of which q and k keep to a few directions, as
    those of trained models do."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    usual = draw(1, sizes.keys, sizes.key_dim)
    q, k = (silu(draw(tokens, sizes.keys, sizes.key_dim) + usual) for _ in range(2))
    v = draw(tokens, sizes.values, sizes.value_dim)
    beta = draw(tokens, sizes.values).mul(1.5).sigmoid()
    return Mixed(q, k, v, _decays(gate, draw(tokens, sizes.values)), beta)


def _decays(gate: str, a: Tensor) -> Tensor:
    if gate == GATES[0]:
        return torch.zeros_like(a)
    step = softplus(a + 1)
    if gate == GATES[-1]:
        dice = torch.rand(a.shape, generator=torch.Generator().manual_seed(1), dtype=a.dtype)
        return -torch.where(dice < 0.01, 16.0, 0.001) * step
    return -float(gate.removeprefix("A ")) * step


def written_out(x: Mixed) -> Tensor:
    """Return the rule's out [T, H, V], token by token (arXiv 2412.06464, equation 10)."""
    group = x.v.shape[1] // x.k.shape[1]
    q, k = (_unit(one).repeat_interleave(group, 1) for one in (x.q, x.k))
    state = x.v.new_zeros(x.v.shape[1], k.shape[2], x.v.shape[2])
    out = torch.empty_like(x.v)
    keeps = x.g.exp()
    for t in range(len(x.v)):
        state = state * keeps[t, :, None, None]
        wrong = x.v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], x.beta[t, :, None] * wrong)
        out[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return out / k.shape[2] ** 0.5


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
