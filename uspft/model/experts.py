"""Expert and tensor parallelism of a mixture of experts: which rank holds what of the experts, the
dispatch of tokens to them, their matrix products, and the hook into transformers.

The hook is an implementation of transformers' `ExpertsInterface`. Expert parallel ranks hold some
experts each, in rank order. A token is sent once to each rank that holds some of its experts, with
all its choices, and the weighted sum of their outputs is sent back once. No token is dropped, and
nothing is padded. Tensor parallel ranks hold some inner features of every expert: tokens and scores
are gathered where the block begins and outputs are summed where it ends, so that the router is
replicated.

Shapes, as suffixes: t tokens here, k experts chosen for each, s rows sent, r rows received, g
ranks, p pairs of a row and an expert on this rank, d hidden size, i and o input and output features
of a matrix, E experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from uspft.comm import Group, all_to_all, with_backward
from uspft.model.adapter import ParameterAdapter, as_side, weight_of
from uspft.model.divided import Call, wide
from uspft.model.tiles import with_gradient
from uspft.parameters.experts import is_experts
from uspft.parameters.names import BESIDE, is_adapter, plain_name
from uspft.parameters.shards import MatrixSplit
from uspft.tensor.parts import Used, cut, put_back

if TYPE_CHECKING:
    from uspft.parameters.shards import Holders


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each module that has the weights of a layer's experts, with its name."""
    for name, module in model.named_modules():
        if any(is_experts(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)):
            yield name, module


ExpertSplits = dict[str, MatrixSplit | None]
"""The split of each parameter, by its name; None if every rank holds all of it."""


def splits_of_experts(model: nn.Module) -> tuple[ExpertSplits, dict[str, MatrixSplit]]:
    """Return how tensor ranks, and how expert parallel ranks, divide the parameters of all experts
    and of their adapters, by their names in files; of the latter rank i has the i-th part."""
    over_tensor, over_experts = ExpertSplits(), dict[str, MatrixSplit]()
    for path, module in expert_modules(model):
        for inside, _ in module.named_parameters():
            own, _, side = inside.partition(f"{BESIDE}.lora_")
            name, held = plain_name(f"{path}.{inside}"), getattr(module, own)
            experts, split = len(held), by_features(module, own, held.shape)
            if side:
                adapter = getattr(module, own + BESIDE)
                over_tensor[name] = _of_adapter(adapter, side[0], split)
                rank = adapter.rank  # which varies fastest in A, and the expert in B
                if side[0] == "A":
                    over = MatrixSplit(0, (experts * rank,), (experts,), in_order=True)
                else:
                    over = MatrixSplit(1, (experts,) * rank, in_order=True)
            else:
                over_tensor[name] = split
                over = MatrixSplit(0, (experts,), in_order=True)
            over_experts[name] = over
    return over_tensor, over_experts


def by_features(module: Any, name: str, shape: tuple[int, ...]) -> MatrixSplit:
    """Return how tensor ranks divide a parameter of all experts, [E, …].

    The bias of down_proj is divided over its output features, since every rank would otherwise add
    all of it before the sum over ranks. name: that of the parameter in the module.
    """
    dim = 1
    if not name.endswith("_bias") and name.startswith("down") != module.is_transposed:
        dim = 2
    size = shape[dim]
    if not name.startswith("gate_up"):
        return MatrixSplit(dim, (size,))
    if module.is_concatenated:
        return MatrixSplit(dim, (size // 2, size // 2))
    return MatrixSplit(dim, (size,), (size // 2,))


def _of_adapter(adapter: ParameterAdapter, side: str, split: MatrixSplit) -> MatrixSplit | None:
    """Return how tensor ranks divide a side of an adapter; None: not at all. split: that of the
    adapted parameter."""
    gives = split.dim == (2 if adapter.inputs_first else 1)
    if gives != (side == "B"):
        return None
    return MatrixSplit(0 if gives else 1, split.stacked, split.units)


class ExpertParts:
    """The parts of its experts' parameters that a call of a layer uses, if tensor ranks divide
    them."""

    def __init__(self, splits: Mapping[str, MatrixSplit], call: Call) -> None:
        """splits: by the parameters' names in the module; empty if no tensor rank divides them."""
        self._splits, self.call = splits, call

    @property
    def divided(self) -> bool:
        return bool(self._splits)

    def used(self, name: str) -> Used:
        """Return the ranges of this rank's part of a parameter that the call uses."""
        split = self._splits.get(name)
        return self.call.used(split) if split else ()

    def bias(self, module: Any, name: str, expert_p: Tensor, features: int) -> Tensor:
        """Return the biases [p, o] of the pairs' experts, with 0 for output features whose bias
        another rank holds: outputs are summed over ranks, so each bias is added once.

        features: o.
        """
        name = f"{name}_bias"
        used = self.used(name)
        found = cut(getattr(module, name), used)[expert_p]
        if (missing := features - found.shape[1]) == 0:
            return found
        ((first, _),) = self.call.ranges(self._splits[name])
        return pad(found, (first, missing - first))


WHOLE = ExpertParts({}, Call(None))
"""All of each expert, where no tensor rank divides them."""


def computed(
    module: Any,
    parts: ExpertParts,
    x_rd: Tensor,
    index_rk: Tensor,
    weight_rk: Tensor,
    *,
    every: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of this rank's experts for each row, [r, d].

    index_rk: each row's experts, counted from the first one here; others are ignored. weight_rk:
    their router weights. parts: which part of each expert is here. every: whether all experts are,
    so that the host need not wait for the device to count pairs.
    """
    count = module.num_experts
    if every:
        (rows, slots), where = index_rk.shape, index_rk.device
        row_p = torch.arange(rows, device=where).repeat_interleave(slots)
        slot_p = torch.arange(slots, device=where).repeat(rows)
    else:
        row_p, slot_p = ((index_rk >= 0) & (index_rk < count)).nonzero(as_tuple=True)
    expert_p, order = index_rk[row_p, slot_p].sort(stable=True)
    row_p, slot_p = row_p[order], slot_p[order]
    here = torch.arange(count, device=expert_p.device)
    ends_E = torch.searchsorted(expert_p, here, right=True).int()
    groups = expert_p, ends_E
    made = _product(module, "gate_up_proj", x_rd[row_p], groups, parts)
    made = _product(module, "down_proj", module._apply_gate(made), groups, parts)
    made = made * weight_rk[row_p, slot_p][:, None]
    sums = made.to(wide(made))
    out = sums.new_zeros(x_rd.shape).index_put((row_p,), sums, accumulate=True)
    return out.to(x_rd.dtype)


def _product(
    module: Any, name: str, x_p: Tensor, groups: tuple[Tensor, Tensor], parts: ExpertParts
) -> Tensor:
    """Return each row times its expert's matrix, plus the bias. x_p: rows sorted by expert.

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
    """Return the adapter's term for each row, scale · B(Ax), [p, o]; B · A is never formed."""
    made = x_pi
    for side, linear in (("A", adapter.lora_A), ("B", adapter.lora_B)):
        used = parts.used(f"{name}.lora_{side}.weight")
        form = Form(used, turned=side == "A", side=side, rank=adapter.rank)
        made = _Product.apply(made, linear.weight, ends_E, form)
    return made * adapter.scale


class Form(NamedTuple):
    """How a parameter stores its experts' matrices, and which part of it a call uses."""

    used: Used = ()
    turned: bool = False
    """Whether matrices are stored as [o, i] instead of [i, o]."""
    side: str = ""
    """A or B if the parameter is that matrix of an adapter; else empty."""
    rank: int = 0
    """The adapter's rank."""

    def of(self, held: Tensor) -> Tensor:
        """Return the matrices, [E, i, o]."""
        here = cut(held, self.used)
        here = weight_of(here, self.side, self.rank) if self.side else here
        return here.transpose(1, 2) if self.turned else here

    def put_back(self, value: Tensor, held: Tensor) -> Tensor:
        """Return the parameter's gradient, in its own shape. value: the gradient of the matrices as
        they are stored, [E, i, o] or [E, o, i]."""
        return put_back(as_side(value, self.side) if self.side else value, held, self.used)


class _Product(torch.autograd.Function):
    """The product of grouped rows with the used part of their groups' matrices.

    The backward saves the parameter itself and not a view of it, which would keep in memory the
    values that ZeRO-3 releases after the layer. Rows are saved only if the matrices train.
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
    """Return each row times its group's matrix, [p, o]. ends_E: where each group's rows end."""
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
    """Return whether torch's grouped_mm takes matrices with sides of these sizes: not in float64,
    and not if rows of a matrix begin elsewhere than at multiples of 16 bytes."""
    return x.dtype != torch.float64 and not any(one * x.element_size() % 16 for one in sizes)


def _groups(x_p: Tensor, ends_E: Tensor) -> Sequence[Tensor]:
    return x_p.tensor_split(ends_E[:-1].long().cpu())


KIND = "experts"
"""What its transfers count as."""


class Dispatch(NamedTuple):
    """The dispatch of tokens: which go to which rank, and how many come from each."""

    token_s: Tensor
    """The token of each row sent, sorted by destination rank; one row for each token and rank."""
    send: list[int]
    receive: list[int]
    group: Group

    @classmethod
    def of(cls, rank_tk: Tensor, group: Group) -> Dispatch:
        """Return the dispatch of tokens to the ranks that hold their experts; collective.

        rank_tk: the rank that holds each of a token's experts.
        """
        meets_gt = rank_tk.new_zeros((group.size, len(rank_tk)), dtype=torch.bool)
        meets_gt.scatter_(0, rank_tk.T, True)
        send = meets_gt.sum(1)
        each = [1] * group.size
        receive = all_to_all(send, each, each, group, KIND)
        leaving, coming = torch.stack([send, receive]).tolist()
        return cls(meets_gt.nonzero()[:, 1], leaving, coming, group)

    def there(self, x_t: Tensor) -> Tensor:
        """Send integers that belong to tokens, [t, …] int64, and return those of received rows."""
        return self.moved(x_t[self.token_s].int()).long()

    def moved(self, x_s: Tensor) -> Tensor:
        return _moved(x_s, self.send, self.receive, self.group)

    def moved_back(self, x_r: Tensor) -> Tensor:
        return _moved(x_r, self.receive, self.send, self.group)

    def returned(self, y_rd: Tensor, tokens: int) -> Tensor:
        """Send the experts' outputs back, and return their sum for each token, [t, d].

        Nothing is saved through autograd's hooks: activation checkpointing stops its recomputation
        before this point.
        """
        return with_backward(
            lambda y_rd: self.summed(self.moved_back(y_rd), tokens),
            lambda dy_td: self.moved(dy_td[self.token_s]),
            y_rd,
        )

    def summed(self, x_sd: Tensor, tokens: int) -> Tensor:
        """Return the sum of each token's rows, computed in at least float32, in the rows' dtype."""
        out = x_sd.new_zeros((tokens, *x_sd.shape[1:]), dtype=wide(x_sd))
        return out.index_put_((self.token_s,), x_sd.to(out.dtype), accumulate=True).to(x_sd.dtype)


def _moved(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    width = x.shape[1]
    flat = x.contiguous().view(-1)
    out = all_to_all(flat, [n * width for n in send], [n * width for n in receive], group, KIND)
    return out.view(-1, width)


class SentRows(torch.autograd.Function):
    """Sends tokens and their router weights to the ranks that hold their experts, and backward the
    gradients of both to the tokens' ranks. It is one function for both, so that all ranks start
    their transfers in the same order."""

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


NAME = "uspft"

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of rows [r, d], their experts [r, k], numbered from the first one on this rank, and
router weights [r, k]; returns the weighted sum over this rank's experts, [r, d]."""


def spread_experts(model: nn.Module, holders: Holders, calls: Sequence[Call]) -> None:
    """Make a model, loaded with this rank's experts, compute with those of all ranks.

    calls: each layer's current call, where tensor ranks divide matrices.
    """
    shards, group = holders.shards, holders.experts
    layers: Any = model.base_model.layers  # type: ignore[union-attr]
    call_of = {
        id(one): call for layer, call in zip(layers, calls, strict=False) for one in layer.modules()
    }
    for name, module in expert_modules(model):
        # ZeRO-3 gathers router and experts as one module, whose gradients it takes as complete when
        # the gradient of the module's input is computed.
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(with_gradient)
        named = {own: plain_name(f"{name}.{own}") for own, _ in module.named_parameters()}
        splits = {own: shards.splits[one] for own, one in named.items() if one in shards.splits}
        if group.size == 1 and not splits and not any(map(is_adapter, named.values())):
            continue
        module.config._experts_implementation = NAME
        module.num_experts //= group.size
        parts = ExpertParts(splits, call_of[id(module)]) if splits else WHOLE
        module.uspft = HeldExperts(module, group, parts)


class HeldExperts:
    """The forward of a layer's experts, of which this rank holds some or a part of each."""

    def __init__(self, module: Any, group: Group, parts: ExpertParts) -> None:
        """group: the expert parallel ranks. parts: which part of each expert is here."""
        if not module.has_gate or module.has_post_expert_norm:
            raise RuntimeError(f"{type(module).__name__} are experts of a kind that uspft lacks")
        self.compute: Compute = partial(computed, module, parts, every=group.size == 1)
        """The function that computes this rank's experts; callers may replace it by one that splits
        rows into tiles."""
        self._parts, self._group, self._number = parts, group, module.num_experts

    def __call__(self, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
        if not self._parts.divided:
            return self._all(x_td, index_tk, weight_tk)
        bound = self._parts.call.bound
        # squeeze, and not [0], whose gradient would be a copy
        entered = [bound.enter(one[None]).squeeze(0) for one in (x_td, index_tk, weight_tk)]
        return bound.leave(self._all(*entered)[None]).squeeze(0)

    def _all(self, x_td: Tensor, index_tk: Tensor, weight_tk: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of all ranks' experts for each token, [t, d]."""
        if self._group.size == 1:
            return self.compute(x_td, index_tk, weight_tk)
        route = Dispatch.of(index_tk // self._number, self._group)
        x_rd, weight_rk = SentRows.apply(x_td, weight_tk, route)
        first = self._group.index * self._number
        y_rd = self.compute(x_rd, route.there(index_tk) - first, weight_rk)
        return route.returned(y_rd, len(x_td))


# The function by which transformers calls experts.
ALL_EXPERTS_FUNCTIONS.register(NAME, lambda module, *of_tokens: module.uspft(*of_tokens))
