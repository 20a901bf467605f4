"""Products grouped by expert beside transformers' own loop over experts, in float64."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.support.models import ARCHITECTURES
from uspft.model import experts
from uspft.model.adapter import adapt_parameter, adapters, form_weights
from uspft.model.divided import Call
from uspft.model.experts import WHOLE, ExpertParts, HeldExperts, computed

TOKENS = 9


def layer_experts(kind: str) -> Any:
    """The experts of a layer, written out by transformers."""
    name, own = ARCHITECTURES[kind]
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, vocab_size=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **heads, **own})
    torch.manual_seed(1)
    net = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    ).double()
    layer = net.model.layers[0]
    found = (getattr(layer, "mlp", None) or layer.block_sparse_moe).experts
    for parameter in found.parameters():
        parameter.data.normal_(std=0.3)
    return found


def both(module: Any, other: Any, form: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Out and gradients of transformers' experts, and of ours on other, a copy of them."""
    x = torch.randn(TOKENS, 16, dtype=torch.float64)
    index = torch.stack([torch.randperm(3)[:2] for _ in x])  # of the last experts nobody
    scores, slope = torch.rand(TOKENS, 2, dtype=torch.float64), torch.randn_like(x)
    parts = ExpertParts({}, Call(None))
    results = []
    ours = partial(computed, other, parts)
    for of, run in ((module, form), (other, ours), (other, partial(ours, every=True))):
        given = x.clone().requires_grad_(), scores.clone().requires_grad_()
        out = run(given[0], index, given[1])
        trained = [p for p in of.parameters() if p.requires_grad]
        results.append([out, *torch.autograd.grad(out, [*given, *trained], slope)])
    theirs, found, counted = results
    assert all(map(torch.equal, found, counted))
    return theirs, found


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen2_moe", "granitemoe"])
@pytest.mark.parametrize("adapted", [False, True])
def test_products_are_those_of_transformers(kind: str, adapted: bool) -> None:
    """With adapters beside weights to which the products have been added, as peft has them."""
    module = layer_experts(kind)
    if adapted:
        module.requires_grad_(False)
        for name in ("gate_up_proj", "down_proj"):
            adapt_parameter(module, name, 3, 0.7)
        for _, adapter in adapters(module):
            adapter.to_empty(device="cpu").double()
            for parameter in adapter.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
    other = copy.deepcopy(module)
    if adapted:
        form_weights(module)
    theirs, ours = both(module, other, module)
    assert len(ours) == 3 + (4 if adapted else len(list(module.parameters())))
    for want, got in zip(theirs, ours, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_experts_that_are_all_here_make_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are counted, which a host waits for, only where others hold experts too."""
    module, counted = layer_experts("mixtral").float(), []
    plain = torch.Tensor.nonzero
    monkeypatch.setattr(
        torch.Tensor, "nonzero", lambda x, **how: counted.append(x) or plain(x, **how)
    )
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(TOKENS)])
    given = torch.randn(TOKENS, 16), index, torch.rand(TOKENS, 2)
    alone: Any = SimpleNamespace(size=1)
    ways = HeldExperts(module, alone, WHOLE), partial(computed, module, WHOLE)
    for waits, run in enumerate(ways):
        run(*given)
        assert len(counted) == waits


def test_no_delta_of_all_experts_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = layer_experts("mixtral"), list[int]()
    adapt_parameter(module, "down_proj", 2, 1.0)
    for _, adapter in adapters(module):
        adapter.to_empty(device="cpu").double()
    plain, whole = experts.grouped, module.down_proj.numel()

    def seen(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        made.append(weight.numel())
        return plain(x, weight, ends)

    monkeypatch.setattr(experts, "grouped", seen)
    x = torch.randn(4, 16, dtype=torch.float64)
    index, weight = torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1, dtype=torch.float64)
    computed(module, ExpertParts({}, Call(None)), x, index, weight)
    assert len(made) == 4 and sorted(made)[:2] == [4 * 2 * 16, 4 * 2 * 24] and whole in made


def test_narrow_matrices_and_float64_take_the_written_out_products() -> None:
    for dtype, width, tolerance in ((torch.float32, 3, 1e-5), (torch.float32, 8, 1e-5)):
        x, weight = torch.randn(5, 4, dtype=dtype), torch.randn(2, 4, width, dtype=dtype)
        ends = torch.tensor([2, 5], dtype=torch.int32)
        want = torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]])
        torch.testing.assert_close(
            experts.grouped(x, weight, ends), want, rtol=tolerance, atol=tolerance
        )
