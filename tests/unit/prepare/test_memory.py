"""What speaks against the keys of `memory`, by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.support.shapes import hub
from uspft.config import MemoryBlock, ParallelBlock, Recipe
from uspft.layout import Layout
from uspft.planner.memory import USABLE_SHARE, memory_of
from uspft.planner.options import options_of
from uspft.prepare.memory import fitting_heads, group_findings, tile_findings

KEY = "memory.attention_heads"


def asking(heads: object, **parallel: Any) -> Any:
    memory = MemoryBlock.model_validate({"attention_heads": heads})
    return SimpleNamespace(memory=memory, parallel_config=ParallelBlock(**parallel))


def test_more_heads_at_once_than_share_a_kv_head_are_refused() -> None:
    shape = hub("meta-llama/Llama-3.1-8B")
    for heads in ("all", 1, 3, 4):
        assert group_findings(asking(heads), shape) == []
    what = "is 5, and 4 query heads of the model share a KV head"
    assert group_findings(asking(5), shape) == [(KEY, what, "write 4 or fewer, or all")]
    assert group_findings(asking(5), None) == []


def test_layers_with_heads_of_two_sizes_keep_all_heads() -> None:
    shape = replace(hub("meta-llama/Llama-3.1-8B"), seeing_all=(2, 256), model_type="gemma4_text")
    what = "is 1, and layers of `gemma4_text` have heads of two sizes"
    assert group_findings(asking(1), shape) == [(KEY, what, "write all")]
    assert group_findings(asking("all"), shape) == []


def test_ranks_that_share_the_rows_of_a_kv_head_keep_all_heads() -> None:
    shape = replace(hub("meta-llama/Llama-3.1-8B"), model_type="phi3")
    assert group_findings(asking(1), shape, 8) == []
    what = "is 1, and 16 tensor ranks share the rows that make a KV head"
    assert group_findings(asking(1), shape, 16) == [(KEY, what, "write all, or model_parallel: 8")]
    assert group_findings(asking(1), replace(shape, model_type="llama"), 16) == []


def test_a_mesh_takes_all_heads() -> None:
    mesh = {"tensor_parallel_algo": "meshslice", "tensor_mesh": (2, 1), "model_parallel": 2}
    ((key, what, _),) = tile_findings(asking(2, **mesh))
    assert key == KEY and "meshslice would move its matrices again" in what
    assert tile_findings(asking(2, model_parallel=2)) == []


def test_auto_is_the_least_on_the_wire_that_fits() -> None:
    """All heads, then those that share a KV head, and the fewer the more is to be saved."""
    shape, layout, row = hub("meta-llama/Llama-3.1-8B"), Layout(ulysses=8), 1 << 22
    memory = {"attention_heads": "auto", "recompute": "attention", "mlp_tile_tokens": 2340}
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "x"},
            "data": {"train": "x", "sequence_length": row},
            "training": {"steps": 1, "global_batch_size": 1},
            "parallel_config": {"context_parallel": 8, "context_parallel_algo": "ulysses_cp"},
            "memory": {**memory, "offload_activations": "cpu", "loss_tile_tokens": 1024},
        }
    )
    options = options_of(recipe, layout)
    needs = {
        at: memory_of(shape, layout, row, options=replace(options, at_once=at)).peak_bytes
        for at in (None, 4, 2, 1)
    }
    assert needs[None] > needs[4] > needs[2] > needs[1]

    def found(card: float, device: str = "H100") -> object:
        hardware: Any = SimpleNamespace(device=device, memory=SimpleNamespace(bytes=card))
        return fitting_heads(recipe, shape, layout, hardware)

    for at, need in needs.items():
        assert found(need / USABLE_SHARE + 1) == (at or "all")
    assert found(1e9) == 1
    assert found(1e9, device="") == "all"
