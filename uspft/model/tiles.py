"""Modules that work token by token, computed one tile of tokens at a time.

The forward saves only inputs. The backward builds the graph of one tile after another, takes its
gradients and frees it, so that there are activations of one tile only (Arctic Long Sequence
Training, arXiv 2506.13996). Gradients of weights are summed over tiles in float32 and given to
autograd once: DeepSpeed's own tiles sum in the compute dtype, and under ZeRO-3 gather the weights
for every tile.

A tiled module that is the last of a checkpointed layer is computed twice, not three times: its
output is filled in after its inputs are saved, and recomputation stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from uspft.model.divided import SplitNorm
from uspft.model.dropout import dropouts_in
from uspft.model.halves import StandIn, standing_in
from uspft.tensor.parts import tokens_of_each

if TYPE_CHECKING:
    from uspft.comm import Group

TOKENS = -2
"""The dimension of tokens in inputs and outputs, except those of norms of heads."""


def work_in_tiles(model: Any, tile: int) -> None:
    """Make MLPs, experts and norms compute `tile` tokens at a time.

    Routers see all tokens, since their logits are an output of the layer. Norms of queries and keys
    that are split over ranks are not tiled: they would need their collective again in the backward.
    """
    modules, of_heads = [model.base_model.norm], []
    for layer in model.base_model.layers:
        modules += _norms(layer)
        mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe
        beside = getattr(layer, "experts", None)
        for block in filter(None, (getattr(mlp, "experts", mlp), beside)):
            if held := getattr(block, "uspft", None):  # experts receive rows from other ranks
                held.compute = Tiled(block, tile, plain=held.compute)
            else:
                modules.append(block)
        shared = (getattr(mlp, name, None) for name in ("shared_expert", "shared_experts"))
        modules += filter(None, shared)
        if attention := getattr(layer, "self_attn", None):  # otherwise the layer has a state
            of_heads += [norm for norm in _norms(attention) if not isinstance(norm, SplitNorm)]
    for module in (*modules, *of_heads):
        module.register_forward_pre_hook(with_gradient)
    for module in modules:
        module.forward = Tiled(module, tile)
    for module in of_heads:
        module.forward = Tiled(module, tile, _longest)


def _norms(module: nn.Module) -> list[Any]:
    return [child for name, child in module.named_children() if "norm" in name]


def _longest(x: Tensor) -> int:
    """Return the longest dimension except the last: tokens may be before or after heads."""
    return max(range(x.dim() - 1), key=lambda dim: x.shape[dim])


def with_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Make the input of a module with trained parameters require a gradient, in a hook before it.

    ZeRO-3 takes the gradients of a module's parameters as complete when its input's is computed.
    """
    x, *others = args
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if x.requires_grad or not trains or not torch.is_grad_enabled():
        return None
    return x.detach().requires_grad_(), *others


def own_tokens(x: Tensor, group: Group, filled: int = 0) -> Tensor:
    """Return this rank's part [t] of a number per token [T], if tensor ranks divide the tokens.

    filled: the number for tokens that pad the last rank's part.
    """
    each = tokens_of_each(len(x), group.size)
    own = x[group.index * each :][:each]
    return pad(own, (0, each - len(own)), value=filled)


def of_all_ranks(x: Tensor, tile: slice, ranks: int, dim: int = 0) -> Tensor:
    """Return the same tile of every tensor rank's tokens, concatenated in rank order; x itself if
    that is all of it.

    x: of the tokens of all ranks. tile: the tile inside one rank's tokens. Padding is 0.
    """
    if ranks == 1:
        return x.narrow(dim, tile.start, tile.stop - tile.start)
    tokens = x.shape[dim]
    if ranks * (tile.stop - tile.start) == tokens:
        return x
    parts = [x.narrow(dim, a, b - a) for a, b in _places(tile, tokens, ranks)]
    missing = ranks * (tile.stop - tile.start) - sum(part.shape[dim] for part in parts)
    if missing:
        parts.append(x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :])))
    return torch.cat(parts, dim)


def put_of_all_ranks(whole: Tensor, tile: slice, ranks: int, part: Tensor) -> None:
    """Write `part`, a result of `of_all_ranks` along dimension 0, back to its positions."""
    at = 0
    for a, b in _places(tile, len(whole), ranks):
        whole[a:b] = part[at : at + b - a]
        at += b - a


def _places(tile: slice, tokens: int, ranks: int) -> list[tuple[int, int]]:
    each = tokens_of_each(tokens, ranks)
    bounds = [(r * each + tile.start, r * each + tile.stop) for r in range(ranks)]
    return [(min(a, tokens), min(b, tokens)) for a, b in bounds]


class Tiled:
    """A replacement of a module's forward that calls the original for one tile after another.

    It takes one or more tensors [..., T, ...] and returns one like the first of them. A module with
    several trained parameters is tiled even if its tokens are fewer than a tile: another rank may
    have more, and ZeRO-2 reduces gradients in the order in which they are computed, which is
    different with tiles.
    """

    def __init__(
        self,
        module: nn.Module,
        tile: int,
        along: Callable[[Tensor], int] = lambda _: TOKENS,
        plain: Callable[..., Tensor] | None = None,
        ranks: int = 1,
    ) -> None:
        """along: returns the dimension of the first input, and of all others, that is tiled.
        plain: the function of one tile, with the module's parameters; None: its forward. ranks:
        as in TiledCall."""
        self._module, self._tile, self._plain = module, tile, plain or module.forward
        self._along, self._ranks = along, ranks

    def __call__(self, *inputs: Tensor) -> Tensor:
        dim = self._along(inputs[0])
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        # Inside another module's tile, parameters are replaced by plain tensors.
        ordered = torch.is_grad_enabled() and all(isinstance(p, nn.Parameter) for p in parameters)
        if inputs[0].shape[dim] <= self._tile and not (ordered and len(parameters) > 1):
            whole: Tensor = self._plain(*inputs)
            return whole
        call = TiledCall(self._module, self._plain, self._tile, parameters, dim, self._ranks)
        out: Tensor = _Tiles.apply(call, len(inputs), *inputs, *parameters)
        with torch.no_grad():
            call.fill(out.detach(), inputs)
        return out


class TiledCall:
    """One call of a tiled module: what forward and backward need besides tensors."""

    def __init__(
        self,
        module: nn.Module,
        plain: Any,
        tile: int,
        parameters: list[nn.Parameter],
        dim: int,
        ranks: int = 1,
    ) -> None:
        """dim: the dimension that is tiled. ranks: the number of tensor ranks whose tokens are
        gathered for a tile; 1 if all have the same."""
        self.module, self.parameters, self.dim = module, parameters, dim
        self.ranks = ranks
        self._plain, self._tile = plain, tile
        self._dropouts = [(one, one.words, one.ranges) for one in dropouts_in(module)]

    def spans(self, x: Tensor) -> Iterator[tuple[int, int]]:
        """Yield the first token and the length of each tile of x."""
        tokens = x.shape[self.dim]
        for start in range(0, tokens, self._tile):
            yield start, min(self._tile, tokens - start)

    def run(self, parts: Sequence[Tensor], start: int) -> Tensor:
        """Return the module's output for a tile whose first token is `start`.

        Raises RuntimeError if its shape or dtype is not that of the first input.
        """
        x = parts[0]
        with self.of_tile(start, x.shape[self.dim]):
            out: Tensor = self._plain(*parts)
        if out.shape != x.shape or out.dtype != x.dtype:
            raise RuntimeError(
                f"{type(self.module).__name__} made {out.dtype} {tuple(out.shape)} of a tile "
                f"{x.dtype} {tuple(x.shape)}"
            )
        return out

    def of_tile(self, start: int, length: int) -> AbstractContextManager[None]:
        """Return the context in which dropouts know which tokens they see."""
        tile, places = slice(start, start + length), list[StandIn]()
        for dropout, words, ranges in self._dropouts:
            seen = None if words is None else of_all_ranks(words, tile, self.ranks)
            own = vars(dropout)
            places += [StandIn(own, "words", seen), StandIn(own, "ranges", ranges)]
        return standing_in(places)

    def fill(self, out: Tensor, inputs: Sequence[Tensor]) -> None:
        """Write the module's output for all tokens into `out`."""
        for start, length in self.spans(out):
            parts = [x.narrow(self.dim, start, length) for x in inputs]
            out.narrow(self.dim, start, length).copy_(self.run(parts, start))

    def gradients(self, sums: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """Yield the parameters' gradients in their dtypes. sums: over tiles; None: 0."""
        for parameter, total in zip(self.parameters, sums, strict=True):
            yield torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)

    @contextmanager
    def leaves(self) -> Iterator[list[Tensor]]:
        """Replace the trained parameters by tensors without hooks within the `with` block, and
        return these: hooks must see only whole gradients.
        """
        stand_in = {id(p): p.detach().requires_grad_() for p in self.parameters}
        places = [
            StandIn(owner._parameters, name, stand_in[id(parameter)])
            for owner in self.module.modules()
            for name, parameter in owner._parameters.items()
            if id(parameter) in stand_in
        ]
        with standing_in(places):
            yield [stand_in[id(p)] for p in self.parameters]


class _Tiles(torch.autograd.Function):
    """The autograd function of Tiled, whose output is filled in after it."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, count: int, *tensors: Tensor) -> Tensor:
        """count: the number of inputs among the tensors; the others are parameters."""
        ctx.call = call
        ctx.save_for_backward(*tensors[:count])
        return torch.empty_like(tensors[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call, inputs = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(inputs)]
        d_inputs = [
            torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=True)
        ]
        sums: list[Tensor | None] = [None] * len(call.parameters)
        with call.leaves() as leaves:
            for start, length in call.spans(dout):
                parts = [
                    x.narrow(call.dim, start, length).detach().requires_grad_(need)
                    for x, need in zip(inputs, needed, strict=True)
                ]
                with torch.enable_grad():
                    out = call.run(parts, start)
                wanted = [part for part in parts if part.requires_grad]
                slope = dout.narrow(call.dim, start, length)
                found = torch.autograd.grad(out, [*wanted, *leaves], slope, allow_unused=True)
                del out, parts
                places = [whole for whole in d_inputs if whole is not None]
                for whole, part in zip(places, found, strict=False):
                    whole.narrow(call.dim, start, length).copy_(part)
                add_up(sums, found[len(wanted) :])
                del found
        return None, None, *d_inputs, *call.gradients(sums)


def add_up(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add a tile's gradients to the sums, in at least float32. found: None: no gradient."""
    for number, part in enumerate(found):
        if part is None:
            continue
        total = sums[number]
        if total is None:
            sums[number] = part.to(torch.promote_types(part.dtype, torch.float32))
        else:
            total.add_(part)
