"""The tiled loss against torch's own cross-entropy and autograd, whatever bends the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from uspft.model.loss import Head, Logits

FORMS = [Logits(), Logits(scale=4.0), Logits(cap=0.5), Logits(scale=0.25, cap=2.0)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [None, 3])
def test_loss_and_gradients_are_those_of_autograd(form: Logits, tile: int | None) -> None:
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 13, bias=False).double()
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (10,))
    labels[::4] = -100
    inputs = [hidden, projection.weight]
    chosen = torch.tensor([1, 2, 3, 5, 6, 7, 9])
    got = Head(projection.weight, tile, form)(hidden, labels, chosen, 0.3)
    logits = projection(hidden) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    want = 0.3 * F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [None, 3])
def test_each_tokens_loss_and_its_gradients_are_those_of_autograd(
    form: Logits, tile: int | None
) -> None:
    """Of a function of the losses that is no sum, so that each token has a factor of its own."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 13, bias=False).double()
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (10,))
    inputs = [hidden, projection.weight]
    chosen = torch.tensor([1, 2, 3, 5, 6, 7, 9])
    got = Head(projection.weight, tile, form)(hidden, labels, chosen, None)
    logits = projection(hidden) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    want = F.cross_entropy(logits, labels, reduction="none")[chosen]
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        torch.autograd.grad(got.square().prod(), inputs),
        torch.autograd.grad(want.square().prod(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made inside, but for those of a weight."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor) and one.numel() != self.weight:
                self.count = max(self.count, one.numel())
        return found


@pytest.mark.parametrize("scale", [0.3, None])
def test_logits_are_never_whole(scale: float | None) -> None:
    tokens, wide, vocabulary, tile = 40, 8, 130, 4
    head = Head(torch.nn.Linear(wide, vocabulary).weight, tile)
    hidden = torch.randn(tokens, wide, requires_grad=True)
    every = torch.arange(tokens)
    with Largest(head.weight.numel()) as largest:
        head(hidden, every, every, scale).square().sum().backward()
    assert largest.count == tile * vocabulary > hidden.numel()
    with Largest(head.weight.numel()) as largest:
        F.cross_entropy(hidden @ head.weight.t(), every).backward()
    assert largest.count == tokens * vocabulary


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_costs_no_gradient_and_changes_no_other(frozen: str) -> None:
    found = []
    for off in ("", frozen):
        torch.manual_seed(0)
        head = Head(torch.nn.Linear(8, 13).weight, 3)
        inputs = {"hidden": torch.arange(80.0).view(10, 8) / 80, "weight": head.weight}
        for name, value in inputs.items():
            value.requires_grad_(name != off)
        head(inputs["hidden"], torch.arange(10), torch.arange(10), 0.3).backward()
        found.append({name: value.grad for name, value in inputs.items()})
    every, some = found
    assert {name for name, value in some.items() if value is None} == {frozen}
    for name in set(some) - {frozen}:
        torch.testing.assert_close(some[name], every[name])


@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("tokens", [5, 0])
def test_without_a_chosen_row_the_loss_is_0_and_so_is_every_gradient(
    tile: int | None, tokens: int
) -> None:
    """As on a rank whose tokens are all of the prompt, which must take part in the backward."""
    head = Head(torch.nn.Linear(8, 13).weight, tile)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    labels, none = torch.full((tokens,), -100), torch.tensor([], dtype=torch.int64)
    loss = head(hidden, labels, none, 0.3)
    assert loss == 0 and loss.dtype == torch.float32
    loss.backward()
    for value in (hidden, head.weight):
        assert value.grad is not None and torch.equal(value.grad, torch.zeros_like(value))


class Calls(TorchDispatchMode):
    """The names of the operations that ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_never_waits_for_the_device() -> None:
    head, labels = Head(torch.nn.Linear(8, 13).weight, 3), torch.tensor([4, -100, 2, 1, -100, 0])
    hidden = torch.randn(6, 8, requires_grad=True)
    with Calls() as calls:
        head(hidden, labels, torch.tensor([0, 2, 3, 5]), 0.3).backward()
    assert {"index_select", "scatter_add_"} <= calls.names
    waits = {"nonzero", "_local_scalar_dense", "masked_select", "index"}
    assert not calls.names & waits
    with Calls() as calls:
        labels[labels >= 0].nonzero()[0].item()
    assert {"nonzero", "_local_scalar_dense", "index"} <= calls.names


def test_a_config_says_what_bends_its_logits() -> None:
    class Config:
        logits_scaling = 8.0
        final_logit_softcapping = 30.0

    assert Logits.of(Config()) == Logits(0.125, 30.0)
    assert Logits.of(object()) == Logits()
