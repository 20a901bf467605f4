"""Cross-entropy from hidden states, tile by tile, so that never all logits are in memory.

If tensor ranks divide the vocabulary, each computes the logits of its part, and three numbers per
token are reduced over ranks (arXiv 1909.08053, section 3): the largest logit, the sum of
exponentials, and the target's logit.

Shapes: T tokens with a target, d hidden size, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.comm import Group, max_over, sum_over
from uspft.model.divided import wide


class Logits(NamedTuple):
    """The function from a head's products to logits: times scale, then cap · tanh(· / cap) if there
    is a soft-cap."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Logits:
        """Return the function that a Hugging Face config asks for."""
        divisor, cap = getattr(config, "logits_scaling", 1.0), "final_logit_softcapping"
        return cls(1.0 / divisor, getattr(config, cap, None))

    def apply(self, products: Tensor) -> Tensor:
        """Turn products into logits, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d products, from the logits."""
        if self.cap is None:
            return self.scale
        return logits.div(self.cap).square_().neg_().add_(1.0).mul_(self.scale)


PLAIN = Logits()


class Vocabulary(NamedTuple):
    """The part of the vocabulary whose embeddings and logits a rank computes."""

    first: int
    rows: int
    group: Group
    """The ranks that divide the vocabulary."""
    offset: int = 0
    """The index of the part's first row in the weight that this rank stores, which may have
    more."""

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens' indices in this rank's part, 0 for other ranks' tokens; and which tokens
        are other ranks'."""
        places = tokens - self.first
        others = (places < 0) | (places >= self.rows)
        return places.masked_fill_(others, 0), others


class Head(nn.Module):
    """The output projection and the loss in one module, so that ZeRO-3 gathers its weight once."""

    weight: Tensor

    def __init__(self, weight: Tensor, tile: int | None, logits: Logits = PLAIN) -> None:
        super().__init__()
        self.weight, self.tile, self.logits = weight, tile, logits

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        chosen: Tensor,
        scale: float | None,
        *,
        vocabulary: Vocabulary | None = None,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropy of all tokens with a target, times scale; or if scale
        is None, each token's cross-entropy, [T].

        The sum's gradients are computed in the forward, up to one factor. Without scale each token
        has a factor of its own, and the backward recomputes all logits. hidden [T', d]; labels [T']
        int64; chosen [T] int64: the indices of the T' tokens with a target, which are given since
        finding them on the device would make the host wait. The result is at least float32; without
        a target it is 0, attached to the graph. vocabulary: this rank's part, if ranks divide it;
        the gradient of hidden is then partial, to be summed over these ranks. whole: returns the
        weight with all its features, if this rank stores some of them.
        """
        rows = hidden.index_select(0, chosen)
        weight = self.weight
        if not torch.is_grad_enabled():  # which ctx.needs_input_grad does not know
            weight = weight.detach()
        if whole:
            weight = whole(weight)
        how = How(self.tile or max(1, len(rows)), self.logits, vocabulary)
        own = labels.index_select(0, chosen)
        loss: Tensor
        if scale is None:
            loss = _TokenCrossEntropy.apply(rows, weight, own, how)
        else:
            loss = _TiledCrossEntropy.apply(rows, weight, own, how, scale)
        return loss


class How(NamedTuple):
    """The arguments of the loss other than tensors and the scale."""

    tile: int
    form: Logits
    vocabulary: Vocabulary | None

    def used(self, held: Tensor) -> Tensor:
        """Return the rows of the head's weight with which this rank computes logits."""
        found = self.vocabulary
        return held.narrow(0, found.offset, found.rows) if found else held

    def spans(self, rows: Tensor) -> Iterator[slice]:
        """Yield the range of each tile's rows."""
        for start in range(0, len(rows), self.tile):
            yield slice(start, start + self.tile)

    def own(self, target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the targets' logits on this rank, [t, 1], and 1 for each target
        that is on this rank, else 0."""
        own = target[:, None]
        hit = logits.new_ones(own.shape)
        if self.vocabulary:
            own, others = self.vocabulary.local(own)
            hit.masked_fill_(others, 0.0)
        return own, hit

    def logits(self, part: Tensor, weight: Tensor) -> Tensor:
        """Return the logits of a tile's rows, [t, V], in float32 or wider. weight: the head's
        own."""
        products = nn.functional.linear(part, self.used(weight))
        return self.form.apply(products.to(wide(part)))


class _Softmax(NamedTuple):
    """The numbers from which a tile's cross-entropy follows, each [t, 1]."""

    own: Tensor
    hit: Tensor
    """As the second result of `How.own`."""
    total: Tensor
    """The sum of the exponentials."""
    log_total: Tensor
    """The log-sum-exp of the original logits."""
    chosen: Tensor
    """The target's logit."""

    @classmethod
    def of(cls, logits: Tensor, target: Tensor, how: How) -> _Softmax:
        """Return the numbers over the whole vocabulary; overwrites the logits with
        exponentials."""
        group = how.vocabulary.group if how.vocabulary else None
        most = logits.amax(-1, keepdim=True)
        own, hit = how.own(target, logits)
        if group:
            max_over(most, group, "tensor")
        chosen = logits.gather(1, own) * hit
        total = logits.sub_(most).exp_().sum(-1, keepdim=True)
        if group:
            total, chosen = sum_over(torch.stack([total, chosen]), group, "tensor")
        return cls(own, hit, total, most + total.log(), chosen)


class _TiledCrossEntropy(torch.autograd.Function):
    """Cross-entropy by tiles whose forward computes the gradients too, up to one factor."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        how: How,
        scale: float,
    ) -> Tensor:
        loss = torch.zeros((), dtype=wide(rows), device=rows.device)
        grads = Gradients(rows, weight, ctx, how) if any(ctx.needs_input_grad[:2]) else None
        for span in how.spans(rows):
            logits = how.logits(rows[span], weight)
            bend = how.form.slope(logits) if grads else 1.0
            found = _Softmax.of(logits, labels[span], how)
            loss += (found.log_total - found.chosen).sum()
            if grads:
                # Scaled before it is rounded: a rounded scale would shift every gradient alike.
                slope = logits.mul_(scale / found.total)
                slope.scatter_add_(1, found.own, found.hit.mul_(-scale))
                grads.add(span, slope, bend)
        if grads:
            ctx.save_for_backward(*grads.result())
        return loss * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        found = (g if g is None else g.mul(factor.to(g.dtype)) for g in ctx.saved_tensors)
        return *found, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token by tiles; the backward recomputes logits, since only then the
    tokens' factors are known."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        how: How,
    ) -> Tensor:
        log_totals = torch.empty(len(rows), dtype=wide(rows), device=rows.device)
        losses = torch.empty_like(log_totals)
        for span in how.spans(rows):
            found = _Softmax.of(how.logits(rows[span], weight), labels[span], how)
            log_totals[span] = found.log_total[:, 0]
            losses[span] = (found.log_total - found.chosen)[:, 0]
        ctx.save_for_backward(rows, weight, labels, log_totals)
        ctx.how = how
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels, log_totals = ctx.saved_tensors
        how: How = ctx.how
        grads = Gradients(rows, weight, ctx, how)
        for span in how.spans(rows):
            logits, factor = how.logits(rows[span], weight), factors[span, None]
            bend = how.form.slope(logits)
            own, hit = how.own(labels[span], logits)
            slope = logits.sub_(log_totals[span, None]).exp_().mul_(factor)
            slope.scatter_add_(1, own, hit.mul_(-factor))
            grads.add(span, slope, bend)
        return *grads.result(), None, None


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to `out` [m, n], which may have a wider dtype.

    On a GPU the product is added inside the kernel; otherwise a matrix as large as a head's weight
    would be written and read again for each tile.
    """
    if out.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(a @ b)


class Gradients:
    """The gradients of rows and weight; that of the weight is summed in at least float32.

    Only needed gradients are allocated: a frozen head's would be as large as its weight. Gradients
    of vocabulary rows that this call does not use are 0.
    """

    def __init__(self, rows: Tensor, weight: Tensor, ctx: Any, how: How) -> None:
        """rows, weight: the first inputs of an autograd function. ctx: its context."""
        needed = ctx.needs_input_grad
        self._rows, self._weight, self._how = rows, weight, how
        self._d_rows = torch.empty_like(rows) if needed[0] else None
        self._d_weight = torch.zeros_like(weight, dtype=wide(rows)) if needed[1] else None

    def add(self, span: slice, slope: Tensor, bend: Tensor | float) -> None:
        """Add the gradients of one tile.

        slope [t, V]: d loss / d logits of the tile, which is overwritten. bend: d logits / d
        products.
        """
        if self._how.form != PLAIN:
            slope.mul_(bend)
        slope, part, used = slope.to(self._rows.dtype), self._rows[span], self._how.used
        if self._d_rows is not None:
            self._d_rows[span] = slope @ used(self._weight)
        if self._d_weight is not None:
            _add_product(used(self._d_weight), slope.t(), part)

    def result(self) -> tuple[Tensor | None, ...]:
        kind = self._weight.dtype
        found = (self._d_rows, self._d_weight)
        return tuple(gradient if gradient is None else gradient.to(kind) for gradient in found)
