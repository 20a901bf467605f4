"""Memory on one card: as much more for each further token as the formula says, and no layer's more
where what layers keep waits on the host."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu import Row, needs, steps_of
from tests.support.models import make_documents
from uspft.model.hf_config import model_config
from uspft.model.offload import HostShelf
from uspft.prepare.examine import examine
from uspft.prepare.host import CONFIGS
from uspft.prepare.make_verify_job import sizes_of

LENGTHS = (16 << 10, 32 << 10, 64 << 10)
LAYERS = 4
SLACK = 1.25
"""How many times the formula's bytes a token may take: the allocator rounds, and leaves gaps."""


def recipe_of(data: Path, length: int) -> dict[str, Any]:
    """One step of Llama 3.1 8B with four layers, from random weights, on one GPU."""
    return {
        "model": {
            "config": str(CONFIGS / "models/meta-llama--Llama-3.1-8B.json"),
            "overrides": {"num_hidden_layers": LAYERS},
        },
        "data": {"train": str(data), "sequence_length": length, "overlong": "split"},
        "training": {"steps": 2, "global_batch_size": 1},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cuda", "processes": 1},
    }


def slopes(sizes: dict[int, int]) -> list[float]:
    """Bytes for each further token, between one length and the next."""
    return [(sizes[b] - sizes[a]) / (b - a) for a, b in pairwise(sorted(sizes))]


def formula(recipe: Path) -> int:
    """The bytes that one process is predicted to need."""
    examined = examine(recipe, [], 1, 1, trains=False)
    found = examined.recipe
    config = model_config(found.model, found.data.sequence_length)
    assert examined.shape
    return sizes_of(found, config, examined.shape, with_plain=False).memory_bytes(LAYERS)


def test_the_formula_grows_with_the_tokens(tmp_path: Path) -> None:
    """At first as the loss does, beside which the head's gradient lies, then as a layer does."""
    from tests.support.launch import write_recipe

    data = make_documents(tmp_path / "d.jsonl", [100], masked=[0.0]).path
    sizes = {n: formula(write_recipe(recipe_of(data, n), tmp_path)) for n in LENGTHS}
    first, second = slopes(sizes)
    assert 2 * 4096 * LAYERS < first <= second


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=needs(1))])
def test_memory_grows_with_tokens_as_the_formula_says(tmp_path: Path, gpus: int, row: Row) -> None:
    data = make_documents(tmp_path / "d.jsonl", [LENGTHS[-1]] * 3, masked=[0.0]).path
    measured, predicted = {}, {}
    for length in LENGTHS:
        folder, recipe = tmp_path / str(length), recipe_of(data, length)
        measured[length] = steps_of(recipe, folder)[-1]["peak_memory_bytes"]
        predicted[length] = formula(folder / "recipe.yaml")
        told = f"{measured[length] / 2**30:.2f} GiB, predicted {predicted[length] / 2**30:.2f}"
        row(f"memory, 8B shape, {LAYERS} layers, {length >> 10}k tokens", told)
    for found, said in zip(slopes(measured), slopes(predicted), strict=True):
        row("memory, bytes a token", f"{found:,.0f}, predicted {said:,.0f}")
        assert said / SLACK <= found <= SLACK * said


def there_and_back(layers: int, device: torch.device) -> tuple[list[float], int]:
    """What comes back of each layer's input, and the most bytes on a device that is far behind."""
    shelf, kept, found = HostShelf(device), list[Any](), list[torch.Tensor]()
    if device.type == "cuda":
        work = torch.zeros(1 << 13, 1 << 13, device=device)
        for _ in range(40):
            torch.mm(work, work, out=torch.empty_like(work))
        torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1 << 22, device=device)
    for _ in range(layers):
        kept.append(shelf.input(x))
        x = x * 2.0
    shelf.left()
    del x
    while kept:
        found.append(shelf.get(kept.pop()).amax())
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return [float(one) for one in found], most


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs(1))])
def test_layers_on_the_host_do_not_pile_up_on_the_device(place: str) -> None:
    (_, few), (found, many) = (there_and_back(n, torch.device(place)) for n in (4, 16))
    assert found == [2.0**n for n in reversed(range(16))]
    assert many - few < 1 << 20
