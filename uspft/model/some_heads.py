"""Parts of transformers' modules that run as they are: projections with some heads alone, attention
up to its hook, a layer's two halves.

No weight is copied into a module of ours: what stands in for a module asks it for its weights when
it runs, and the module's own code goes on around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from uspft.families.projections import COLUMNS
from uspft.model.divided import PartLinear
from uspft.model.dropout import TokenDropout
from uspft.tensor.cutting import cut
from uspft.tensor.parts import Range

if TYPE_CHECKING:
    from uspft.sequence import Rule


class StandIn(NamedTuple):
    """What stands at a place where a module keeps another."""

    table: dict[str, Any]
    name: str
    module: Any


@contextmanager
def standing_in(places: Sequence[StandIn]) -> Iterator[None]:
    """Let others stand in for modules within the `with` block."""
    before = [table[name] for table, name, _ in places]
    try:
        for table, name, module in places:
            table[name] = module
        yield
    finally:
        for (table, name, _), module in zip(places, before, strict=True):
            table[name] = module


class SomeProduct:
    """A projection with some of the rows or columns of its weight, without a gradient for them."""

    def __init__(self, linear: Any, dim: int, ranges: Sequence[Range]) -> None:
        """dim: 0 for rows of the weight, which make features, 1 for columns, which take them."""
        self._linear, self._dim, self._ranges = linear, dim, joined(ranges)

    @property
    def weight(self) -> Tensor:
        return cut(self._held()[0], [*[None] * self._dim, self._ranges])

    def _held(self) -> tuple[Tensor, Tensor | None]:
        linear = self._linear
        return linear.here() if isinstance(linear, PartLinear) else (linear.weight, linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        bias = self._held()[1] if self._dim == COLUMNS else None
        bias = None if bias is None else cut(bias, [self._ranges])
        return nn.functional.linear(x, self.weight, bias)


class OneOfZeros:
    """A projection that nobody asks for: it makes one head of zeros."""

    def __init__(self, features: int) -> None:
        self._features = features

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self._features)


def some_of(owner: nn.Module, name: str, dim: int, ranges: Sequence[Range]) -> list[StandIn]:
    """Return what stands in for a projection with some of its features alone, and for the thin one
    of an adapter that has these too."""
    module: Any = owner.get_submodule(name)
    places: list[tuple[Any, str]] = [(owner, name)]
    if hasattr(module, "base_layer"):
        thin = module.lora_B if dim == COLUMNS else module.lora_A
        places = [(module, "base_layer"), *((thin, adapter) for adapter in thin.keys())]  # noqa: SIM118
    return [
        StandIn(at._modules, one, SomeProduct(at._modules[one], dim, ranges)) for at, one in places
    ]


@contextmanager
def seeing_some(module: nn.Module, ranges: Sequence[Range]) -> Iterator[None]:
    """Tell the dropouts of a module within the `with` block that they see some of its features.

    ranges: of those that it sees otherwise.
    """
    dropouts = [one for one in module.modules() if isinstance(one, TokenDropout)]
    before = [one.ranges for one in dropouts]
    try:
        for one in dropouts:
            one.ranges = _among(one.ranges, joined(ranges))
        yield
    finally:
        for one, every in zip(dropouts, before, strict=True):
            one.ranges = every


def _among(every: Sequence[Range] | None, some: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges of what lies end to end in ranges, in the numbers of these."""
    if every is None:
        return tuple(some)
    found, at = [], 0
    for first, last in every:
        for a, b in some:
            start, stop = max(a, at), min(b, at + last - first)
            if start < stop:
                found.append((first + start - at, first + stop - at))
        at += last - first
    return tuple(found)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges in their order, those that follow each other as one, without empty ones."""
    found: list[Range] = []
    for a, b in ranges:
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        elif a < b:
            found.append((a, b))
    return tuple(found)


class _Reached(Exception):
    """What ends a module's forward where all that was asked for is there."""


class Hook:
    """What travels in place of a Bound: the queries, keys and values that it is handed."""

    def __init__(self, softcap: float | None) -> None:
        self.softcap = softcap
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.rule: Rule | None = None

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        self.qkv, self.rule = qkv, rule
        raise _Reached


def up_to_attention(
    run: Any, softcap: float | None, **kwargs: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], Rule]:
    """Return q [T, H, D], k and v [T, G, D] that a module hands to attention, and the rule.

    run: the module's own forward, which takes what is given here. Raises RuntimeError where it
    never came to attention.
    """
    hook = Hook(softcap)
    try:
        run(**kwargs, uspft=hook)
    except _Reached:
        assert hook.qkv and hook.rule
        return hook.qkv, hook.rule
    raise RuntimeError("a layer that is to attend by groups of heads never came to attention")


HALVES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""The children of a layer that is two halves with their residuals, in the order in which they run:
a norm and attention, a norm and the MLP."""


def has_halves(layer: nn.Module) -> bool:
    """Return whether a layer is such two halves, and no rank shares its matrices."""
    names = {name for name, _ in layer.named_children()}
    return names == {*HALVES} and not any(isinstance(m, PartLinear) for m in layer.modules())


def _same(x: Tensor) -> Tensor:
    return x


def _stop(found: list[Tensor]) -> Any:
    def stop(x: Tensor) -> Tensor:
        found.append(x)
        raise _Reached

    return stop


def first_half(layer: nn.Module, run: Any, x: Tensor, made: Tensor) -> Tensor:
    """Return what a layer makes of its input and of what attention's block made, before the MLP's
    norm. run: the layer's own forward."""
    found: list[Tensor] = []
    before, attention, after, _ = HALVES
    places = [
        StandIn(layer._modules, before, _same),
        StandIn(layer._modules, attention, lambda *_, **__: (made, None)),
        StandIn(layer._modules, after, _stop(found)),
    ]
    with standing_in(places):
        try:
            run(x, position_embeddings=None)
        except _Reached:
            return found[0]
    raise RuntimeError(f"{type(layer).__name__} never came to its second norm")


def second_half(layer: nn.Module, run: Any, x: Tensor) -> Tensor:
    """Return what a layer makes of what is between its halves: itself, with an attention that adds
    nothing. run: the layer's own forward."""
    before, attention, *_ = HALVES
    places = [
        StandIn(layer._modules, before, _same),
        StandIn(layer._modules, attention, lambda *_, **__: (torch.zeros_like(x[..., :1]), None)),
    ]
    with standing_in(places):
        out: Tensor = run(x, position_embeddings=None)
    return out
