"""Stages of layers one after another, beside the whole model in float64, of every family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.models import ARCHITECTURES, VOCABULARY
from uspft.families.table import FAMILIES, LayerCut
from uspft.model.staged import cut_layers
from uspft.pipeline.stages import dealt_out

LAYERS, TOKENS = 5, 24
EVEN = dealt_out([1.0] * LAYERS, 2, 1)
BOUNDS = [(0, 2, 5), (0, 1, 2, 4, 5), (0, 1, 2, 3, 4, 5)]
"""Of stages: two that differ, some of one layer, all of one."""
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
STATES = ["linear_attention"] * 2
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in FAMILIES},
    "gemma2": {"layer_types": [*TYPES, "full_attention"]},
    "gemma3_text": {"layer_types": [*TYPES, "full_attention"]},
    "gemma4_text": {"layer_types": [*TYPES, "full_attention"]},
    "gpt_oss": {"layer_types": [*TYPES, "full_attention"]},
    "olmo_hybrid": {"layer_types": [*STATES, "full_attention", *STATES]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1, 0]},
    "qwen2 mixed": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "smollm3 mixed": {
        "no_rope_layers": [1, 0, 1, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [*TYPES, "full_attention"],
    },
    "mistral window": {"sliding_window": 7},
}


@cache
def model(kind: str) -> Any:
    """A model of five layers in float64, with transformers' own attention."""
    name, own = ARCHITECTURES[kind.split()[0]]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.2,
        **{"max_position_embeddings": 512, **own, **KINDS[kind]},
    )
    found = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
    )
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return found


def forward(base: Any, x: Tensor) -> Tensor:
    positions = torch.arange(TOKENS)[None]
    found: Tensor = base(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
    return found


def results(kind: str, stages: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """What a chain of stages makes of tokens, and the gradients of the embedding and the layers."""
    whole = model(kind)
    whole.zero_grad()
    tokens = torch.arange(3, 3 + TOKENS)[None] * 7 % VOCABULARY
    entering = x = whole.get_input_embeddings()(tokens).detach().requires_grad_()
    for stage in stages:
        x = forward(stage, x)
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    (x * weights).sum().backward()
    named = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
    assert entering.grad is not None
    return x.detach(), {**named, "entering": entering.grad}


def off(kind: str, stages: list[Any]) -> float:
    """By how much, relative to its size, the result or some gradient differs at most."""
    want, wanted = results(kind, [model(kind).base_model])
    got, found = results(kind, stages)
    assert found.keys() == wanted.keys() and len(wanted) > 5 * LAYERS
    far = [(found[name] - value).norm() / value.norm() for name, value in wanted.items()]
    return float(max([(got - want).norm() / want.norm(), *far]))


def cut(kind: str, bounds: tuple[int, ...]) -> list[Any]:
    base = model(kind).base_model
    return [cut_layers(base, range(*one)) for one in pairwise(bounds)]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_another_are_the_whole_model(kind: str) -> None:
    for bounds in BOUNDS:
        assert off(kind, cut(kind, bounds)) < 1e-12, bounds


def test_every_family_has_what_its_stages_need() -> None:
    assert len(FAMILIES) == 24 and {kind.split()[0] for kind in KINDS} == set(FAMILIES)
    assert all(family.cut is not None for family in FAMILIES.values())


def test_layers_that_do_not_divide_are_dealt_out() -> None:
    assert EVEN.sizes == (2, 3)
    base = model("llama").base_model
    every = [cut_layers(base, EVEN.layers(stage)) for stage in range(EVEN.count)]
    assert [len(one.layers) for one in every] == [2, 3]
    assert off("llama", every) < 1e-12


@pytest.mark.parametrize(
    ("kind", "at_least"),
    [("gemma3_text", 1e-3), ("granite", 1e-2), ("qwen2 mixed", 1e-3), ("gpt_oss", 1e-3)],
)
def test_what_a_family_says_is_needed(
    kind: str, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.split()[0]
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], cut=LayerCut()))
    assert off(kind, cut(kind, (0, 1, 3, 5))) > at_least


def test_a_stage_has_its_own_parameters_alone_and_the_model_stays_whole() -> None:
    whole = model("qwen3")
    before = dict(whole.named_parameters())
    first, last = cut("qwen3", (0, 2, 5))
    ids = {id(p): name for name, p in before.items()}
    held = [{ids[id(p)] for p in stage.parameters()} for stage in (first, last)]
    assert held[0] == {name for name in before if ".layers.0." in name or ".layers.1." in name}
    rest = {name for name in before if any(f".layers.{n}." in name for n in (2, 3, 4))}
    assert held[1] == rest | {"model.norm.weight"}
    assert dict(whole.named_parameters()).keys() == before.keys()
    assert whole.config.num_hidden_layers == LAYERS == len(whole.base_model.layers)
    assert [one.config.num_hidden_layers for one in (first, last)] == [2, 3]


def test_a_family_that_nobody_has_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], cut=None))
    with pytest.raises(ValueError, match="stages of model_type `llama` are not available yet"):
        cut("llama", (0, 2, 5))
