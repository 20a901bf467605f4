"""The engines side by side."""

from benchmarks.attention.engines.alone import no_communication, one_process
from benchmarks.attention.engines.deepspeed_ulysses import deepspeed_ulysses
from benchmarks.attention.engines.engine import RESULTS, Attention, Cannot, Engine
from benchmarks.attention.engines.ours import ours
from benchmarks.attention.engines.torch_ring import torch_ring
from benchmarks.attention.engines.yunchang_usp import yunchang_usp

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("one_process", "bound", one_process),
        Engine("no_communication", "bound", no_communication),
        Engine("ulysses_cp", "ours", ours("ulysses_cp")),
        Engine("ring_cp", "ours", ours("ring_cp", ulysses=1)),
        Engine("hybrid_cp", "ours", ours("hybrid_cp", ulysses=2)),
        Engine("allgather_cp", "ours", ours("allgather_cp", ulysses=1)),
        Engine("planned_cp", "ours", ours("planned_cp", ulysses=1)),
        Engine("planned_cp-refetch", "ours", ours("planned_cp", ulysses=1, keep=False)),
        Engine("planned_cp-u2", "ours", ours("planned_cp", ulysses=2)),
        Engine("planned_cp-u2-refetch", "ours", ours("planned_cp", ulysses=2, keep=False)),
        Engine("torch-alltoall", "peer", torch_ring("alltoall")),
        Engine("torch-allgather", "peer", torch_ring("allgather")),
        Engine("yunchang-u1", "peer", yunchang_usp(1)),
        Engine("yunchang-u2", "peer", yunchang_usp(2)),
        Engine("yunchang-u4", "peer", yunchang_usp(4)),
        Engine("deepspeed-ulysses", "peer", deepspeed_ulysses),
    )
}
"""Name → engine, in the order of the table."""

__all__ = ["ENGINES", "RESULTS", "Attention", "Cannot", "Engine"]
