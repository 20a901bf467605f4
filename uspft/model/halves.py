"""Transformers' own forwards run in part: up to attention's hook, from what attention gives, or as
one of a layer's two halves.

Others stand in for a module's children while its forward runs; nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from uspft.families.projections import STATE_LAYER

if TYPE_CHECKING:
    from uspft.sequence import Rule
    from uspft.sequence.mixing import Convolution
    from uspft.sequence.states import Mixed, StateRule


class StandIn(NamedTuple):
    """What stands at a place where a module keeps another."""

    table: dict[str, Any]
    name: str
    module: Any


@contextmanager
def standing_in(places: Sequence[StandIn]) -> Iterator[None]:
    """Let others stand in for modules within the `with` block."""
    before = [table.get(name) for table, name, _ in places]
    try:
        for table, name, module in places:
            table[name] = module
        yield
    finally:
        for (table, name, _), module in zip(places, before, strict=True):
            table[name] = module
            if module is None:  # what an instance shadows for the while
                del table[name]


class _Reached(Exception):
    """What ends a module's forward where all that was asked for is there."""


class Hook:
    """What travels in place of a Bound: what it is handed of attention, or of the rule of a layer
    with a state, whose convolution it leaves out. There it ends the module's forward."""

    def __init__(self, softcap: float | None) -> None:
        self.softcap = softcap
        self.entry: BlockInput | None = None
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.rule: Rule | None = None
        self.mixed: Mixed | None = None
        self.mixes: StateRule | None = None
        self.convolves: tuple[int, Convolution] | None = None
        """The taps of the convolution, and itself."""

    def of_layer(self, layer: int) -> Hook:
        return self

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        self.qkv, self.rule = qkv, rule
        raise _Reached

    def convolve(self, x: Tensor, taps: int, convolution: Convolution) -> Tensor:
        self.convolves = taps, convolution
        return x

    def mix(self, x: Mixed, rule: StateRule) -> Tensor:
        self.mixed, self.mixes = x, rule
        raise _Reached


class BlockInput:
    """What attention's block takes of a tile, behind the norm before it and the ranks' exchange."""

    x: Tensor

    def __init__(self, *, ends: bool) -> None:
        """ends: whether gradients end here."""
        self._ends = ends

    def take(self, x: Tensor) -> Tensor:
        """Keep it, and return what the block goes on with."""
        self.x = x.detach().requires_grad_() if self._ends else x
        return self.x


class Given(Hook):
    """What travels in place of a Bound where it is known what attention, or the rule, gives."""

    def __init__(self, softcap: float | None, out: Tensor) -> None:
        """out: [T, H, D]."""
        super().__init__(softcap)
        self._out = out

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        return self._out

    def mix(self, x: Mixed, rule: StateRule) -> Tensor:
        return self._out


def run_up_to(hook: Hook, run: Any, **kwargs: Any) -> None:
    """Run a module's own forward, which takes what is given here, until it is ended from within.

    Raises RuntimeError where it never is.
    """
    try:
        run(**kwargs, uspft=hook)
    except _Reached:
        return
    raise RuntimeError("a layer that is to work by groups of heads never came to what ends it")


class Halves(NamedTuple):
    """The children of a layer that is two halves with their residuals; empty where it has none."""

    before: str
    """The norm before attention."""
    attention: str
    """Attention, or what has a state in its place."""
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

    def gives(self, made: Tensor) -> Any:
        """Return what stands in for attention where it is known what that makes."""
        return lambda *_, **__: made if self.attention == STATE_LAYER else (made, None)


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
    Halves("input_layernorm", STATE_LAYER, "", ("post_attention_layernorm", "mlp")),
)
"""LLaMA's, Gemma's, OLMo 2's, Granite's with experts, and that of layers with a state."""


def halves_of(layer: nn.Module) -> Halves | None:
    """Return the halves of a layer; None where it has another form."""
    names = {name for name, one in layer.named_children() if not isinstance(one, nn.Dropout)}
    of_names = (form for form in _FORMS if names == {*filter(None, form[:3]), *form.rest})
    return next(of_names, None)


def same(x: Tensor) -> Tensor:
    """Return x: what stands in for a norm that is not asked for."""
    return x


def stops(found: list[Tensor]) -> Any:
    """Return what stands in for a module, keeps what it takes, and ends what runs."""

    def stop(x: Tensor) -> Tensor:
        found.append(x)
        raise _Reached

    return stop


def first_half(layer: nn.Module, halves: Halves, run: Any, x: Tensor, made: Tensor) -> Tensor:
    """Return what a layer makes of its input and of what attention's block made, before its second
    half. run: the layer's own forward."""
    found: list[Tensor] = []
    places = [
        StandIn(layer._modules, halves.attention, halves.gives(made)),
        StandIn(layer._modules, halves.rest[0], stops(found)),
    ]
    if halves.before:
        places.append(StandIn(layer._modules, halves.before, same))
    with standing_in(places):
        try:
            run(x, position_embeddings=None)
        except _Reached:
            return found[0]
    raise RuntimeError(f"{type(layer).__name__} never came to its second half")


def up_to_second_half(layer: Any, halves: Halves, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return what a layer makes of its input before its second half. kwargs: what its forward takes
    beside that."""
    found: list[Tensor] = []
    with standing_in([StandIn(layer._modules, halves.rest[0], stops(found))]), suppress(_Reached):
        own_forward(layer)(x, **kwargs)
    return found[0]


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
    places += [StandIn(layer._modules, name, same) for name in halves.norms_of_mlp]
    places.append(StandIn(layer._modules, halves.mlp, lambda _: made))
    with standing_in(places):
        out: Tensor = run(x, position_embeddings=None)
    return out


def _without_attention(layer: nn.Module, halves: Halves, x: Tensor) -> list[StandIn]:
    nothing = torch.zeros_like(x[..., :1])
    places = [StandIn(layer._modules, halves.attention, halves.gives(nothing))]
    norms = filter(None, (halves.before, halves.behind))
    return places + [StandIn(layer._modules, name, same) for name in norms]


def output_of_attention(
    layer: nn.Module, halves: Halves, run: Any, x: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """Return what a layer's attention gives of x, which no norm sees before. run, kwargs: the
    layer's own forward, and what it takes beside x."""
    attention, found = layer.get_submodule(halves.attention), list[Tensor]()

    def stop(*args: Any, **kwargs: Any) -> None:
        found.append(attention(*args, **kwargs)[0])
        raise _Reached

    places = [StandIn(layer._modules, name, same) for name in halves.norms_in]
    places.append(StandIn(layer._modules, halves.attention, stop))
    with standing_in(places), suppress(_Reached):
        run(x, **kwargs)
    return found[0]


def own_forward(module: Any) -> Any:
    """Return the forward of a module's type, of that module, without checkpointing around it."""
    forward: Any = type(module).forward
    layer = isinstance(module, GradientCheckpointingLayer)  # whose own is within
    return partial(forward.__wrapped__ if layer else forward, module)
