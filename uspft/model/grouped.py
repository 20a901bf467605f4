"""The products of tokens with the experts that they meet, grouped by expert.

Shapes, as suffixes: r rows, k experts that each meets, p pairs of a row with an expert that is
here, d hidden size, i and o what a matrix takes and gives, E experts here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, pad

from uspft.model.parameter_adapter import ParameterAdapter, as_side, weight_of
from uspft.parameters.names import BESIDE
from uspft.tensor.parts import Used, cut, put_back

if TYPE_CHECKING:
    from uspft.model.divided import Call
    from uspft.parameters.shards import MatrixSplit


class ExpertParts:
    """What calls of a layer use of its experts' parameters, where tensor ranks divide them."""

    def __init__(self, splits: Mapping[str, MatrixSplit], call: Call) -> None:
        """splits: by the parameters' own names; empty where each rank has all of every matrix."""
        self._splits, self.call = splits, call

    @property
    def divided(self) -> bool:
        return bool(self._splits)

    def used(self, name: str) -> Used:
        """Return what the call uses of what this rank holds of a parameter."""
        split = self._splits.get(name)
        return self.call.used(split) if split else ()

    def bias(self, module: Any, name: str, expert_p: Tensor, features: int) -> Tensor:
        """Return the biases [p, o] of pairs' experts, of which each rank adds those that it holds.

        features: o. What ranks have made is summed, so that a bias stands in it once.
        """
        name = f"{name}_bias"
        found = cut(getattr(module, name), self.used(name))[expert_p]
        if (missing := features - found.shape[1]) == 0:
            return found
        ((first, _),) = self.call.ranges(self._splits[name])
        return pad(found, (first, missing - first))


def computed(
    module: Any, parts: ExpertParts, x_rd: Tensor, index_rk: Tensor, weight_rk: Tensor
) -> Tensor:
    """Return what the experts here make of rows, weighted and summed for each row, [r, d].

    index_rk: counted from the first expert here; what is not among them is left out. parts: what of
    each expert is here.
    """
    count = module.num_experts
    row_p, slot_p = ((index_rk >= 0) & (index_rk < count)).nonzero(as_tuple=True)
    expert_p, order = index_rk[row_p, slot_p].sort(stable=True)
    row_p, slot_p = row_p[order], slot_p[order]
    here = torch.arange(count, device=expert_p.device)
    ends_E = torch.searchsorted(expert_p, here, right=True).int()
    groups = expert_p, ends_E
    made = _product(module, "gate_up_proj", x_rd[row_p], groups, parts)
    made = _product(module, "down_proj", module._apply_gate(made), groups, parts)
    made = made * weight_rk[row_p, slot_p][:, None]
    wide = made.to(torch.promote_types(made.dtype, torch.float32))
    out = wide.new_zeros(x_rd.shape).index_put((row_p,), wide, accumulate=True)
    return out.to(x_rd.dtype)


def _product(
    module: Any, name: str, x_p: Tensor, groups: tuple[Tensor, Tensor], parts: ExpertParts
) -> Tensor:
    """Return rows, in the order of their experts, times their experts' matrices, with biases.

    groups: each row's expert, and where each expert's rows end.
    """
    expert_p, ends_E = groups
    form = Form(parts.used(name), turned=not module.is_transposed)
    made: Tensor = _Product.apply(x_p, getattr(module, name), ends_E, form)
    if adapter := getattr(module, name + BESIDE, None):
        made = made + _beside(adapter, name + BESIDE, x_p, ends_E, parts)
    if not module.has_bias:
        return made
    return made + parts.bias(module, name, expert_p, made.shape[1])


def _beside(
    adapter: ParameterAdapter, name: str, x_pi: Tensor, ends_E: Tensor, parts: ExpertParts
) -> Tensor:
    """Return what an adapter makes of rows, [p, o], without the product of its two sides."""
    made = x_pi
    for side, linear in (("A", adapter.lora_A), ("B", adapter.lora_B)):
        used = parts.used(f"{name}.lora_{side}.weight")
        form = Form(used, turned=side == "A", side=side, rank=adapter.rank)
        made = _Product.apply(made, linear.weight, ends_E, form)
    return made * adapter.scale


class Form(NamedTuple):
    """How a parameter holds a matrix for each expert, and what of it is used."""

    used: Used = ()
    turned: bool = False
    """Whether matrices are [o, i] and not [i, o]."""
    side: str = ""
    """A or B of an adapter, of this rank."""
    rank: int = 0

    def of(self, held: Tensor) -> Tensor:
        """Return the matrices, [E, i, o]."""
        here = cut(held, self.used)
        here = weight_of(here, self.side, self.rank) if self.side else here
        return here.transpose(1, 2) if self.turned else here

    def put_back(self, value: Tensor, held: Tensor) -> Tensor:
        """Return the gradient of the parameter of those of the matrices, as they lie."""
        return put_back(as_side(value, self.side) if self.side else value, held, self.used)


class _Product(torch.autograd.Function):
    """Rows, in groups, times what is used of their groups' matrices.

    What is kept is the parameter itself: a view would keep the values that ZeRO-3 takes away after
    the layer. Rows are kept where matrices train alone.
    """

    @staticmethod
    def forward(ctx: Any, x_pi: Tensor, held: Tensor, ends_E: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(x_pi if ctx.needs_input_grad[1] else None, held, ends_E)
        ctx.form = form
        return grouped(x_pi, form.of(held), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_po: Tensor) -> tuple[Tensor | None, ...]:
        x_pi, held, ends_E = ctx.saved_tensors
        dout_po = dout_po.contiguous()
        dx = dheld = None
        if ctx.needs_input_grad[0]:
            dx = grouped(dout_po, ctx.form.of(held).transpose(1, 2), ends_E)
        if ctx.needs_input_grad[1]:
            left, right = (dout_po, x_pi) if ctx.form.turned else (x_pi, dout_po)
            dheld = ctx.form.put_back(_outer(left, right, ends_E), held)
        return dx, dheld, None, None


def grouped(x_pi: Tensor, weight_Eio: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows times the matrix of their group, [p, o]. ends_E: where each group's rows end."""
    if _has_kernel(x_pi, *weight_Eio.shape[1:]):
        return grouped_mm(x_pi, weight_Eio, offs=ends_E)
    pairs = zip(_groups(x_pi, ends_E), weight_Eio, strict=True)
    return torch.cat([x @ weight for x, weight in pairs])


def _outer(a_pi: Tensor, b_po: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over each group's rows of their outer products, [E, i, o]."""
    if _has_kernel(a_pi, a_pi.shape[1], b_po.shape[1]):
        return grouped_mm(a_pi.t(), b_po, offs=ends_E)
    pairs = zip(_groups(a_pi, ends_E), _groups(b_po, ends_E), strict=True)
    return torch.stack([a.t() @ b for a, b in pairs])


def _has_kernel(x: Tensor, *sizes: int) -> bool:
    """Return whether torch has a grouped product for matrices with such sides: none in float64, nor
    where rows of a matrix do not begin at multiples of 16 bytes."""
    return x.dtype != torch.float64 and not any(one * x.element_size() % 16 for one in sizes)


def _groups(x_p: Tensor, ends_E: Tensor) -> Sequence[Tensor]:
    return x_p.tensor_split(ends_E[:-1].long().cpu())
