"""Attention of a ring rank's queries over the keys of all, its forward and its backward apart.

Shapes, as suffixes: t tokens of this ring rank; h/g query/KV heads on this rank, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group
from uspft.kernels import Kernel
from uspft.sequence.algorithm import Passes, Rule, Tensors


def attend_by(passes: Passes, qkv: Tensors, rule: Rule, ring: Group, kernel: Kernel) -> Tensor:
    """Return attention out [t, h, D], differentiable."""
    out: Tensor = _ByPasses.apply(*qkv, rule.sinks, passes, rule, ring, kernel)
    return out


class _ByPasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_thD: Tensor,
        k_tgD: Tensor,
        v_tgD: Tensor,
        sinks: Tensor | None,
        passes: Passes,
        rule: Rule,
        ring: Group,
        kernel: Kernel,
    ) -> Tensor:
        made = passes.forward(
            (q_thD, k_tgD, v_tgD), Rule(rule.scale, rule.window, sinks), ring, kernel
        )
        ctx.save_for_backward(q_thD, k_tgD, v_tgD, sinks, *made)
        ctx.passes, ctx.scale, ctx.ring, ctx.kernel = passes, rule.scale, ring, kernel
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_thD: Tensor) -> tuple[Tensor | None, ...]:
        q_thD, k_tgD, v_tgD, sinks, *made = ctx.saved_tensors
        rule = Rule(ctx.scale, None, sinks)
        qkv, saved = (q_thD, k_tgD, v_tgD), (*made, dout_thD)
        del made
        found = ctx.passes.backward(qkv, saved, rule, ctx.ring, ctx.kernel)
        return *found, None, None, None, None
