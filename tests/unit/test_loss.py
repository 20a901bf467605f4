"""The tiled loss against torch's own cross-entropy and autograd, whatever bends the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from uspft.model.loss import Head, Logits

FORMS = [Logits(), Logits(scale=4.0), Logits(cap=0.5), Logits(scale=0.25, cap=2.0)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [None, 3])
def test_loss_and_gradients_are_those_of_autograd(form: Logits, tile: int | None) -> None:
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 13).double()
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (10,))
    labels[::4] = -100
    inputs = [hidden, projection.weight, projection.bias]
    got = Head(projection, tile, form)(hidden, labels, 0.3)
    logits = projection(hidden) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    want = 0.3 * F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_config_says_what_bends_its_logits() -> None:
    class Config:
        logits_scaling = 8.0
        final_logit_softcapping = 30.0

    assert Logits.of(Config()) == Logits(0.125, 30.0)
    assert Logits.of(object()) == Logits()
