"""What is remembered of a layer's attention: computed once, and let go of when it is given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import transformers
from torch import Tensor

from uspft.config.recipe import MemoryBlock
from uspft.model.recompute import Kept, attend_once, before_each_run, recompute_layers

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


def test_a_layer_that_runs_again_is_told_of_its_own_call() -> None:
    """Several micro-batches are under way in a pipeline: the last call is another one's."""
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    told: list[tuple[int, str]] = []

    def tell(number: int) -> Any:
        return lambda layer, args, kwargs: told.append((number, kwargs["uspft"]))

    for number, layer in enumerate(model.base_model.layers):
        before_each_run(layer, tell(number))
    assert recompute_layers(model.train(), MemoryBlock(), range(2)) == "nothing"
    x = torch.ones(1, 3, 8, requires_grad=True)
    first = model.base_model(inputs_embeds=x, use_cache=False, uspft="first").last_hidden_state
    model.base_model(inputs_embeds=x, use_cache=False, uspft="second")
    assert {call for _, call in told} == {"first", "second"}
    told.clear()
    first.sum().backward()
    assert {number for number, _ in told} == {0, 1} and {call for _, call in told} == {"first"}
