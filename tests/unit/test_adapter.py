"""An adapter's first weights, its dropout, and what merging and freezing do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.adapters import written_out_mask
from uspft.model.adapter import AdapterStart, merged
from uspft.model.dropout import TokenDropout

NAME, SEED = "model.layers.3.mlp.down_proj", 11


def dropped(x: torch.Tensor, tokens: list[int], p: float, **key: Any) -> torch.Tensor:
    module = TokenDropout(p, key.get("seed", SEED), key.get("name", NAME))
    module.tokens = torch.tensor(tokens)
    out: torch.Tensor = module(x)
    return out


def test_dropout_is_its_definition_for_values_and_gradients() -> None:
    tokens = [0, 1, 5, 2**31, 2**32 + 5, 3 * 2**40]
    x = torch.randn(1, len(tokens), 300, requires_grad=True)
    out = dropped(x, tokens, 0.3)
    factors = written_out_mask(0.3, SEED, NAME, tokens, 300)
    torch.testing.assert_close(out, x * factors)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], factors[None])


def test_dropout_does_not_depend_on_who_holds_a_token() -> None:
    x = torch.randn(1, 5000, 400)  # more than one tile
    tokens = torch.randperm(5000) + 10**6
    whole = dropped(x, tokens.tolist(), 0.5)
    for part in (slice(0, 7), slice(7, 3000), slice(4999, 5000)):
        assert torch.equal(dropped(x[:, part], tokens[part].tolist(), 0.5), whole[:, part])
    for other in ({"seed": SEED + 1}, {"name": NAME.replace("3", "4")}):
        same = (dropped(x, tokens.tolist(), 0.5, **other) == whole).float().mean()
        assert abs(same - 0.5) < 0.01  # kept or dropped alike by chance


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
    torch.testing.assert_close(scale[scale > 0], torch.tensor([1 / (1 - p)]))


def test_evaluation_drops_nothing() -> None:
    module = TokenDropout(0.5, SEED, NAME).eval()
    x = torch.randn(1, 3, 8)
    assert module(x) is x
    with pytest.raises(RuntimeError, match="numbers of its tokens"):
        module.train()(x)


def test_an_adapter_starts_as_pefts_does() -> None:
    no_base: Any = None
    start = AdapterStart(no_base, SEED)
    a = start.read(f"{NAME}.lora_A.weight", torch.Size([16, 400]))
    torch.manual_seed(0)
    theirs = torch.empty(16, 400)
    torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)
    assert a.abs().max() <= 400**-0.5
    assert a.std() == pytest.approx(float(theirs.std()), rel=0.03)
    assert abs(float(a.mean())) < 5 * float(a.std()) / a.numel() ** 0.5
    assert not start.read(f"{NAME}.lora_B.weight", torch.Size([30, 16])).any()
    again = AdapterStart(no_base, SEED).read(f"{NAME}.lora_A.weight", a.shape)
    assert torch.equal(a, again)
    assert not torch.equal(a, AdapterStart(no_base, 1).read(f"{NAME}.lora_A.weight", a.shape))
    assert not torch.equal(a, start.read("model.layers.2.x.lora_A.weight", a.shape))


def test_without_an_adapter_merging_hands_on_what_there_is() -> None:
    held = {"b": torch.ones(2), "a": torch.zeros(2)}
    assert [name for name, _ in merged(held, held.__getitem__, None)] == ["b", "a"]
