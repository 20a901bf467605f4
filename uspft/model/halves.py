"""Transformers' own forwards run in part: up to attention's hook, from what attention gives, or as
one of a layer's two halves.

Others stand in for a module's children while its forward runs; nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """What stands at a place where a module keeps another module, a parameter or an attribute."""

    table: dict[str, Any]
    name: str
    module: Any


_NOTHING = object()


@contextmanager
def standing_in(places: Sequence[StandIn]) -> Iterator[None]:
    """Let others stand in for what modules keep within the `with` block."""
    before = [table.get(name, _NOTHING) for table, name, _ in places]
    try:
        for table, name, module in places:
            table[name] = module
        yield
    finally:
        for (table, name, _), module in zip(places, before, strict=True):
            table[name] = module
            if module is _NOTHING:  # what an instance shadows for the while
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


def until_ended(run: Any, *args: Any, **kwargs: Any) -> None:
    """Run a module's own forward until it is ended from within. Raises RuntimeError where it never
    is."""
    try:
        run(*args, **kwargs)
    except _Reached:
        return
    (module,) = run.args
    raise RuntimeError(f"{type(module).__name__} never came to what is to end its forward")


class HalfNames(NamedTuple):
    """The children of a layer that is two halves with their residuals; empty where it has none."""

    before: str
    """The norm before attention."""
    attention: str
    """Attention, or what has a state in its place."""
    behind: str
    """The norm behind attention."""
    rest: tuple[str, ...]
    """The MLP with its norms, in the order in which they run."""


_FORMS = (
    HalfNames("input_layernorm", "self_attn", "", ("post_attention_layernorm", "mlp")),
    HalfNames(
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    HalfNames("", "self_attn", "post_attention_layernorm", ("mlp", "post_feedforward_layernorm")),
    HalfNames("input_layernorm", "self_attn", "", ("post_attention_layernorm", "block_sparse_moe")),
    HalfNames("input_layernorm", STATE_LAYER, "", ("post_attention_layernorm", "mlp")),
)
"""LLaMA's, Gemma's, OLMo 2's, Granite's with experts, and that of layers with a state."""


class Halves:
    """A layer of two halves, whose own forward runs in part."""

    def __init__(self, layer: Any, form: HalfNames) -> None:
        self.layer, self._form, self._run = layer, form, own_forward(layer)
        self.attention: Any = layer.get_submodule(form.attention)
        self.first = [layer.get_submodule(name) for name in form[:3] if name]
        """The modules of the first half."""
        self.rest = [layer.get_submodule(name) for name in form.rest]
        self.norms_in = self.first[:1] if form.before else []
        """The norm before attention, where there is one."""
        self.norms_behind = self.first[-1:] if form.behind else []
        """The norm behind attention, where there is one."""
        at = next(n for n, name in enumerate(form.rest) if "norm" not in name)
        self.mlp: Any = self.rest[at]
        """The MLP, or the block of experts in its place."""
        self.norms_of_mlp = self.rest[:at]
        """The norms before the MLP."""
        self._mlp, self._norms_of_mlp = form.rest[at], form.rest[:at]

    @classmethod
    def of(cls, layer: nn.Module) -> Halves | None:
        """Return the halves of a layer; None where it has another form."""
        names = {name for name, one in layer.named_children() if not isinstance(one, nn.Dropout)}
        forms = (form for form in _FORMS if names == {*filter(None, form[:3]), *form.rest})
        return next((cls(layer, form) for form in forms), None)

    def joined(self, x: Tensor, made: Tensor) -> Tensor:
        """Return what the layer makes of its input and of what attention's block made, before its
        second half."""
        places = [self._attention_gives(made), *self._left_out(self._form.before)]
        return self._up_to_rest(places, x, position_embeddings=None)

    def before_rest(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return what the layer makes of its input before its second half. kwargs: what its forward
        takes beside that."""
        return self._up_to_rest([], x, **kwargs)

    def _up_to_rest(self, places: list[StandIn], x: Tensor, **kwargs: Any) -> Tensor:
        found: list[Tensor] = []
        with standing_in([*places, self._stands(self._form.rest[0], stops(found))]):
            until_ended(self._run, x, **kwargs)
        return found[0]

    def second(self, x: Tensor, made: Tensor | None = None) -> Tensor:
        """Return what the layer makes of what is between its halves: itself, with an attention that
        adds nothing. made: what the MLP made of it, where that is known."""
        nothing, form = torch.zeros_like(x[..., :1]), self._form
        places = [self._attention_gives(nothing), *self._left_out(form.before, form.behind)]
        if made is not None:
            places += self._left_out(*self._norms_of_mlp)
            places.append(self._stands(self._mlp, lambda _: made))
        with standing_in(places):
            out: Tensor = self._run(x, position_embeddings=None)
        return out

    def attended(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return what the layer's attention gives of x, which no norm sees before. kwargs: as of
        before_rest."""
        found = list[Tensor]()

        def stop(*args: Any, **kwargs: Any) -> None:
            found.append(self.attention(*args, **kwargs)[0])
            raise _Reached

        places = [*self._left_out(self._form.before), self._stands(self._form.attention, stop)]
        with standing_in(places):
            until_ended(self._run, x, **kwargs)
        return found[0]

    def _stands(self, name: str, one: Any) -> StandIn:
        return StandIn(self.layer._modules, name, one)

    def _left_out(self, *norms: str) -> list[StandIn]:
        return [self._stands(name, same) for name in norms if name]

    def _attention_gives(self, made: Tensor) -> StandIn:
        given = made if self._form.attention == STATE_LAYER else (made, None)
        return self._stands(self._form.attention, lambda *_, **__: given)


def same(x: Tensor) -> Tensor:
    """Return x: what stands in for a norm that is not asked for."""
    return x


def stops(found: list[Tensor]) -> Any:
    """Return what stands in for a module, keeps what it takes, and ends what runs."""

    def stop(x: Tensor) -> Tensor:
        found.append(x)
        raise _Reached

    return stop


def run_as_layer(layer: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run what stands in for a layer's forward, within the layer's checkpoint where it has one."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(run, **kwargs), *args)
    return run(*args, **kwargs)


def own_forward(module: Any) -> Any:
    """Return the forward of a module's type, of that module, without checkpointing around it."""
    forward: Any = type(module).forward
    layer = isinstance(module, GradientCheckpointingLayer)  # whose own is within
    return partial(forward.__wrapped__ if layer else forward, module)
