"""What speaks against the keys of `memory`, by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.shapes import hub
from uspft.config import MemoryBlock, ParallelBlock
from uspft.families import FAMILIES
from uspft.prepare.memory_need import group_findings, tile_findings

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


@pytest.mark.parametrize("kind", [name for name, one in FAMILIES.items() if one.why_all_heads])
def test_families_that_keep_all_heads_are_refused_by_name(kind: str) -> None:
    shape = replace(hub("meta-llama/Llama-3.1-8B"), model_type=kind)
    ((key, what, remedy),) = group_findings(asking(1), shape)
    assert key == KEY and f"is 1, and `{kind}` {FAMILIES[kind].why_all_heads}" == what
    assert "llama" in remedy and kind not in remedy.split(" type ")[1].split(", ")
    assert group_findings(asking("all"), shape) == []


def test_a_mesh_takes_all_heads() -> None:
    mesh = {"tensor_parallel_algo": "meshslice", "tensor_mesh": (2, 1), "model_parallel": 2}
    ((key, what, _),) = tile_findings(asking(2, **mesh))
    assert key == KEY and "meshslice would move its matrices again" in what
    assert tile_findings(asking(2, model_parallel=2)) == []
