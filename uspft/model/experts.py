"""Experts of which a rank computes some: tokens go to the ranks that hold theirs, and come back.

It is an implementation of transformers' `ExpertsInterface`. Each token goes once to each rank that
holds some of its experts, with all its choices; what those make of it, weighted and summed, comes
back once. Nothing is dropped, and nothing is padded.

Shapes, as suffixes: t tokens here, k experts that each meets, s rows that leave, r rows that come,
p pairs of a row with an expert that is here, g ranks, d hidden size, E experts here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from uspft.comm import Group, all_to_all
from uspft.model.tiles import with_gradient
from uspft.parameters.experts import is_experts

if TYPE_CHECKING:
    from uspft.parameters.shards import Holders

NAME, KIND = "uspft", "experts"

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of rows [r, d], the experts that each meets [r, k], counted from the first one here,
and their weights [r, k]; returns the weighted sum over the experts that are here, [r, d]."""


def spread_experts(model: nn.Module, holders: Holders) -> None:
    """Make a model that is filled with this rank's experts compute with those of all ranks."""
    for name, module in expert_modules(model):
        # DeepSpeed gathers a block of router and experts as one, and so takes its gradients.
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(with_gradient)
        if holders.experts.size == 1:
            continue
        module.config._experts_implementation = NAME
        module.num_experts //= holders.experts.size
        module.uspft = HeldExperts(module, holders.experts)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each module that has the weights of a layer's experts, with its name."""
    for name, module in model.named_modules():
        if any(is_experts(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)):
            yield name, module


class HeldExperts:
    """The experts of a layer that are here, and the ranks that divide them."""

    def __init__(self, module: Any, group: Group) -> None:
        if not module.has_gate or module.has_post_expert_norm:
            raise RuntimeError(f"{type(module).__name__} are experts of a kind that uspft lacks")
        self.compute: Compute = lambda *rows: computed(module, *rows)
        """What computes the experts that are here; it may be given tiles of rows."""
        self._group, self._number = group, module.num_experts

    def __call__(self, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
        route = Dispatch.of(index_tk // self._number, self._group)
        x_rd, weight_rk = _Sent.apply(x_td, weight_tk, route)
        first = self._group.index * self._number
        y_rd = self.compute(x_rd, route.there(index_tk) - first, weight_rk)
        found: Tensor = _Returned.apply(y_rd, route, len(x_td))
        return found


def held_experts(module: Any, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
    """Return what experts make of tokens; the function by which transformers calls them."""
    found: Tensor = module.uspft(x_td, index_tk, weight_tk)
    return found


ALL_EXPERTS_FUNCTIONS.register(NAME, held_experts)


class Dispatch(NamedTuple):
    """Which rows go to which rank, and how many come from each."""

    token_s: Tensor
    """The token of each row that leaves, by the rank that it goes to; there each token once."""
    send: list[int]
    receive: list[int]
    group: Group

    @classmethod
    def of(cls, rank_tk: Tensor, group: Group) -> Dispatch:
        """Return the way of tokens to the ranks that hold their experts; collective."""
        meets_gt = rank_tk.new_zeros((group.size, len(rank_tk)), dtype=torch.bool)
        meets_gt.scatter_(0, rank_tk.T, True)
        send = meets_gt.sum(1)
        each = [1] * group.size
        receive = all_to_all(send, each, each, group, KIND)
        leaving, coming = torch.stack([send, receive]).tolist()
        return cls(meets_gt.nonzero()[:, 1], leaving, coming, group)

    def there(self, x_t: Tensor) -> Tensor:
        """Return what comes of a whole number or more for each token, int64 in and out."""
        return self.moved(x_t[self.token_s].int()).long()

    def moved(self, x_s: Tensor) -> Tensor:
        return _moved(x_s, self.send, self.receive, self.group)

    def moved_back(self, x_r: Tensor) -> Tensor:
        return _moved(x_r, self.receive, self.send, self.group)

    def summed(self, x_sd: Tensor, tokens: int) -> Tensor:
        """Return the sum of each token's rows, in float32 or wider and then as they are."""
        wide = torch.promote_types(x_sd.dtype, torch.float32)
        out = x_sd.new_zeros((tokens, *x_sd.shape[1:]), dtype=wide)
        return out.index_put_((self.token_s,), x_sd.to(wide), accumulate=True).to(x_sd.dtype)


def _moved(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    width = x.shape[1]
    flat = x.contiguous().view(-1)
    out = all_to_all(flat, [n * width for n in send], [n * width for n in receive], group, KIND)
    return out.view(-1, width)


class _Sent(torch.autograd.Function):
    """Tokens go to the ranks that hold their experts, with what these weigh; backward the gradients
    of both come back. One function, so that all ranks' transfers have one order."""

    @staticmethod
    def forward(
        ctx: Any, x_td: Tensor, weight_tk: Tensor, route: Dispatch
    ) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.tokens = route, len(x_td)
        return route.moved(x_td[route.token_s]), route.moved(weight_tk[route.token_s])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_rd: Tensor, dweight_rk: Tensor) -> tuple[Tensor | None, ...]:
        found = (
            ctx.route.summed(ctx.route.moved_back(d), ctx.tokens) if needed else None
            for d, needed in zip((dx_rd, dweight_rk), ctx.needs_input_grad, strict=False)
        )
        return *found, None


class _Returned(torch.autograd.Function):
    """What experts have made of rows comes back to their tokens, and is summed for each.

    Nothing is saved as autograd does: a layer that is run again ends before it.
    """

    @staticmethod
    def forward(ctx: Any, y_rd: Tensor, route: Dispatch, tokens: int) -> Tensor:
        ctx.route = route
        return route.summed(route.moved_back(y_rd), tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_td: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.moved(dy_td[ctx.route.token_s]), None, None


def computed(module: Any, x_rd: Tensor, index_rk: Tensor, weight_rk: Tensor) -> Tensor:
    """Return what the experts here make of rows, weighted and summed for each row, [r, d].

    index_rk: counted from the first expert here; what is not among them is left out.
    """
    count = module.num_experts
    row_p, slot_p = ((index_rk >= 0) & (index_rk < count)).nonzero(as_tuple=True)
    expert_p, order = index_rk[row_p, slot_p].sort(stable=True)
    row_p, slot_p = row_p[order], slot_p[order]
    here = torch.arange(count, device=expert_p.device)
    ends_E = torch.searchsorted(expert_p, here, right=True).int()
    made = _product(module, "gate_up_proj", x_rd[row_p], expert_p, ends_E)
    made = _product(module, "down_proj", module._apply_gate(made), expert_p, ends_E)
    made = made * weight_rk[row_p, slot_p][:, None]
    wide = made.to(torch.promote_types(made.dtype, torch.float32))
    out = wide.new_zeros(x_rd.shape).index_put((row_p,), wide, accumulate=True)
    return out.to(x_rd.dtype)


def _product(module: Any, name: str, x_p: Tensor, expert_p: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows, in the order of their experts, times their experts' matrices, with biases."""
    made: Tensor = _Product.apply(x_p, getattr(module, name), ends_E, not module.is_transposed)
    return made + getattr(module, f"{name}_bias")[expert_p] if module.has_bias else made


class _Product(torch.autograd.Function):
    """Rows, in groups, times their groups' matrices, [E, i, o] or turned [E, o, i].

    What is kept is the parameter itself: a view would keep the values that ZeRO-3 takes away after
    the layer. Rows are kept where matrices train alone.
    """

    @staticmethod
    def forward(ctx: Any, x_pi: Tensor, weight: Tensor, ends_E: Tensor, is_turned: bool) -> Tensor:
        ctx.save_for_backward(x_pi if ctx.needs_input_grad[1] else None, weight, ends_E)
        ctx.is_turned = is_turned
        return grouped(x_pi, weight.transpose(1, 2) if is_turned else weight, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_po: Tensor) -> tuple[Tensor | None, ...]:
        x_pi, weight, ends_E = ctx.saved_tensors
        dout_po = dout_po.contiguous()
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = grouped(dout_po, weight if ctx.is_turned else weight.transpose(1, 2), ends_E)
        if ctx.needs_input_grad[1]:
            left, right = (dout_po, x_pi) if ctx.is_turned else (x_pi, dout_po)
            dweight = _outer(left, right, ends_E)
        return dx, dweight, None, None


def grouped(x_pi: Tensor, weight_Eio: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows times the matrix of their group, [p, o]. ends_E: where each group's rows end."""
    if x_pi.dtype != torch.float64:
        return grouped_mm(x_pi, weight_Eio, offs=ends_E)
    pairs = zip(_groups(x_pi, ends_E), weight_Eio, strict=True)  # torch's kernel has no float64
    return torch.cat([x @ weight for x, weight in pairs])


def _outer(a_pi: Tensor, b_po: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over each group's rows of their outer products, [E, i, o]."""
    if a_pi.dtype != torch.float64:
        return grouped_mm(a_pi.t(), b_po, offs=ends_E)
    pairs = zip(_groups(a_pi, ends_E), _groups(b_po, ends_E), strict=True)
    return torch.stack([a.t() @ b for a, b in pairs])


def _groups(x_p: Tensor, ends_E: Tensor) -> Sequence[Tensor]:
    return x_p.tensor_split(ends_E[:-1].long().cpu())
