"""Modules that work in tiles of tokens: the same values and gradients, and no work done thrice."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.models import ARCHITECTURES, VOCABULARY
from uspft.model.dropout import TokenDropout, token_words
from uspft.model.tile_sizes import mlp_tile_tokens
from uspft.model.tiles import Tiled, work_in_tiles

TOKENS = 33
NORMED = (
    "qwen3",
    "glm4_moe",
    "minimax_m2",
    "qwen3_moe",
    "gemma3_text",
    "olmo2",
    "olmoe",
    "qwen3_5_text",
    "qwen3_next",
)
NORMED += ("gemma4_text", "qwen3_5_moe_text", "olmo_hybrid")
TILES = [1, 16, 32, 33]
"""Two of them leave a last tile of one token; in the last all tokens are one tile."""


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    name, own = ARCHITECTURES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **{"max_position_embeddings": 512, **own},
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    grouped = hasattr(config, "num_experts_per_tok")  # whose products have no float64
    return model.to(torch.float32 if grouped else dtype).train()


def checkpointed(model: Any) -> Any:
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def gradients(model: Any, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Of a sum over what the layers made, whose weights are no function of it; and that itself."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=draw)
    out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    slope = torch.randn(out.shape, dtype=torch.float64, generator=draw).to(out.dtype)
    model.zero_grad()
    out.backward(slope)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **found}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, beside the largest value of what it is in."""
    assert one.keys() == other.keys() and len(one) > 5
    found = [(a - b).abs().max() / b.abs().max() for a, b in zip_values(one, other)]
    return float(torch.stack(found).max())


def zip_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(one[name], other[name]) for name in one]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_family_is_the_same_in_tiles(kind: str) -> None:
    whole = gradients(model_of(kind))
    for number, tile in enumerate(TILES):
        model = model_of(kind)
        work_in_tiles(model, tile)
        tiled = [module for module in model.modules() if isinstance(module.forward, Tiled)]
        # Two layers of at least two norms and an MLP, some with norms of heads, or with an expert
        # that every token meets; the last norm.
        attention = model.base_model.layers[-1].self_attn
        of_heads = [name for name, _ in attention.named_children() if "norm" in name]
        assert len(of_heads) == 2 * (kind in NORMED) + (kind == "gemma4_text")  # of values too
        layers = sum(hasattr(layer, "self_attn") for layer in model.base_model.layers)
        ofs = layers * len(of_heads)
        ends = ".shared_expert", ".shared_experts"
        shared = sum(name.endswith(ends) for name, _ in model.named_modules())
        assert len(tiled) - shared in (2 * 3 + ofs + 1, 2 * 5 + ofs + 1)
        every = "qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "ernie4_5_moe"
        assert shared == 2 * (kind in every) + (kind == "glm4_moe")  # whose first layer has none
        found = gradients(checkpointed(model) if number % 2 else model)
        # Norms compute in float32; all that is beside experts does, where decays add up too.
        decays = found["out"].dtype == torch.float32 and layers < len(model.base_model.layers)
        assert apart(found, whole) < (1e-4 if decays else 1e-5), tile


def test_a_tile_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = gradients(model_of("llama")), model_of("llama")
    work_in_tiles(model, 16)
    call = importlib.import_module("uspft.model.tiles").TiledCall
    spans = call.spans
    monkeypatch.setattr(call, "spans", lambda self, x: [*spans(self, x)][:-1])
    assert not apart(gradients(model), whole) < 1e-3  # what was not filled in may be nan


def test_a_layer_that_is_recomputed_makes_its_last_work_twice_and_not_thrice() -> None:
    model = checkpointed(model_of("llama"))
    work_in_tiles(model, 16)
    calls: list[int] = []
    model.base_model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, args, out: calls.append(out.shape[1])
    )
    gradients(model)
    assert calls == [16, 16, 1] * 2


def test_hooks_of_parameters_get_whole_gradients() -> None:
    model = model_of("llama")
    work_in_tiles(model, 8)
    weight, seen = model.base_model.layers[0].mlp.up_proj.weight, []
    weight.register_hook(seen.append)
    gradients(model)
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe"])
def test_gradients_come_in_one_order_whatever_tokens_there_are(kind: str) -> None:
    """ZeRO-2 sums them over ranks as they come, and ranks may have other numbers of tokens."""
    model, orders = model_of(kind), []
    work_in_tiles(model, 16)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: orders[-1].append(name))
    for tokens in (TOKENS, 16, 1):
        orders.append([])
        gradients(model, tokens)
    assert len(orders[0]) > 10 and orders[0] == orders[1] == orders[2]


class Small(nn.Module):
    """An MLP of two products, one of which may be frozen, with dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.drop = TokenDropout(dropout, 0, "small") if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(self.up(x).relu()))
        return out


def of_small(
    tile: int | None, *, frozen: str = "", of_input: bool = True, drop: float = 0.0
) -> list[Tensor | None]:
    module = Small(drop).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] != frozen)
    if isinstance(module.drop, TokenDropout):
        module.drop.words = token_words(torch.arange(TOKENS))
    draw = torch.Generator().manual_seed(2)
    x, slope = torch.randn(2, 1, TOKENS, 8, dtype=torch.float64, generator=draw)
    x.requires_grad_(of_input)
    if tile:
        module.forward = Tiled(module, tile)  # type: ignore[method-assign]
    module(x).backward(slope)
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(
    "case",
    [{}, {"frozen": "up"}, {"frozen": "down"}, {"of_input": False}, {"drop": 0.3}],
    ids=str,
)
def test_what_needs_no_gradient_has_none(case: dict[str, Any]) -> None:
    whole, found = of_small(None, **case), of_small(8, **case)
    assert any(one is None for one in whole) == bool(case.keys() & {"frozen", "of_input"})
    for one, other in zip(found, whole, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    if case.get("drop"):
        dropped, kept = found[0], of_small(8)[0]
        assert dropped is not None and kept is not None and not torch.allclose(dropped, kept)


def rounding(tile: int | None, monkeypatch: Any = None) -> float:
    """The root mean square error of a weight's gradient in bfloat16, beside float64."""
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        module = nn.Linear(64, 64, bias=False).to(torch.bfloat16).to(dtype)
        x, slope = (torch.randn(1, 4096, 64).to(torch.bfloat16).to(dtype) for _ in range(2))
        if tile and dtype == torch.bfloat16:
            module.forward = Tiled(module, tile)  # type: ignore[method-assign]
        module(x).backward(slope)
        found[dtype] = module.weight.grad.double()
    return float((found[torch.bfloat16] - found[torch.float64]).pow(2).mean().sqrt())


def test_weights_gradients_are_rounded_as_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tiles; a sum in bfloat16, as DeepSpeed's own tiles have it, is seen."""
    whole, tiled = rounding(None), rounding(32)
    assert 0 < tiled <= 1.5 * whole
    tiles = importlib.import_module("uspft.model.tiles")
    monkeypatch.setattr(tiles.torch, "promote_types", lambda one, other: one)
    assert rounding(32) > 2 * whole


def test_a_module_that_makes_something_else_is_refused() -> None:
    module = nn.Linear(8, 4)
    module.forward = Tiled(module, 8)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"Linear made torch.float32 \(1, 8, 4\) of a tile"):
        module(torch.ones(1, TOKENS, 8))


def test_the_size_of_a_tile() -> None:
    assert mlp_tile_tokens("none", 14336) is None
    assert mlp_tile_tokens(5, 14336) == 5
    assert mlp_tile_tokens("auto", 14336) == 2340
    assert mlp_tile_tokens("auto", 1 << 20) == 1024
