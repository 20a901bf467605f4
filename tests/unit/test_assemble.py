"""What ranks agree on before a run is built: the job, the kernel, the calls it is tried with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kernel_sources import STALE, fake_sources, probe_on_cpu
from tests.support.kernels import FLOAT, GPU, HEADS
from tests.support.ranks import spawn
from uspft.comm import said_by_all
from uspft.config.problems import RunFailed
from uspft.job import Job
from uspft.kernels import believed_kernel, choose
from uspft.layout import Layout
from uspft.model.hf_config import heads_of
from uspft.sequence import Heads
from uspft.sequence.rows.heads import head_shapes


def choosing(rank: int) -> list[Any]:
    """What this rank chooses, and why, where no kernel but torch's works on both."""
    tried: list[str] = []
    choose.probe = probe_on_cpu  # type: ignore[assignment]
    choose.SOURCES = fake_sources(
        tried,
        flash_attn_4=STALE if rank else None,
        flash_attn_3=None if rank else "absent",
        flash_attn_2=None if rank else "broken",
        torch=None,
    )
    kernel, refused = believed_kernel("auto", [HEADS], FLOAT, GPU, said_by_all=said_by_all)
    try:
        believed_kernel("flash_attn_4", [HEADS], FLOAT, GPU, said_by_all=said_by_all)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    job: Any = SimpleNamespace(
        fingerprint=lambda: rank, shared=lambda: {"seed": 1, "optimizer.eps": rank}
    )
    differs = f"things: optimizer.eps is {rank} here and {1 - rank} on rank {1 - rank}; start every"
    with pytest.raises(RunFailed, match=differs):
        Job.require_same(job, said_by_all)
    job.fingerprint = lambda: 1
    Job.require_same(job, said_by_all)
    return [kernel.name, tried, refused, told]


def test_ranks_choose_the_same_kernel() -> None:
    first, second = spawn(2, choosing)
    assert first[0] == second[0] == "torch" and first[2] == second[2]
    assert first[1] == ["flash_attn_4", "flash_attn_2", "torch", "flash_attn_4"]
    assert second[1] == ["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch", "flash_attn_4"]
    assert first[2][:2] == [
        "flash_attn_4 refused on rank 1: ImportError: built for another torch",
        "flash_attn_3 refused on rank 0: ImportError: flash_attn_3 is not installed",
    ]
    assert first[2][2].startswith("flash_attn_2 refused on rank 0: RuntimeError: attention kernel")
    assert second[3].startswith("ImportError: built for another torch")
    assert first[3].startswith("RuntimeError: attention kernel flash_attn_4 refused on rank 1: Imp")


@pytest.mark.parametrize(
    ("heads", "ulysses", "calls"),
    [
        ((8, 2), 1, {(8, 2)}),
        ((8, 2), 2, {(4, 1)}),
        ((8, 2), 4, {(2, 1)}),
        ((6, 2), 4, {(1, 1), (2, 1)}),
        ((9, 3), 2, {(3, 1), (1, 1), (2, 1)}),
        ((3, 1), 8, {(1, 1)}),
    ],
)
def test_what_is_probed_are_the_calls_that_ranks_make(
    heads: tuple[int, int], ulysses: int, calls: set[tuple[int, int]]
) -> None:
    config = SimpleNamespace(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=None, hidden_size=72
    )
    assert heads_of(config) == (*heads, 72 // heads[0])
    shapes = head_shapes(Heads(*heads, 72 // heads[0]), Layout(ulysses=ulysses, ring=2))
    assert {(query, kv) for query, kv, _ in shapes} == calls and len(shapes) == len(calls)
    assert {dim for _, _, dim in shapes} == {72 // heads[0]}
