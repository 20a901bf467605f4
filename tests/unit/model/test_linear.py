"""A kernel of layers with a state that is wrong is found before anything trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.support.models import make_model
from uspft.model import linear
from uspft.model.build import empty_model
from uspft.model.linear import CONVOLUTION, RULE, believe_linear_layers, probe

CPU, DTYPE = torch.device("cpu"), torch.float32
LAYER: Any = SimpleNamespace(head_k_dim=16, head_v_dim=8, conv1d=SimpleNamespace(kernel_size=(4,)))


def file(**functions: Any) -> Any:
    """A modelling file some of whose functions are others."""
    stock = {name: getattr(modeling_qwen3_5, name) for name in (RULE, CONVOLUTION)}
    return SimpleNamespace(__name__="modelling", **(stock | functions))


def other(name: str, change: Callable[..., Any]) -> Any:
    """One of transformers' functions as a kernel that does something else."""
    own = getattr(modeling_qwen3_5, name)
    written = getattr(own, "without_uspft", own)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return change(written, *args, **kwargs)

    kernel.__wrapped__ = written  # type: ignore[attr-defined]
    return kernel


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "out is off": (RULE, lambda own, *a, **k: (own(*a, **k)[0] * 1.01, own(*a, **k)[1])),
    "no state enters": (RULE, lambda own, *a, initial_state, **k: own(*a, initial_state=None, **k)),
    "beta has no gradient": (
        RULE,
        lambda own, *a, beta, **k: own(*a, beta=beta.detach() + 0 * beta, **k),
    ),
    "the future is seen": (CONVOLUTION, lambda own, x, *a, **k: own(x.roll(-1, -1), *a, **k)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_out_is_right(dtype: torch.dtype) -> None:
    probe(file(), LAYER, dtype, CPU)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_named(fault: str) -> None:
    name, change = FAULTS[fault]
    with pytest.raises(RuntimeError, match=f"{name} of modelling is wrong on this machine: "):
        probe(file(**{name: other(name, change)}), LAYER, DTYPE, CPU)


def test_every_rank_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(make_model(tmp_path, "qwen3_5_text", kv_heads=2))
    model = empty_model(config, DTYPE)
    asked: list[Any] = []
    monkeypatch.setattr(linear, "probe", lambda *about: asked.append(about))
    believe_linear_layers(model, DTYPE, CPU, lambda mine: [mine])
    assert asked == [], "a CPU runs what is written out"
    cuda = torch.device("cuda")
    believe_linear_layers(model, DTYPE, cuda, lambda mine: [mine])
    assert [about[0] for about in asked] == [modeling_qwen3_5]
    with pytest.raises(RuntimeError, match="rank 1's"):
        believe_linear_layers(model, DTYPE, cuda, lambda mine: [mine, "rank 1's"])
