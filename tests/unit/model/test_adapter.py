"""An adapter's first weights, its dropout, and what merging and freezing do."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from peft import inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.dropout import written_out_mask
from uspft.config.inputs import AdapterBlock
from uspft.model import dropout
from uspft.model.adapter import AdapterStart, lora_config, merged
from uspft.model.dropout import TokenDropout, token_words
from uspft.tensor.parts import Part

NAME, SEED = "model.layers.3.mlp.down_proj", 11


def dropped(x: torch.Tensor, tokens: list[int], p: float, **key: Any) -> torch.Tensor:
    module = TokenDropout(p, key.get("seed", SEED), key.get("name", NAME))
    module.words = token_words(torch.tensor(tokens))
    out: torch.Tensor = module(x)
    return out


def test_dropout_is_its_definition_for_values_and_gradients() -> None:
    tokens = [0, 1, 5, 2**31, 2**32 + 5, 3 * 2**40]
    for width in (300, 301, 302, 303):
        x = torch.randn(1, len(tokens), width, requires_grad=True)
        out = dropped(x, tokens, 0.3)
        factors = written_out_mask(0.3, SEED, NAME, tokens, width)
        torch.testing.assert_close(out, x * factors)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], factors[None])


def test_dropout_does_not_depend_on_who_holds_a_token() -> None:
    x = torch.randn(1, 5000, 400)
    assert x.numel() > 2 * dropout.TILE_CPU
    tokens = torch.randperm(5000) + 10**6
    whole = dropped(x, tokens.tolist(), 0.5)
    for part in (slice(0, 7), slice(7, 3000), slice(4999, 5000)):
        assert torch.equal(dropped(x[:, part], tokens[part].tolist(), 0.5), whole[:, part])
    for other in ({"seed": SEED + 1}, {"name": NAME.replace("3", "4")}):
        same = (dropped(x, tokens.tolist(), 0.5, **other) == whole).float().mean()
        assert abs(same - 0.5) < 0.01  # kept or dropped alike by chance


def test_dropout_does_not_depend_on_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tokens = torch.randn(1, 50, 203), list(range(50))
    whole = dropped(x, tokens, 0.5)
    for tile in (1, 203 * 7, 203 * 49 + 202):
        monkeypatch.setattr(dropout, "TILE_CPU", tile)
        assert torch.equal(dropped(x, tokens, 0.5), whole)


class Launches(TorchDispatchMode):
    """Counts what would start a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_views_or_room = func.is_view or func.overloadpacket in ROOM
        self.count += not makes_views_or_room
        return func(*args, **(kwargs or {}))


ROOM = (torch.ops.aten.empty_like, torch.ops.aten.detach)


def test_dropout_starts_few_kernels() -> None:
    """Of an 8th of a 32k row in the down projection of a 32B model: 7 tiles, 7 kernels each."""
    x = torch.empty(1, 4096, 27648, device="meta", requires_grad=True)
    module = TokenDropout(0.05, SEED, NAME)
    with Launches() as before:
        module.words = token_words(torch.empty(4096, dtype=torch.int64, device="meta"))
    with Launches() as first:
        out = module(x)
    with Launches() as again:
        module(x)
    with Launches() as backward:
        torch.autograd.grad(out, x, torch.empty_like(x))
    assert before.count <= 10  # once for all modules of a layer
    assert first.count <= 49 + 10  # and once what stands for features
    assert again.count == backward.count == 49


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_share_that_dropout_keeps(p: float) -> None:
    """Over all, over each token, over each feature, and over neighbours of both kinds."""
    tokens, width = 2000, 1000
    kept = (dropped(torch.ones(1, tokens, width), list(range(tokens)), p) != 0)[0].double()
    spread = (p * (1 - p)) ** 0.5
    for axis, count in ((0, tokens), (1, width)):
        off = (kept.mean(axis) - (1 - p)) / (spread / count**0.5)
        assert off.abs().max() < 5 and abs(off.std() - 1) < 0.1
    assert abs(kept.mean() - (1 - p)) < 5 * spread / (tokens * width) ** 0.5
    centred = (kept - (1 - p)) / spread
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(product.mean()) < 5 / product.numel() ** 0.5
    scale = dropped(torch.ones(1, 1, 100), [0], p).unique()
    torch.testing.assert_close(scale[scale > 0], torch.tensor([1 / (1 - p)]), rtol=1e-4, atol=0)


def test_draws_know_nothing_of_one_another() -> None:
    """Patterns of 16 features, over tokens and features near and far, are equally frequent, and no
    two features, tokens, seeds or modules are dropped together more often than by chance."""
    tokens, width = 4096, 1024
    ones, counted = torch.ones(1, tokens, width), list(range(tokens))
    kept = (dropped(ones, counted, 0.5) != 0)[0]
    bits = 2 ** torch.arange(16)
    for (count, apart), (wide, between) in (
        ((4, 1), (4, 1)),
        ((2, 2), (8, 4)),
        ((4, 256), (4, 64)),
        ((8, 512), (2, 4)),
        ((1, 1), (16, 1)),
        ((16, 1), (1, 1)),
    ):
        blocks = kept.view(-1, count, apart, width // (wide * between), wide, between)
        patterns = (blocks.permute(0, 2, 3, 5, 1, 4).reshape(-1, 16) * bits).sum(1)
        found, expected = patterns.bincount(minlength=65536), len(patterns) / 65536
        chi = float(((found - expected) ** 2 / expected).sum())
        assert abs(chi - 65535) < 5 * (2 * 65535) ** 0.5
    tokens = 2048
    signs = kept[:tokens].float() * 2 - 1
    other = [
        (dropped(ones[:, :tokens], counted[:tokens], 0.5, **key) != 0)[0].float() * 2 - 1
        for key in ({"seed": SEED + 1}, {"name": NAME.replace("3", "4")})
    ]
    fours = signs.unflatten(1, (-1, 4))  # of one word
    pairs = torch.cat([fours[..., i] * fours[..., j] for i, j in combinations(range(4), 2)], 1)
    for ours, theirs in ((signs, signs), (pairs, pairs), *((signs, theirs) for theirs in other)):
        for off in (ours.T @ theirs / tokens**0.5, ours @ theirs.T / ours.shape[1] ** 0.5):
            if theirs is ours:
                off.fill_diagonal_(0.0)
            assert off.abs().max() < 6.5 and abs(off.std() - 1) < 0.005


def test_evaluation_drops_nothing() -> None:
    module = TokenDropout(0.5, SEED, NAME).eval()
    x = torch.randn(1, 3, 8)
    assert module(x) is x
    with pytest.raises(RuntimeError, match="words of its tokens"):
        module.train()(x)


def test_an_adapter_starts_as_pefts_does() -> None:
    no_base: Any = None
    start = AdapterStart(no_base, SEED)
    a = start.read(f"{NAME}.lora_A.weight", Part.whole((16, 400)))
    torch.manual_seed(0)
    theirs = torch.empty(16, 400)
    torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)
    assert a.abs().max() <= 400**-0.5
    assert a.std() == pytest.approx(float(theirs.std()), rel=0.03)
    assert abs(float(a.mean())) < 5 * float(a.std()) / a.numel() ** 0.5
    assert not start.read(f"{NAME}.lora_B.weight", Part.whole((30, 16))).any()
    again = AdapterStart(no_base, SEED).read(f"{NAME}.lora_A.weight", Part.whole(a.shape))
    assert torch.equal(a, again)
    assert not torch.equal(
        a, AdapterStart(no_base, 1).read(f"{NAME}.lora_A.weight", Part.whole(a.shape))
    )
    assert not torch.equal(a, start.read("model.layers.2.x.lora_A.weight", Part.whole(a.shape)))


def test_without_an_adapter_merging_hands_on_what_there_is() -> None:
    held = {"b": torch.ones(2), "a": torch.zeros(2)}
    assert [name for name, _ in merged(held, held.__getitem__, None, "llama")] == ["b", "a"]


@pytest.mark.parametrize("alpha", [6.0, 1.0])
def test_merging_scales_by_alpha_over_rank(alpha: float) -> None:
    """As peft does; with an alpha that is the rank nothing would show."""
    block = AdapterBlock(rank=4, alpha=alpha)
    linear = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(8, 5, bias=False)})
    before = linear["down_proj"].weight.detach().clone()
    theirs = inject_adapter_in_model(lora_config(block, ["down_proj"]), linear)
    held = {
        "down_proj.weight": before,
        "down_proj.lora_A.weight": theirs["down_proj"].lora_A["default"].weight.detach(),
        "down_proj.lora_B.weight": theirs["down_proj"].lora_B["default"].weight.detach(),
    }
    held["down_proj.lora_B.weight"].normal_()
    ((name, value),) = merged(held, held.__getitem__, block, "llama")
    theirs["down_proj"].merge()
    assert name == "down_proj.weight" and not torch.allclose(value, before, atol=1e-2)
    torch.testing.assert_close(value, theirs["down_proj"].base_layer.weight.detach())


def test_tokens_without_a_batch_drop_what_they_do_in_one() -> None:
    """As the shared experts of a block see them."""
    module = TokenDropout(0.5, SEED, NAME)
    module.words = token_words(torch.arange(5))
    x = torch.randn(5, 12)
    assert torch.equal(module(x), module(x[None])[0])
    module.words = token_words(torch.arange(1, 6))
    assert not torch.equal(module(x), module(x.flip(0)).flip(0))
    with pytest.raises(RuntimeError, match="words"):
        module(x[:4])
