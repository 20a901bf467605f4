"""The loss by tiles in bfloat16, whose sum of the head's gradient a GPU's product adds to, beside
float64; the same on CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from uspft.model.loss import Head

PLACES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ),
    ),
]


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_float64(place: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
    hidden, labels = torch.randn(300, 64, dtype=torch.bfloat16), torch.randint(1000, (300,))
    wide = [x.detach().double().requires_grad_() for x in (plain.weight, hidden)]
    want = nn.functional.cross_entropy(wide[1] @ wide[0].T, labels, reduction="sum")
    truth = torch.autograd.grad(want, wide)
    head = Head(plain.weight, 128).to(place)
    here = hidden.to(place).requires_grad_()
    loss = head(here, labels.to(place), torch.arange(300, device=place), 1.0)
    found = torch.autograd.grad(loss, (head.weight, here))
    assert abs(float(loss.detach()) / float(want) - 1) < 1e-3
    for got, right in zip(found, truth, strict=True):
        assert float((got.cpu().double() - right).norm() / right.norm()) < 1e-2
