"""The way of tokens to the ranks that hold their experts, and back.

Each token goes once to each rank that holds some of its experts, with all its choices; what those
make of it, weighted and summed, comes back once. Nothing is dropped, and nothing is padded.

Shapes, as suffixes: t tokens here, k experts that each meets, s rows that leave, r rows that come,
g ranks, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all

KIND = "experts"
"""What its transfers count as."""


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


class SentRows(torch.autograd.Function):
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


class ReturnedRows(torch.autograd.Function):
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
