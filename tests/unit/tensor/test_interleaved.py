"""Copies that cross into blocks and out of them start in the order in which others expect them, and
gradients of weights that wait are the same as at once, and made in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uspft.comm import Group
from uspft.model.divided import some_product
from uspft.tensor.interleaved import PutOff, into_block
from uspft.tensor.parts import Used


def test_copies_start_one_after_another_and_backward_the_other_way() -> None:
    alone, x = Group(None, (0,), 0), torch.ones(3, 2).requires_grad_()
    crossing = into_block(alone, (2, 1), PutOff(), splits_tokens=False)
    with pytest.raises(RuntimeError, match="copy 1 starts where copy 0 is expected"):
        crossing.begin(x[2:], 1)
    crossing = into_block(alone, (2, 1), PutOff(), splits_tokens=False)
    begun = [crossing.begin(part, copy) for copy, part in enumerate(x.split((2, 1)))]
    came = [crossing.awaited(one, copy) for copy, one in enumerate(begun)]
    (came[0].sum() + 2 * came[1].sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 1], [1, 1], [2, 2]]


def product(x: Any, weight: Any, bias: Any, used: Used, put_off: Any = None) -> Any:
    if put_off is None:
        return some_product(x, weight, bias, used)
    return some_product(x, weight.detach(), bias, used, *put_off)


def gradients(used: Used, put_off: PutOff | None, made: list[int] | None = None) -> Any:
    """Of a weight that two copies meet, one after the other, of its bias, and of what they were."""
    torch.manual_seed(3)
    weight, bias = torch.randn(6, 4).double().requires_grad_(), torch.randn(6).double()
    bias.requires_grad_()
    copies = [torch.randn(1, n, 4).double().requires_grad_() for n in (5, 3)]
    later = put_off.stand_for(weight) if put_off else None
    outs = [product(x, weight, bias, used, later) for x in copies]
    if put_off and made is not None:
        copies[0].register_hook(lambda _: made.append(len(put_off.waiting)))
    (outs[0].square().sum() + 3 * outs[1].square().sum()).backward()
    return [one.grad for one in (weight, bias, *copies)]


def test_what_is_put_off_is_what_is_made_at_once() -> None:
    every: list[Used] = [(None, None), ([(1, 3), (5, 6)], None)]
    for used in every:
        waiting: list[int] = []
        got, want = gradients(used, PutOff(), waiting), gradients(used, None)
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert waiting == [2], "both wait when the input's gradients are there"


def test_one_is_made_at_a_time_and_the_first_first() -> None:
    put_off, made = PutOff(), list[int]()
    for number in range(3):
        put_off.add(lambda number=number: made.append(number))  # type: ignore[misc]
    put_off.one()
    assert made == [0]
    put_off.all()
    put_off.one()
    assert made == [0, 1, 2]


def test_a_weight_that_nothing_depends_on_has_no_gradient() -> None:
    put_off = PutOff()
    used, unused = (torch.randn(2, 2).requires_grad_() for _ in range(2))
    stands = [put_off.stand_for(one) for one in (used, unused)]
    out = product(torch.randn(1, 3, 2), used, None, (None, None), stands[0])
    (out.sum() + stands[1].stand.sum()).backward()
    assert used.grad is not None and unused.grad is None


def test_a_gradient_is_let_go_of_while_the_graph_is_there() -> None:
    """As of a layer whose backward has run while those below it are still to come."""
    weight = torch.randn(2, 2).requires_grad_()
    later = PutOff().stand_for(weight)
    loss = product(torch.randn(1, 3, 2), weight, None, (None, None), later).sum()
    loss.backward()
    assert weight.grad is not None and loss.grad_fn is not None
    assert later.sums.whole() is None
