"""What speaks against experts that ranks divide, and against pipelines, beside other keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.known import recipe
from uspft.config.layout_rules import beside_stages, checkpointed, copies, experts, stages
from uspft.config.recipe import Recipe, Strategy
from uspft.config.strategies import ranks_in_lockstep
from uspft.config.types import OPEN


def asked(zero: dict[str, Any], **parallel: Any) -> Recipe:
    plain = recipe("zero1")
    degrees = plain.parallel_config.model_copy(update=parallel)
    deepspeed = plain.deepspeed.model_copy(update={"zero_optimization": zero})
    return plain.model_copy(update={"parallel_config": degrees, "deepspeed": deepspeed})


def asked_of_experts(zero: dict[str, Any], degree: int = 2, **parallel: Any) -> Recipe:
    return asked(zero, expert_parallel=degree, **parallel)


def asked_of_stages(zero: dict[str, Any], **parallel: Any) -> Recipe:
    return asked(zero, **{"pipeline_stage": 2, **parallel})


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"stage": 0}, "stage", "is 0, with parallel_config.expert_parallel 2", "1, 2 or 3"),
    ({"contiguous_gradients": False}, "contiguous_gradients", "is false", "write true"),
    ({"round_robin_gradients": True}, "round_robin_gradients", "is true", "write false"),
    ({"stage": 3, "reduce_scatter": False}, "reduce_scatter", "is false", "write true"),
    ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size", "is 2", "leave"),
]


@pytest.mark.parametrize(("zero", "key", "what", "remedy"), WRONG)
def test_what_is_wrong_beside_divided_experts_is_refused(
    zero: dict[str, Any], key: str, what: str, remedy: str
) -> None:
    ((found, said, instead),) = experts(asked_of_experts(zero))
    assert found == f"deepspeed.zero_optimization.{key}" and what in said and remedy in instead
    assert list(experts(asked_of_experts(zero, 1))) == []


def test_weights_do_not_move_where_experts_are_divided() -> None:
    ((key, what, remedy),) = experts(asked_of_experts({}, switching="move"))
    assert key == "parallel_config.switching" and "is move" in what and "in_place" in remedy


@pytest.mark.parametrize("zero", [{}, {"stage": 2, "contiguous_gradients": True}, {"stage": 3}])
def test_what_is_right_beside_divided_experts_passes(zero: dict[str, Any]) -> None:
    assert list(experts(asked_of_experts(zero))) == []


def test_ranks_that_divide_experts_run_as_many_micro_batches() -> None:
    assert ranks_in_lockstep(asked_of_experts({})) and not ranks_in_lockstep(
        asked_of_experts({}, 1)
    )
    assert ranks_in_lockstep(asked_of_experts({"stage": 2}, 1))


@pytest.mark.parametrize(
    ("zero", "virtual", "key", "what"),
    [
        ({"stage": 0}, 1, "stage", "is 0, with parallel_config.pipeline_stage 2"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, 1, "zero_hpz_partition_size", "is 2, which"),
        ({"stage": 3, "enable_sanity_checks": True}, 1, "enable_sanity_checks", "all ranks"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 2, "offload_optimizer", "stage 2"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, 2, "offload_optimizer", "num 2"),
    ],
)
def test_what_is_wrong_beside_stages_is_refused(
    zero: dict[str, Any], virtual: int, key: str, what: str
) -> None:
    ((found, said, remedy),) = beside_stages(asked_of_stages(zero, pp_interleave_num=virtual))
    assert found == f"deepspeed.zero_optimization.{key}" and what in said and remedy


@pytest.mark.parametrize(
    ("zero", "virtual"),
    [
        ({}, 1),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, 2),
        ({"stage": 3}, 2),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 1),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, 2),
        ({"stage": 1, "overlap_comm": True}, 2),
    ],
)
def test_what_is_right_beside_stages_passes(zero: dict[str, Any], virtual: int) -> None:
    assert [*beside_stages(asked_of_stages(zero, pp_interleave_num=virtual))] == []


@pytest.mark.parametrize(
    ("key", "value"), [("layers_per_stage", (2, 2)), ("offset", (0, 0)), ("offset", 1)]
)
def test_nothing_is_said_of_each_stage_while_their_number_is_open(key: str, value: Any) -> None:
    ((found, what, _),) = stages(asked_of_stages({}, pipeline_stage=OPEN, **{key: value}))
    assert found == f"parallel_config.{key}" and "pipeline_stage is auto" in what
    assert list(stages(asked_of_stages({}, pipeline_stage=OPEN, pp_interleave_num=2))) == []


def test_lists_of_checkpointed_layers_need_a_number_of_stages() -> None:
    plain = asked_of_stages({}, pipeline_stage=OPEN)
    assert list(checkpointed(plain)) == []
    memory = plain.memory.model_copy(update={"gradient_checkpointing": (2,)})
    ((key, what, _),) = checkpointed(plain.model_copy(update={"memory": memory}))
    assert key == "memory.gradient_checkpointing" and "pipeline_stage is auto" in what


@pytest.mark.parametrize(
    ("degrees", "key", "what", "remedy"),
    [
        ({}, "fine_grain_interleave", "with neither use_seq_parallel nor", "or 1"),
        ({"model_parallel": 1}, "fine_grain_interleave", "model_parallel is 1", "above 1"),
        ({"model_parallel": OPEN}, "fine_grain_interleave", "the planner is to choose", "write"),
        (
            {"tensor_parallel_algo": "meshslice", "tensor_mesh": (1, 2)},
            "fine_grain_interleave",
            "is 2, with meshslice, whose slices hide transfers already",
            "write 1 (at tensor_mesh [1, n] meshslice hides what this would)",
        ),
        ({"use_seq_parallel": True}, "", "", ""),
        ({"context_parallel": 2}, "", "", ""),
        ({"fine_grain_interleave": 1}, "", "", ""),
    ],
)
def test_copies_by_turns_hide_transfers_that_are_there(
    degrees: dict[str, Any], key: str, what: str, remedy: str
) -> None:
    several = {"model_parallel": 2, "fine_grain_interleave": 2, **degrees}
    found = list(copies(asked_of_stages({}, pipeline_stage=1, **several)))
    assert len(found) == bool(key)
    for at, said, instead in found:
        assert at == f"parallel_config.{key}" and what in said and remedy in instead


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [("memory", "attention_heads", 1), ("memory", "mlp_tile_tokens", "auto")],
)
def test_copies_by_turns_are_not_beside_what_takes_all_tokens_at_once(
    block: str, key: str, value: Any
) -> None:
    plain = asked_of_stages({}, model_parallel=2, use_seq_parallel=True, fine_grain_interleave=2)
    assert list(copies(plain)) == []
    other = getattr(plain, block).model_copy(update={key: value})
    ((at, what, remedy),) = copies(plain.model_copy(update={block: other}))
    assert at == f"{block}.{key}" and "with parallel_config.fine_grain_interleave 2" in what
    assert remedy


def test_copies_by_turns_and_layouts_that_switch() -> None:
    one = Strategy(max_length=8, fine_grain_interleave=2)
    plain = asked_of_stages({}, pipeline_stage=1, strategies=(one,))
    ((at, what, _),) = copies(plain)
    assert at == "parallel_config.strategies[0].fine_grain_interleave" and "switch" in what


def test_strategies_without_stages_have_one_number_of_checkpointed_layers() -> None:
    one = Strategy(max_length=8)
    plain = asked_of_stages({}, pipeline_stage=1, strategies=(one,))
    memory = plain.memory.model_copy(update={"gradient_checkpointing": ((1, 2), (3, 4))})
    ((key, what, _),) = checkpointed(plain.model_copy(update={"memory": memory}))
    assert key == "memory.gradient_checkpointing" and "there are 1 stages" in what
