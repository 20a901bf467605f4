"""What is remembered of a layer's attention: computed once, and let go of when it is given back."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from uspft.model.recompute import Kept, attend_once

LAYERS = 2


def run(memory: dict[int, Kept], calls: list[int]) -> tuple[Tensor, Tensor]:
    """The loss of layers that run twice, and their input."""

    def attend(inputs: tuple[Tensor, ...]) -> Tensor:
        calls.append(1)
        q, k = inputs
        return torch.tanh(q * k).exp()

    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    out = x
    for layer in range(LAYERS):
        attend_once(memory, layer, attend, (out, out * 2))
        out = attend_once(memory, layer, attend, (out, out * 2))
    return out.square().sum(), x


def test_what_was_given_back_is_let_go_of() -> None:
    """Else all layers' attention would be there until the next step, and that take it for its
    own."""
    memory: dict[int, Kept] = {}
    calls: list[int] = []
    loss, x = run(memory, calls)
    assert sorted(memory) == [0, 1] and len(calls) == LAYERS
    kept = [weakref.ref(one) for one in memory.values()]
    gc.collect()
    gc.disable()
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        assert memory == {} and [one() for one in kept] == [None] * LAYERS
    finally:
        gc.enable()
    want = x.detach().clone().requires_grad_()
    out = want
    for _ in range(LAYERS):
        out = torch.tanh(out * out * 2).exp()
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, want.grad)
    run(memory, calls)
    assert len(calls) == 2 * LAYERS, "the next step attends anew"
