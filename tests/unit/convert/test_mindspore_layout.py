"""Rings, stages, experts and ranks mean what they mean in MindSpore Transformers."""

from __future__ import annotations

from pathlib import Path

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
