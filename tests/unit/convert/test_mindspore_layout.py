"""Rings, stages, experts and ranks mean what they mean in MindSpore Transformers, and what its own
checks refuse is refused in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mindspore import BASE, STAGES, converted, line_of, with_blocks


def test_rings_are_where_they_ask_for_them(tmp_path: Path) -> None:
    algorithms = {}
    for word, degree in (("colossalai_cp", 1), ("ulysses_cp", 1), ("hybrid_cp", 2)):
        for ring in (False, True):
            block = {"context_parallel": 4, "context_parallel_algo": word}
            block |= {"ulysses_degree_in_cp": degree} if degree > 1 else {}
            tree = with_blocks(parallel_config=block, config={"use_ring_attention": ring})
            values = converted(tmp_path, tree).values
            algorithms[word, ring] = values["parallel_config.context_parallel_algo"]
    assert algorithms == {
        ("colossalai_cp", False): "allgather_cp",
        ("colossalai_cp", True): "ring_cp",
        ("ulysses_cp", False): "ulysses_cp",
        ("ulysses_cp", True): "ulysses_cp",
        ("hybrid_cp", False): "hybrid_cp",
        ("hybrid_cp", True): "hybrid_cp",
    }


def test_the_loss_is_told_where_theirs_is_another(tmp_path: Path) -> None:
    key = "runner_wrapper.calculate_per_token_loss"
    assert "is off there" in line_of(converted(tmp_path, BASE), key)
    tree = with_blocks(runner_wrapper={"type": "MFTrainOneStepCell", "use_clip_grad": False})
    outcome = converted(tmp_path, tree)
    assert outcome.values["training.max_grad_norm"] is None
    tree["runner_wrapper"]["calculate_per_token_loss"] = True
    assert "is off there" not in line_of(converted(tmp_path, tree), key)


def test_the_first_rate_is_told(tmp_path: Path) -> None:
    assert "our step i has the rate of theirs i + 1" in line_of(
        converted(tmp_path, BASE), "lr_schedule.type"
    )


def test_experts_are_spread_where_there_are_any(tmp_path: Path) -> None:
    block = {"data_parallel": 4, "expert_parallel": 4}
    key = "parallel_config.expert_parallel"
    tree = with_blocks(parallel_config=block, moe_config={"expert_num": 8})
    found = converted(tmp_path, tree, model__name_or_path="org/moe")
    assert found.values[key] == 4
    alone = with_blocks(parallel_config=block, moe_config={"expert_num": 1})
    outcome = converted(tmp_path, alone)
    assert key not in outcome.values and "no experts" in line_of(outcome, key)
    core = {"data_parallel_size": 4, "expert_model_parallel_size": 2}
    assert converted(tmp_path, with_blocks(parallel_config=core)).values[key] == 2


def test_layers_of_stages(tmp_path: Path) -> None:
    config = {"layers_per_stage": [9, 8, 8, 7]}
    values = converted(tmp_path, with_blocks(parallel_config=STAGES, config=config)).values
    assert values["parallel_config.layers_per_stage"] == [9, 8, 8, 7]
    parts = {"pp_interleave_num": 2, "offset": [[1, 0, 0, 0], [0, 0, 0, 1]]}
    values = converted(tmp_path, with_blocks(parallel_config=STAGES, config=parts)).values
    assert values["parallel_config.offset"] == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert values["parallel_config.pp_interleave_num"] == 2
    one = converted(tmp_path, with_blocks(config=config))
    assert "there are no stages" in line_of(one, "model.model_config.layers_per_stage")


def test_ranks_that_do_not_fit_are_told_with_those_that_do(tmp_path: Path) -> None:
    tree = with_blocks(parallel_config={"data_parallel": 8, "model_parallel": 2})
    outcome = converted(tmp_path, tree, 6)
    key = "parallel_config.data_parallel"
    assert "8 rows do not go into 3 replicas; write --ranks 4" in line_of(outcome, key)
    tree["runner_config"]["batch_size"] = 4
    few = converted(tmp_path, tree, 2 * 16)
    assert few.values["training.micro_batch_size"] == 2
    assert few.values["training.global_batch_size"] == 32


def test_refusals_come_first_and_leave_nothing(tmp_path: Path) -> None:
    tree = with_blocks(optimizer={"type": "Came"}, context={"mode": 0}, run_mode="train")
    lines = converted(tmp_path, tree).lines()
    weights = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert weights == ["refused", "changed", "ignored"]


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
        "together with seq_split_num 2",
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
        "together with use_ring_attention",
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
