"""What MindSpore Transformers' own checks refuse is refused in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mindspore import converted, with_blocks

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too deep": (
        {"context": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": {"j": 1}}}}}}}}}}},
        "deeper than 10",
    ),
    "other devices": (
        {"parallel": {"device_num": 8}, "parallel_config": {"data_parallel": 4}},
        "is 8, and the degrees multiply to 4",
    ),
    "no flash attention": (
        {"parallel_config": {"context_parallel": 2}, "config": {"type": "LlamaConfig"}},
        "context_parallel above 1",
    ),
    "flash attention that is off": (
        {"parallel_config": {"context_parallel": 2}, "config": {"use_flash_attention": False}},
        "context_parallel above 1",
    ),
    "heads of Ulysses": (
        {
            "parallel_config": {"context_parallel": 8, "context_parallel_algo": "ulysses_cp"},
            "config": {"num_heads": 8, "n_kv_heads": 4},
        },
        "8 × 1 ranks splits 4 KV heads",
    ),
    "heads of the hybrid": (
        {
            "parallel_config": {
                "context_parallel": 8,
                "context_parallel_algo": "hybrid_cp",
                "ulysses_degree_in_cp": 4,
                "model_parallel": 4,
            },
            "config": {"num_heads": 40, "n_kv_heads": 8},
        },
        "is 16, over 40 heads and 8 KV heads",
    ),
    "a degree that does not divide": (
        {
            "parallel_config": {
                "context_parallel": 8,
                "context_parallel_algo": "hybrid_cp",
                "ulysses_degree_in_cp": 3,
            },
            "config": {"num_heads": 6},
        },
        "does not divide context_parallel 8",
    ),
    "copies alone": ({"config": {"fine_grain_interleave": 2}}, "without use_seq_parallel"),
    "chunks without seqpipe": (
        {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 2}},
        "pipeline_scheduler is not seqpipe",
    ),
    "chunks beside a ring": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 2},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqpipe"}},
            "config": {"use_ring_attention": True},
        },
        "beside seq_split_num 2",
    ),
    "chunks that do not divide": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 3},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqpipe"}},
        },
        "does not divide seq_length 4096",
    ),
    "seqvpp without chunks": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqvpp"}},
        },
        "seq_split_num is 1",
    ),
    "masks of short rows": (
        {"config": {"use_attn_mask_compression": True, "seq_length": 2048}},
        "not more than 2048",
    ),
    "documents beside a ring": (
        {"config": {"use_eod_attn_mask_compression": True, "use_ring_attention": True}},
        "beside use_ring_attention",
    ),
    "few micro-batches": (
        {"parallel_config": {"pipeline_stage": 4, "micro_batch_num": 2}},
        "fewer than the 4 stages",
    ),
    "offsets of another sum": (
        {
            "parallel_config": {"pipeline_stage": 4, "micro_batch_num": 4},
            "config": {"offset": [1, 0, 0, 0], "num_layers": 32},
        },
        "sums to 1, and 32 layers leave 0 over 4",
    ),
    "a mesh of another product": (
        {
            "parallel_config": {"model_parallel": 8, "use_seq_parallel": True},
            "config": {"use_3d_tensor_parallel": True, "tp_x": 2, "tp_y": 2},
        },
        "model_parallel is 8",
    ),
    "a mesh alone": (
        {
            "parallel_config": {"model_parallel": 4},
            "config": {"use_3d_tensor_parallel": True, "tp_x": 2, "tp_y": 2},
        },
        "without use_seq_parallel",
    ),
    "experts under tensor degrees": (
        {"parallel_config": {"model_parallel": 2}, "moe_config": {"expert_num": 8}},
        "without use_seq_parallel",
    ),
    "experts that do not divide": (
        {
            "parallel_config": {"data_parallel": 4, "expert_parallel": 4},
            "moe_config": {"expert_num": 6},
        },
        "does not divide 6 experts",
    ),
    "experts over other ranks": (
        {
            "parallel_config": {"data_parallel": 2, "expert_parallel": 4},
            "moe_config": {"expert_num": 8},
        },
        "does not divide data × context ranks",
    ),
    "groups of shards": (
        {
            "parallel_config": {"data_parallel": 4},
            "parallel": {"parallel_optimizer_config": {"optimizer_weight_shard_size": 3}},
        },
        "does not divide data_parallel 4",
    ),
    "rows without a strategy": ({"parallel": {"full_batch": False}}, "without dataset_strategy"),
    "another strategy": (
        {"parallel": {"full_batch": False, "dataset_strategy": [[4, 1]]}},
        "begins with 4, and data_parallel is 1",
    ),
    "long lists": (
        {"recompute_config": {"select_recompute": [1, 2]}},
        "has 2 entries for 1 stages",
    ),
    "long lists of a virtual stage": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2},
            "recompute_config": {"recompute": [[1, 2, 3], [1, 1, 1]]},
        },
        "has 3 entries for 2 stages",
    ),
    "predictions": ({"run_mode": "eval"}, "only training is converted"),
    "degrees by hierarchy": (
        {"parallel_config": {"hierarchical_context_parallel_sizes": [4, 2]}},
        "ulysses_degree_in_cp",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_their_errors_are_told_in_our_words(name: str, tmp_path: Path) -> None:
    blocks, said = WRONG[name]
    outcome = converted(tmp_path, with_blocks(**blocks))
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(said in line for line in lines), lines
