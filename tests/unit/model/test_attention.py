"""What transformers may ask of attention: handed on, without effect, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uspft.model.attention import Bound, attention
from uspft.model.offload import HostShelf
from uspft.sequence import Rule


class Seen:
    """Stands for what a forward call binds; remembers the rule that it was asked for."""

    softcap: float | None = None

    def attend(self, layer: int, qkv: tuple[torch.Tensor, ...], rule: Rule) -> torch.Tensor:
        self.rule = rule
        return torch.zeros_like(qkv[0])


def call(**asked: Any) -> Rule:
    q, kv = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    seen: Any = Seen()
    seen.softcap = asked.pop("made_with", None)
    mask = asked.pop("attention_mask", None)
    given = {"scaling": 0.5, "uspft": seen, **asked}
    out, _ = attention(torch.nn.Identity(), q, kv, kv, mask, **given)
    assert out.shape == (1, 6, 4, 8)
    rule: Rule = seen.rule
    return rule


def test_scale_and_window_are_handed_on() -> None:
    assert call() == Rule(0.5)
    assert call(scaling=0.1, sliding_window=7) == Rule(0.1, 7)


def test_sinks_are_handed_on_in_float32() -> None:
    sinks = torch.arange(4.0, dtype=torch.bfloat16, requires_grad=True)
    found = call(s_aux=sinks).sinks
    assert found is not None and found.dtype == torch.float32 and found.tolist() == [0, 1, 2, 3]
    found.sum().backward()
    assert sinks.grad is not None and sinks.grad.tolist() == [1, 1, 1, 1]
    wide = torch.zeros(4, dtype=torch.float64)
    same = call(s_aux=wide).sinks
    assert same is not None and same.dtype == torch.float64 and same.data_ptr() != wide.data_ptr()


def test_a_softcap_must_be_the_kernels() -> None:
    assert call(softcap=50.0, made_with=50.0) == Rule(0.5)
    for asked, made in ((50.0, None), (None, 50.0), (30.0, 50.0)):
        with pytest.raises(RuntimeError, match=f"softcap {asked}, and its kernel was .* {made}"):
            call(softcap=asked, made_with=made)


def test_what_changes_nothing_is_let_through() -> None:
    assert call(position_ids=torch.arange(6), use_cache=False, is_causal=True, softcap=None)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "attention_mask"),
        ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_what_would_have_to_be_ignored_is_refused_by_name(asked: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"Identity asks attention for {name}, which uspft does"):
        call(**asked)


@pytest.mark.parametrize("trains", [True, False])
def test_a_layer_without_a_backward_keeps_nothing(trains: bool) -> None:
    """Frozen first layers are not called again under recomputation: nothing would free it."""
    world: Any = SimpleNamespace(attend=lambda qkv, *_: qkv[0] * 2)
    share: Any = None
    bound = Bound(world, share, tokens=torch.arange(6), recompute="nothing")
    q, kv = torch.ones(6, 4, 8, requires_grad=trains), torch.ones(6, 2, 8)
    bound.attend(0, (q, kv, kv), Rule(0.5))
    assert bool(bound.memory) == trains


@pytest.mark.parametrize("recompute", ["nothing", "attention"])
def test_the_layer_below_comes_back_behind_attention(recompute: Any) -> None:
    world: Any = SimpleNamespace(attend=lambda qkv, *_: qkv[0] * sum(x.mean() for x in qkv))
    share: Any = None
    shelf = HostShelf(torch.device("cpu"))
    below, _ = (shelf.input(torch.ones(2)) for _ in range(2))
    bound = Bound(world, share, tokens=torch.arange(6), recompute=recompute, shelf=shelf)
    q, kv = torch.ones(6, 4, 8, requires_grad=True), torch.ones(6, 2, 8)
    out = bound.attend(0, (q, kv, kv), Rule(0.5))
    assert not below.parcel.here
    if recompute == "nothing":  # a checkpointed layer runs again before its backward
        bound.attend(0, (q, kv, kv), Rule(0.5))
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert below.parcel.here
