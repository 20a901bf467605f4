"""Running a part of transformers' own forwards: up to attention's hook, with a given output of
attention, or one of a layer's two halves (attention and MLP, each with norms and residual).

A module's children are replaced while its forward runs; none of transformers' code is copied.
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
    """A temporary replacement: `module`, a parameter or another value for the entry `name` of a
    module's table."""

    table: dict[str, Any]
    name: str
    module: Any


_NOTHING = object()


@contextmanager
def standing_in(places: Sequence[StandIn]) -> Iterator[None]:
    """Apply replacements within the `with` block."""
    before = [table.get(name, _NOTHING) for table, name, _ in places]
    try:
        for table, name, module in places:
            table[name] = module
        yield
    finally:
        for (table, name, _), module in zip(places, before, strict=True):
            table[name] = module
            if module is _NOTHING:  # the instance had no such entry
                del table[name]


class _Reached(Exception):
    """Raised to end a module's forward when it has reached the point up to which it was run."""


class Hook:
    """A stand-in for a Bound that records the inputs of attention, or of the delta rule of a layer
    with a state, and ends the module's forward there. It skips the convolution of such a layer."""

    def __init__(self, softcap: float | None) -> None:
        self.softcap = softcap
        self.entry: BlockInput | None = None
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.rule: Rule | None = None
        self.mixed: Mixed | None = None
        self.mixes: StateRule | None = None
        self.convolves: tuple[int, Convolution] | None = None
        """The taps of the convolution, and the convolution."""

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
    """The recorded input of an attention block for a tile, after the norm and the gather."""

    x: Tensor

    def __init__(self, *, ends: bool) -> None:
        """ends: whether gradients end here."""
        self._ends = ends

    def take(self, x: Tensor) -> Tensor:
        """Record x, and return the tensor with which the block continues."""
        self.x = x.detach().requires_grad_() if self._ends else x
        return self.x


class Given(Hook):
    """A stand-in for a Bound that returns a given output of attention or of the delta rule."""

    def __init__(self, softcap: float | None, out: Tensor) -> None:
        """out: [T, H, D]."""
        super().__init__(softcap)
        self._out = out

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        return self._out

    def mix(self, x: Mixed, rule: StateRule) -> Tensor:
        return self._out


def until_ended(run: Any, *args: Any, **kwargs: Any) -> None:
    """Run a module's own forward until a stand-in ends it. Raises RuntimeError if none does."""
    try:
        run(*args, **kwargs)
    except _Reached:
        return
    (module,) = run.args
    raise RuntimeError(f"{type(module).__name__} never came to what is to end its forward")


class HalfNames(NamedTuple):
    """The names of the children of a layer of two halves; empty: it has no such child."""

    before: str
    """The norm before attention."""
    attention: str
    """Attention, or the module with a state in its place."""
    behind: str
    """The norm after attention."""
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
    """A layer of two halves, parts of whose own forward can be run."""

    def __init__(self, layer: Any, form: HalfNames) -> None:
        self.layer, self._form, self._run = layer, form, own_forward(layer)
        self.attention: Any = layer.get_submodule(form.attention)
        self.first = [layer.get_submodule(name) for name in form[:3] if name]
        """The modules of the first half."""
        self.rest = [layer.get_submodule(name) for name in form.rest]
        self.norms_in = self.first[:1] if form.before else []
        """The norm before attention; empty: there is none."""
        self.norms_behind = self.first[-1:] if form.behind else []
        """The norm after attention; empty: there is none."""
        at = next(n for n, name in enumerate(form.rest) if "norm" not in name)
        self.mlp: Any = self.rest[at]
        """The MLP, or the block of experts in its place."""
        self.norms_of_mlp = self.rest[:at]
        """The norms before the MLP."""
        self._mlp, self._norms_of_mlp = form.rest[at], form.rest[:at]

    @classmethod
    def of(cls, layer: nn.Module) -> Halves | None:
        """Return the halves of a layer; None: it has another form."""
        names = {name for name, one in layer.named_children() if not isinstance(one, nn.Dropout)}
        forms = (form for form in _FORMS if names == {*filter(None, form[:3]), *form.rest})
        return next((cls(layer, form) for form in forms), None)

    def joined(self, x: Tensor, made: Tensor) -> Tensor:
        """Return the output of the layer's first half. x: the layer's input. made: the output of
        its attention block."""
        places = [self._attention_gives(made), *self._left_out(self._form.before)]
        return self._up_to_rest(places, x, position_embeddings=None)

    def before_rest(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the output of the layer's first half. x: the layer's input. kwargs: the other
        arguments of its forward."""
        return self._up_to_rest([], x, **kwargs)

    def _up_to_rest(self, places: list[StandIn], x: Tensor, **kwargs: Any) -> Tensor:
        found: list[Tensor] = []
        with standing_in([*places, self._stands(self._form.rest[0], stops(found))]):
            until_ended(self._run, x, **kwargs)
        return found[0]

    def second(self, x: Tensor, made: Tensor | None = None) -> Tensor:
        """Return the output of the layer's second half. x: the output of the first; the layer runs
        with an attention that adds 0. made: the MLP's output, if it is known."""
        nothing, form = torch.zeros_like(x[..., :1]), self._form
        places = [self._attention_gives(nothing), *self._left_out(form.before, form.behind)]
        if made is not None:
            places += self._left_out(*self._norms_of_mlp)
            places.append(self._stands(self._mlp, lambda _: made))
        with standing_in(places):
            out: Tensor = self._run(x, position_embeddings=None)
        return out

    def attended(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the output of the layer's attention for x, without the norm before it. kwargs: as
        in `before_rest`."""
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
    """Return x: the replacement of a norm that is to be skipped."""
    return x


def stops(found: list[Tensor]) -> Any:
    """Return a replacement of a module that appends its input to `found` and ends the forward."""

    def stop(x: Tensor) -> Tensor:
        found.append(x)
        raise _Reached

    return stop


def run_as_layer(layer: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the replacement of a layer's forward, checkpointed if the layer is."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(run, **kwargs), *args)
    return run(*args, **kwargs)


def own_forward(module: Any) -> Any:
    """Return a module's original forward, bound to it and without checkpointing around it."""
    forward: Any = type(module).forward
    layer = isinstance(module, GradientCheckpointingLayer)  # it wraps the original
    return partial(forward.__wrapped__ if layer else forward, module)
