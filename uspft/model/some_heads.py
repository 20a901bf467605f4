"""Projections and norms of transformers' attention, restricted to some of its heads.

A module is replaced while attention's own code runs; the replacement reads the module's weights
when it is called, and copies none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from uspft.blocks import joined
from uspft.families.projections import (
    BEFORE,
    BEHIND,
    COLUMNS,
    GATED_QUERY,
    KV,
    PER_HEAD,
    QUERY,
    ROWS,
    STATE_GATE,
    STATE_GATES,
    STATE_GROUP,
    STATE_KEY,
    STATE_LAYER,
    STATE_OWN,
    STATE_VALUE,
)
from uspft.model.divided import PartLinear, SplitNorm, eps_of, some_product, wide
from uspft.model.dropout import dropouts_in
from uspft.model.halves import StandIn, same
from uspft.sequence.rows.spans import cut as cut_spans
from uspft.tensor.parts import Range, cut

if TYPE_CHECKING:
    from uspft.families.projections import Projection
    from uspft.sequence import Heads


class Piece(NamedTuple):
    """A range [start, stop) of a projection's features."""

    start: int
    stop: int
    made: bool = True
    """Whether they are computed; otherwise they are zeros."""

    @property
    def size(self) -> int:
        return self.stop - self.start


class SomeProduct:
    """A projection with some of the rows or columns of its weight."""

    def __init__(self, linear: Any, dim: int, pieces: Sequence[Piece]) -> None:
        """dim: 0 to restrict the weight's rows (output features), 1 for its columns (input
        features)."""
        self._linear, self._dim, self._pieces = linear, dim, pieces
        self._ranges = joined([(one.start, one.stop) for one in pieces if one.made])

    @property
    def weight(self) -> Tensor:
        """The weight, of which peft reads the dtype."""
        return self._held()[0]

    def _held(self) -> tuple[Tensor, Tensor | None]:
        linear = self._linear
        return linear.here() if isinstance(linear, PartLinear) else (linear.weight, linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._ranges:
            return _zeros(x, sum(one.size for one in self._pieces))
        weight, bias = self._held()
        used = [self._ranges, None] if self._dim == COLUMNS else [None, self._ranges]
        made = some_product(x, weight, bias if self._dim == COLUMNS else None, used)
        if all(one.made for one in self._pieces):
            return made
        parts = iter(made.split([one.size for one in self._pieces if one.made], dim=-1))
        every = [next(parts) if one.made else _zeros(x, one.size) for one in self._pieces]
        return torch.cat(every, dim=-1)


def _zeros(x: Tensor, features: int) -> Tensor:
    """Return zeros for x's tokens, [..., features], that take no memory."""
    return x.new_zeros(()).expand(*x.shape[:-1], features)


def _writable_zeros(x: Tensor, features: int) -> Tensor:
    """Return writable zeros: attention may write into them."""
    return x.new_zeros((*x.shape[:-1], features))


def some_of(owner: nn.Module, name: str, dim: int, pieces: Sequence[Piece]) -> list[StandIn]:
    """Return the replacements that restrict a projection to some features, and A or B of its
    adapter with it."""
    module: Any = owner.get_submodule(name)
    places: list[tuple[Any, str]] = [(owner, name)]
    if hasattr(module, "base_layer") and any(one.made for one in pieces):
        thin = module.lora_B if dim == COLUMNS else module.lora_A
        places = [(module, "base_layer"), *((thin, adapter) for adapter in thin.keys())]  # noqa: SIM118
    return [
        StandIn(at._modules, one, SomeProduct(at._modules[one], dim, pieces)) for at, one in places
    ]


class _OtherHeads:
    """A model's config with another number of query heads."""

    def __init__(self, config: Any, heads: int) -> None:
        self._config, self.num_attention_heads = config, heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Measured:
    """The replacement of an RMS norm over all heads that computes its factor for each token."""

    def __init__(self, norm: Any, x: Tensor) -> None:
        """x: [1, t, d], of all tokens."""
        self._norm = norm
        self.scale = x.new_empty((1, x.shape[1], 1), dtype=wide(x))
        self.tile = slice(None)

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if isinstance(norm, SplitNorm):
            found = norm.scale(x)
        else:
            mean = x.to(wide(x)).pow(2).mean(-1, keepdim=True)
            found = torch.rsqrt(mean + eps_of(norm))
        self.scale[:, self.tile] = found
        return x


class _Scaled:
    """An RMS norm over all heads, applied to some of them with known factors for each token."""

    def __init__(self, norm: Any, ranges: Sequence[Range], scale: Tensor) -> None:
        """scale: [1, t, 1], of all tokens."""
        self._norm, self._ranges, self._scale = norm, joined(ranges), scale
        self.tile = slice(None)

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        weight = norm.here() if isinstance(norm, SplitNorm) else norm.weight
        scaled = x.to(wide(x)) * self._scale[:, self.tile]
        return (cut(weight, [self._ranges]) * scaled).to(x.dtype)


_OUTPUT_GATES = ("in_proj_z", "g_proj")
"""The projections of layers with a state that gate the rule's output."""


class Unit(NamedTuple):
    """The features of one head in a block of a projection."""

    of_keys: bool
    """Whether a head is a key head; otherwise it is a query head, or a value head of a layer with a
    state."""
    parts: tuple[tuple[int, str], ...]
    """Consecutive ranges as (number of features, use): BEFORE or BEHIND."""

    @property
    def width(self) -> int:
        return sum(size for size, _ in self.parts)


class SomeHeads:
    """The replacements by which an attention, or a layer with a state, computes only some of its
    heads: its projections for these heads, and norms over all heads of a token, whose factors are
    measured beforehand."""

    def __init__(self, attention: nn.Module, projections: Mapping[str, Projection]) -> None:
        """projections: of the family, by the names of modules in a layer."""
        self.attention: Any = attention
        self.has_state = hasattr(attention, "A_log")
        of = STATE_LAYER if self.has_state else "self_attn"
        own = {
            name.removeprefix(f"{of}."): one
            for name, one in projections.items()
            if name.startswith(f"{of}.") and hasattr(attention, name.removeprefix(f"{of}."))
        }
        self.last = next(name for name, one in own.items() if one.dim == ROWS and one.blocks)
        self._into = {
            name: self._units(name, one.blocks)
            for name, one in own.items()
            if one.dim == COLUMNS and "proj" in name
        }
        together = own.get("q_norm", PER_HEAD) != PER_HEAD
        self._norms = ("q_norm", "k_norm") if together else ()

    def _units(self, name: str, blocks: Sequence[str]) -> tuple[Unit, ...]:
        """Return, for each block of a projection, the features of one head."""
        attention = self.attention
        if not self.has_state:
            dim = attention.head_dim
            gated = (dim, BEFORE), (dim, BEHIND)
            parts = {QUERY: gated[:1], KV: gated[:1], GATED_QUERY: gated}
            return tuple(Unit(block == KV, parts[block]) for block in blocks)
        key, value = attention.head_k_dim, attention.head_v_dim
        each = attention.num_v_heads // attention.num_k_heads
        gates = BEHIND if name in _OUTPUT_GATES else BEFORE
        every = {
            STATE_KEY: Unit(True, ((key, BEFORE),)),
            STATE_VALUE: Unit(False, ((value, gates),)),
            STATE_GATE: Unit(False, ((1, BEFORE),)),
            STATE_GROUP: Unit(
                True,
                ((key, BEFORE), (key, BEFORE), (each * value, BEFORE), (each * value, BEHIND)),
            ),
            STATE_GATES: Unit(True, ((2 * each, BEFORE),)),
        }
        return tuple(every[block] for block in blocks)

    @property
    def gated(self) -> bool:
        """Whether a projection of the input is used after attention, such as a gate."""
        return any(
            use == BEHIND for units in self._into.values() for one in units for _, use in one.parts
        )

    def measuring(self, x: Tensor) -> tuple[list[StandIn], list[_Measured]]:
        """Return the replacements that measure norms over all heads, and these norms themselves. x:
        of all tokens."""
        norms = [_Measured(getattr(self.attention, name), x) for name in self._norms]
        table = self.attention._modules
        return [StandIn(table, *one) for one in zip(self._norms, norms, strict=True)], norms

    def of(
        self, heads: Heads, queries: Sequence[Range], keys: Sequence[int], scales: Sequence[Tensor]
    ) -> tuple[list[StandIn], list[_Scaled]]:
        """Return the replacements with which attention projects only some heads, and the norms
        among these.

        heads: all heads of this rank. queries: ranges of query heads. keys: KV heads; empty: one of
        zeros. scales: the measured factors of norms over all heads.
        """
        attention, dim = self.attention, heads.dim
        places = self.projections(heads, queries, keys, BEFORE)
        rows = [(a * dim, b * dim) for a, b in queries]
        pair = [(head * dim, (head + 1) * dim) for head in keys]
        norms = [
            _Scaled(getattr(attention, name), ranges, scale)
            for name, ranges, scale in zip(self._norms, (rows, pair), scales, strict=False)
            if ranges
        ]
        table = attention._modules
        places += [StandIn(table, *one) for one in zip(self._norms, norms, strict=False)]
        if self._norms and not keys:
            places.append(StandIn(table, self._norms[1], same))
        return places, norms

    def projections(
        self, heads: Heads, queries: Sequence[Range], keys: Sequence[int], use: str
    ) -> list[StandIn]:
        """Return the replacements of the projections, and of the module's numbers of heads, that
        compute only the features of some heads with this use (before or after attention). The other
        features are zeros; without any there is one head of zeros."""
        attention = self.attention
        number = sum(b - a for a, b in queries)
        of_keys = [(head, head + 1) for head in keys]
        places = []
        for name, units in self._into.items():
            pieces, at = list[Piece](), 0
            for unit in units:
                some = of_keys if unit.of_keys else queries
                for head in (head for first, last in some for head in range(first, last)):
                    start = at + head * unit.width
                    for size, what in unit.parts:
                        pieces.append(Piece(start, start + size, what == use))
                        start += size
                if not some:
                    pieces.append(Piece(at, at + unit.width, False))
                at += unit.width * (heads.kv if unit.of_keys else heads.query)
            pieces = _merged(pieces)
            if not self.has_state and not any(one.made for one in pieces):
                nothing = partial(_writable_zeros, features=sum(one.size for one in pieces))
                places.append(StandIn(attention._modules, name, nothing))
            elif pieces != [Piece(0, at)]:
                places += some_of(attention, name, COLUMNS, pieces)
        if use == BEHIND and not self.has_state:  # queries and keys have no use after the rule
            norms = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
            places += [StandIn(attention._modules, name, same) for name in norms]
        own = attention.__dict__
        if number == heads.query:  # the module has this number already
            return places
        if self.has_state:
            dims = attention.head_k_dim, attention.head_v_dim
            for name in STATE_OWN:
                places.append(StandIn(own, name, cut(getattr(attention, name), [queries])))
            counts = {"num_k_heads": len(keys), "num_v_heads": number}
            counts |= {"key_dim": len(keys) * dims[0], "value_dim": number * dims[1]}
            places += [StandIn(own, *one) for one in counts.items()]
        elif hasattr(attention, "qkv_proj"):
            places.append(StandIn(own, "config", _OtherHeads(attention.config, number)))
            places.append(StandIn(own, "num_key_value_heads", len(keys) or 1))
        return places


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces, with adjacent ones merged that are all made or all zeros."""
    found: list[Piece] = []
    for one in pieces:
        last = found[-1] if found else None
        if last and last.made == one.made and (last.stop == one.start or not one.made):
            found[-1] = last._replace(stop=last.stop + one.size)
        else:
            found.append(one)
    return found


def seeing_some(module: nn.Module, ranges: Sequence[Range]) -> list[StandIn]:
    """Return the replacements that tell a module's dropouts that they see only some features.

    ranges: among the features that they see otherwise.
    """
    some, found = joined(ranges), list[StandIn]()
    for one in dropouts_in(module):
        seen = [cut_spans(one.ranges, *each) for each in some] if one.ranges else [some]
        found.append(StandIn(vars(one), "ranges", joined(chain(*seen))))
    return found
