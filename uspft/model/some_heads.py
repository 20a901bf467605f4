"""Parts of transformers' modules that run as they are: projections with some heads alone, attention
up to its hook, a layer's two halves.

No weight is copied into a module of ours: what stands in for a module asks it for its weights when
it runs, and the module's own code goes on around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from uspft.families.projections import COLUMNS
from uspft.model.divided import PartLinear, SplitNorm, eps_of
from uspft.model.dropout import TokenDropout
from uspft.tensor.cutting import cut
from uspft.tensor.parts import Range

if TYPE_CHECKING:
    from uspft.sequence import Heads, Rule


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
        return x.new_zeros((*x.shape[:-1], self._features))


class _WithZeros:
    """A projection of some heads, with zeros behind them."""

    def __init__(self, some: SomeProduct, features: int) -> None:
        self._some, self._zeros = some, OneOfZeros(features)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._some(x), self._zeros(x)], dim=-1)


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


class _OtherHeads:
    """A config of a model with other query heads."""

    def __init__(self, config: Any, heads: int) -> None:
        self._config, self.num_attention_heads = config, heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Measured:
    """What stands in for an RMS norm over all heads, and finds by what it multiplies each token."""

    def __init__(self, norm: Any, x: Tensor) -> None:
        """x: [1, t, d], of all tokens."""
        self._norm = norm
        self.scale = x.new_empty((1, x.shape[1], 1), dtype=torch.float32)
        self.tile = slice(None)

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if isinstance(norm, SplitNorm):
            found = norm.scale(x)
        else:
            mean = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
            found = torch.rsqrt(mean + eps_of(norm))
        self.scale[:, self.tile] = found
        return x


class _Scaled:
    """An RMS norm of some heads, where it is known by what each token is multiplied."""

    def __init__(self, norm: Any, ranges: Sequence[Range], scale: Tensor) -> None:
        """scale: [1, t, 1], of all tokens."""
        self._norm, self._ranges, self._scale = norm, joined(ranges), scale
        self.tile = slice(None)

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        weight = norm.here() if isinstance(norm, SplitNorm) else norm.weight
        wide = x.to(torch.float32) * self._scale[:, self.tile]
        return (cut(weight, [self._ranges]) * wide).to(x.dtype)


class SomeHeads:
    """What lets an attention make some of its heads alone: projections of these, and where norms
    see all heads of a token together, what they multiply it by, which is measured before."""

    def __init__(self, attention: nn.Module, *, normed_together: bool) -> None:
        self._attention: Any = attention
        self._fused = hasattr(attention, "qkv_proj")
        self._norms = ("q_norm", "k_norm") if normed_together else ()

    def measuring(self, x: Tensor) -> tuple[list[StandIn], list[_Measured]]:
        """Return what stands in for norms over all heads, and the same once more. x: of all
        tokens."""
        norms = [_Measured(getattr(self._attention, name), x) for name in self._norms]
        table = self._attention._modules
        return [StandIn(table, *one) for one in zip(self._norms, norms, strict=True)], norms

    def of(
        self, heads: Heads, queries: Sequence[Range], keys: Sequence[int], scales: Sequence[Tensor]
    ) -> tuple[list[StandIn], list[_Scaled]]:
        """Return what stands in where some heads are made, and the norms among it.

        heads: all that are there. queries: ranges of query heads. keys: KV heads; none where one
        of zeros will do. scales: what was measured.
        """
        attention, dim = self._attention, heads.dim
        table = attention._modules
        rows = [(a * dim, b * dim) for a, b in queries]
        pair = [(head * dim, (head + 1) * dim) for head in keys]
        if self._fused:
            return self._of_one(heads, rows, pair), []
        places = some_of(attention, "q_proj", COLUMNS, rows)
        for name in ("k_proj", "v_proj"):
            if keys:
                places += some_of(attention, name, COLUMNS, pair)
            else:
                places.append(StandIn(table, name, OneOfZeros(dim)))
        norms = [
            _Scaled(getattr(attention, name), ranges, scale)
            for name, ranges, scale in zip(self._norms, (rows, pair), scales, strict=False)
            if ranges
        ]
        places += [StandIn(table, *one) for one in zip(self._norms, norms, strict=False)]
        if self._norms and not keys:
            places.append(StandIn(table, self._norms[1], _same))
        return places, norms

    def _of_one(self, heads: Heads, rows: Sequence[Range], pair: Sequence[Range]) -> list[StandIn]:
        """Return what stands in for a projection that makes queries, keys and values."""
        attention, dim = self._attention, heads.dim
        first, second = heads.query * dim, (heads.query + heads.kv) * dim
        every = [*rows, *((at + a, at + b) for at in (first, second) for a, b in pair)]
        places = some_of(attention, "qkv_proj", COLUMNS, every)
        if not pair:
            places = [one._replace(module=_WithZeros(one.module, 2 * dim)) for one in places]
        number = sum(b - a for a, b in rows) // dim
        own = attention.__dict__
        return [
            *places,
            StandIn(own, "config", _OtherHeads(attention.config, number)),
            StandIn(own, "num_key_value_heads", len(pair) or 1),
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


class Halves(NamedTuple):
    """The children of a layer that is two halves with their residuals; empty where it has none."""

    before: str
    """The norm before attention."""
    attention: str
    behind: str
    """The norm behind attention."""
    rest: tuple[str, ...]
    """The MLP with its norms, in the order in which they run."""

    @property
    def mlp(self) -> str:
        """The MLP, or the block of experts in its place."""
        return next(name for name in self.rest if "norm" not in name)

    @property
    def norms_in(self) -> tuple[str, ...]:
        """The norms before attention."""
        return (self.before,) if self.before else ()

    @property
    def norms_of_mlp(self) -> tuple[str, ...]:
        """The norms before the MLP."""
        return self.rest[: self.rest.index(self.mlp)]

    def first(self, layer: nn.Module) -> list[nn.Module]:
        """Return the modules of the first half."""
        return [layer.get_submodule(name) for name in self[:3] if name]


_FORMS = (
    Halves("input_layernorm", "self_attn", "", ("post_attention_layernorm", "mlp")),
    Halves(
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    Halves("", "self_attn", "post_attention_layernorm", ("mlp", "post_feedforward_layernorm")),
    Halves("input_layernorm", "self_attn", "", ("post_attention_layernorm", "block_sparse_moe")),
)
"""LLaMA's, Gemma's, OLMo 2's, and Granite's with experts."""


def halves_of(layer: nn.Module) -> Halves | None:
    """Return the halves of a layer; None where it has another form."""
    names = {name for name, one in layer.named_children() if not isinstance(one, nn.Dropout)}
    of_names = (form for form in _FORMS if names == {*filter(None, form[:3]), *form.rest})
    return next(of_names, None)


def _same(x: Tensor) -> Tensor:
    return x


def _stop(found: list[Tensor]) -> Any:
    def stop(x: Tensor) -> Tensor:
        found.append(x)
        raise _Reached

    return stop


def first_half(layer: nn.Module, halves: Halves, run: Any, x: Tensor, made: Tensor) -> Tensor:
    """Return what a layer makes of its input and of what attention's block made, before its second
    half. run: the layer's own forward."""
    found: list[Tensor] = []
    places = [
        StandIn(layer._modules, halves.attention, lambda *_, **__: (made, None)),
        StandIn(layer._modules, halves.rest[0], _stop(found)),
    ]
    if halves.before:
        places.append(StandIn(layer._modules, halves.before, _same))
    with standing_in(places):
        try:
            run(x, position_embeddings=None)
        except _Reached:
            return found[0]
    raise RuntimeError(f"{type(layer).__name__} never came to its second half")


def second_half(layer: nn.Module, halves: Halves, run: Any, x: Tensor) -> Tensor:
    """Return what a layer makes of what is between its halves: itself, with an attention that adds
    nothing. run: the layer's own forward."""
    with standing_in(_without_attention(layer, halves, x)):
        out: Tensor = run(x, position_embeddings=None)
    return out


def behind_mlp(layer: nn.Module, halves: Halves, run: Any, x: Tensor, made: Tensor) -> Tensor:
    """Return what a layer makes of what is between its halves and of what its MLP made. run: the
    layer's own forward."""
    places = _without_attention(layer, halves, x)
    places += [StandIn(layer._modules, name, _same) for name in halves.norms_of_mlp]
    places.append(StandIn(layer._modules, halves.mlp, lambda _: made))
    with standing_in(places):
        out: Tensor = run(x, position_embeddings=None)
    return out


def _without_attention(layer: nn.Module, halves: Halves, x: Tensor) -> list[StandIn]:
    nothing = torch.zeros_like(x[..., :1])
    places = [StandIn(layer._modules, halves.attention, lambda *_, **__: (nothing, None))]
    norms = filter(None, (halves.before, halves.behind))
    return places + [StandIn(layer._modules, name, _same) for name in norms]


def output_of_attention(
    layer: nn.Module, halves: Halves, run: Any, x: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """Return what a layer's attention gives of x, which no norm sees before. run, kwargs: the
    layer's own forward, and what it takes beside x."""
    attention, found = layer.get_submodule(halves.attention), list[Tensor]()

    def stop(*args: Any, **kwargs: Any) -> None:
        found.append(attention(*args, **kwargs)[0])
        raise _Reached

    places = [StandIn(layer._modules, name, _same) for name in halves.norms_in]
    places.append(StandIn(layer._modules, halves.attention, stop))
    with standing_in(places), suppress(_Reached):
        run(x, **kwargs)
    return found[0]


def own_forward(module: Any) -> Any:
    """Return the forward of a module's type, of that module, without checkpointing around it."""
    forward: Any = type(module).forward
    layer = isinstance(module, GradientCheckpointingLayer)  # whose own is within
    return partial(forward.__wrapped__ if layer else forward, module)
